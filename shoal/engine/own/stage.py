"""A pipeline stage of a model of one's own, or all of it: parameters in ZeRO's buckets, buffers, and random draws."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from shoal.base.boxes import Piece
from shoal.base.errors import UsageError
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce, to_host
from shoal.engine.models.cache import Slice
from shoal.engine.models.initial import stream_key
from shoal.engine.own.blocks import Blocks, group_parameters, recompute_modules
from shoal.engine.own.chain import Chain
from shoal.engine.own.definition import OwnModel, seed_generators
from shoal.engine.own.formats import autocast, set_formats, widen
from shoal.engine.own.links import LinkSeeds, StageLinks
from shoal.engine.own.samples import OwnBatch
from shoal.engine.own.split_backward import LateGradients
from shoal.engine.own.tensor.draws import Part, split_draws
from shoal.engine.own.tensor.layers import SplitRanks
from shoal.engine.own.tensor.table import apply_table
from shoal.engine.own.user_code import explained
from shoal.engine.parallel.apply import LocalStage, materialise
from shoal.engine.parallel.placement import ENDS, ParamPlacement, replicate
from shoal.engine.parallel.zero.bucket import same_memory
from shoal.engine.parallel.zero.rank_parameters import RankParameters
from shoal.engine.parallel.zero.zero_engine import ShardedParameters
from shoal.engine.precision.policy import Policy
from shoal.engine.sharding.loss import LossPlan, PlannedLoss


class Statistics:
    """Buffers that change in forwards, such as the running means of batch norms.

    Each micro-batch of a step starts with the step's first values; the next step starts with the mean of what all
    micro-batches of all replicas made of them. So they depend on the size of a micro-batch, and not on the layout.
    Whole numbers, such as counters, take the largest.

    Args:
        renewed: whether each micro-batch gets new tensors, as the backward of others, which run forward before it, may
            need theirs unchanged.
    """

    def __init__(self, module: nn.Module, *, renewed: bool = False):
        self.module, kept = module, module.state_dict(keep_vars=True)
        self._owners: dict[str, list[tuple[nn.Module, str]]] = {}
        for name, buffer in module.named_buffers() if renewed else ():
            self._owners[name] = [
                (owner, key) for owner in module.modules() for key, held in owner._buffers.items() if held is buffer
            ]
        self._names = [name for name, b in module.named_buffers() if name in kept and b.numel()]
        self._start: dict[str, Tensor] = {}
        self._made: dict[str, Tensor] = {}
        self._passes = 0

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers by name. A forward may assign new tensors, so none is kept here."""
        named = dict(self.module.named_buffers())
        return {name: named[name].detach() for name in self._names}

    def begin(self) -> None:
        """Begin a step or a validation."""
        self._start = {name: buffer.clone() for name, buffer in self.buffers.items()}
        self._made, self._passes = {}, 0

    def rewind(self) -> None:
        """Begin a micro-batch."""
        for name, buffer in self.buffers.items() if self._start else ():
            for owner, key in self._owners.get(name, ()):
                owner._buffers[key] = self._start[name].clone()
            if name not in self._owners:
                buffer.copy_(self._start[name])

    def cancel(self) -> None:
        """Go back to the values before the step, if one began and did not end."""
        self.rewind()
        self._start = {}

    def collect(self) -> None:
        """End a micro-batch."""
        self._passes += 1
        for name, buffer in self.buffers.items():
            made, before = _wide(buffer), self._made.get(name)
            if before is not None:
                made = before + made if made.is_floating_point() else torch.maximum(before, made)
            self._made[name] = made

    def average(self, replicas: Group | None) -> None:
        """Average the buffers of replicas that have made steps of their own. Collective over them."""
        self.begin()
        self.collect()
        self.end(replicas, other=True)

    def end(self, replicas: Group | None, *, other: bool = False) -> None:
        """End a step. Collective over the replicas.

        Args:
            other: whether replicas began it with other values.
        """
        buffers = self.buffers
        if buffers and not other:
            changed = torch.stack([self._changed(name) for name in buffers])
            some = to_host(all_reduce(changed, replicas, ReduceOp.MAX))  # masks and the like are not sent
            buffers = {name: buffer for (name, buffer), one in zip(buffers.items(), some, strict=True) if one}
        for mean, operation in ((True, ReduceOp.SUM), (False, ReduceOp.MAX)):
            names = [name for name in buffers if self._made[name].is_floating_point() == mean]
            if not names:
                continue
            total = all_reduce(torch.cat([self._made[name].flatten() for name in names]), replicas, operation)
            if mean:
                total /= self._passes * (replicas.size() if replicas else 1)
            for name, values in zip(names, total.split([self._made[n].numel() for n in names]), strict=True):
                shaped, buffer = values.view(self._made[name].shape), buffers[name]
                buffer.copy_(torch.view_as_complex(shaped) if buffer.is_complex() else shaped)
        self._start = {}

    def _changed(self, name: str) -> Tensor:
        start, made = _wide(self._start[name]), self._made[name]
        return (made != (start * self._passes if made.is_floating_point() else start)).any().double()


def _wide(buffer: Tensor) -> Tensor:
    """Copy a buffer as float64, with the parts of complex numbers as a last dimension, or as int64."""
    if buffer.is_complex():
        buffer = torch.view_as_real(buffer)
    dtype = torch.float64 if buffer.is_floating_point() else torch.int64
    return buffer.to(dtype, copy=True, memory_format=torch.contiguous_format)


def draw_as(seed: int, batch: OwnBatch) -> None:
    """Seed torch's generators by a micro-batch, so that dropout and the like do not depend on the layout."""
    seed_generators(stream_key(seed, f"batch {batch.first}"))


ALL_METRICS = "Return all of them for each batch, with 0 terms where there are none."


def show_names(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"


class OwnStage(LocalStage):
    """The only stage of an own model, or one of its pipeline.

    Attributes:
        seeds: of what the modules of its chain draw.
        links: the modules of the chain that the stage computes; None for the only stage.
        counted: number of terms of the losses since `begin`, float64 [].
        terms: of the last micro-batch, float64 [].
        metrics: sum and number of terms of each metric since then, float64 [2].
        names: names of the metrics, from a pipeline's first batch, else from the first batch since then.
        buckets: parameters outside of the blocks, which ZeRO-3 gathers for each micro-batch.
        ranks: those that split its layers, if any.
        blocks: what ZeRO-3 gathers one after the other; None without blocks.
        planned: the loss as a plan of the search splits it, if it does.
        called: what an error calls the loss.
    """

    further, keeps_views = 0, True

    def __init__(
        self, own: OwnModel, module: nn.Module, parameters: ShardedParameters, policy: Policy, seed: int,
        ranks: SplitRanks | None, seeds: LinkSeeds, links: StageLinks | None, index: int,
    ):
        self.index = self.part = index
        self.ranks, self.seeds, self.links = ranks, seeds, links
        self.own, self.module, self.parameters = own, module, parameters  # type: ignore[assignment]
        self.policy, self.seed = policy, seed
        self.statistics = Statistics(module, renewed=links is not None)
        device = parameters.mesh.device
        self.counted = torch.zeros((), dtype=torch.float64, device=device)
        self.terms = self.counted
        self.metrics: dict[str, Tensor] = {}
        self.names: tuple[str, ...] | None = None
        self.buckets = [] if parameters.zero < 3 else parameters.buckets
        self.blocks: Blocks | None = None
        self.planned: PlannedLoss | None = None
        self.called = f"its loss() with layers split over {ranks.describe()}" if ranks else "its loss()"

    def begin(self) -> None:
        """Begin a step or a validation.

        Raises:
            UsageError: a forward has moved a parameter to other memory.
        """
        for bucket in self.parameters.buckets:
            for slot in bucket.slots:
                if not same_memory(slot.parameter, bucket.full, slot.start):
                    raise UsageError(
                        f"model.module: its forward moves {slot.placement.name} to other memory, where no update "
                        "reaches it.\n  Assign nothing to a parameter's .data; copy_() changes it in place.")
        self.counted.zero_()
        self.metrics.clear()
        self.names = self.links.chain.metrics if self.links else None
        self.statistics.begin()

    def forward(  # type: ignore[override]
        self, batch: OwnBatch, hidden: Sequence[Tensor] | None, part: Slice | None
    ) -> Any:
        """Return the summed loss [] of a micro-batch, or on an earlier stage the tensors for the next one.

        Raises:
            UsageError: the loss fails, or is not as `OwnModel` says, or the forward does not run the blocks in order.
        """
        training, wide = torch.is_grad_enabled(), torch.promote_types(self.policy.compute, torch.float32)
        batch = widen(batch, self.policy)
        self.gather()
        self.statistics.rewind()
        draw_as(self.seed, batch)
        self.seeds.first = batch.first
        self.module.train(training)
        cast = autocast(self.policy, self.parameters.mesh.device)
        with cast, self.blocks.forward() if self.blocks else nullcontext(), explained(self.called):
            loss_of = self.planned.compute if self.planned else partial(self.own.compute, self.module)
            compute = partial(loss_of, batch.values)
            found = self.links.run(compute, hidden or ()) if self.links else compute()
        if self.ranks:
            self.ranks.forget()
        if training:
            self.statistics.collect()
        else:
            for bucket in self.buckets:
                bucket.free()
        if isinstance(found, list):
            return found
        loss, terms, metrics = found
        self.terms = torch.as_tensor(terms, dtype=torch.float64, device=self.counted.device)
        self.counted += self.terms
        names = tuple(sorted(metrics))
        if self.names is None:
            self.names = names
        if names != self.names:
            raise UsageError(f"model.module: the metrics of its loss() are {show_names(names)}, and of another batch "
                             f"{show_names(self.names)}.\n  {ALL_METRICS}")
        for name, values in metrics.items():
            if name not in self.metrics:
                self.metrics[name] = torch.zeros(2, dtype=torch.float64, device=self.counted.device)
            for total, value in zip(self.metrics[name], values, strict=True):
                total += value
        return loss.to(wide)  # the factor on it may not fit into float16

    def gather(self) -> None:
        """Gather the parameters that a forward or backward needs in ZeRO-3, besides the ones of blocks."""
        for bucket in self.buckets:
            bucket.gather()
        for bucket in self.buckets:
            bucket.wait()

    def state(self) -> dict[str, list[Piece]]:
        """Return, by name, the values that are saved besides the trained parameters: buffers and frozen parameters."""
        links, mesh = self.links, self.parameters.mesh
        frozen = {name: p for name, p in self.module.named_parameters() if not p.requires_grad}
        first = mesh.index("dp") == mesh.index("tp") == 0
        return {
            name: [Piece.full(value.data, first)]
            for name, value in (frozen | self.statistics.buffers).items() if links is None or links.keeps(name)
        }

    def fill(self, values: nn.Module) -> None:
        """Set this rank's shards to the values of an unsharded module."""
        given = dict(values.named_parameters())
        parameters = RankParameters([self.parameters])
        with torch.no_grad():
            for name, pieces in parameters.weights().items():
                for piece in pieces:
                    piece.tensor.copy_(given[name][piece.box.slices])
            parameters.gather()


def build_own_stage(
    own: OwnModel, mesh: Mesh, policy: Policy, seed: int, draws: Mapping[str, Sequence[Part]],
    chain: Chain | None = None, part: range = range(0), index: int = 0, shared: frozenset[str] = frozenset(),
    holders: tuple[int, ...] = (), *, splits: bool = False,
) -> OwnStage:
    """Build a stage with its parameters in buckets; `OwnStage.fill` or a checkpoint fills them.

    Args:
        draws: what the ranks of split layers see of dropout (`find_parts`).
        chain: of a pipeline; None for the full module.
        part: the stage's modules of the chain.
    """
    module = own.build(seed)
    set_formats(module, policy, mesh.device)
    ranks, split = SplitRanks.among(mesh), dict[str, ParamPlacement]()
    plan = own.tensor_parallel if mesh.size("tp") > 1 and isinstance(own.tensor_parallel, LossPlan) else None
    if plan:
        split = plan.split(module, mesh.index("tp"))
    elif ranks:
        edges = {name for i, name in enumerate(chain.names) if i in (part.start, part.stop)} if chain else ()
        split = apply_table(module, own.tensor_parallel, ranks, edges, experts=own.expert_parallel)
        split_draws(module, ranks, draws)
    seeds = LinkSeeds(own, module, seed)
    links = StageLinks(chain, part, module, policy.compute, mesh.device) if chain else None
    late = LateGradients(module) if splits else None  # before recomputation, which runs what it changes
    if mesh.layout.recompute == "full":
        names = own.name_blocks(module)
        recompute_modules(module.get_submodule(name) for i, name in enumerate(names) if not chain or i in part)
    placements = {
        name: split.get(name) or replicate(name, parameter, mesh, partial=False)
        for name, parameter in module.named_parameters() if parameter.requires_grad
    }
    for name in shared & placements.keys():
        each = placements[name]
        placements[name] = replace(
            each, sum_over=(*each.sum_over, ENDS), copies=len(holders) * each.copies,
            stages=len(holders) * each.stages, primary=each.primary and index == holders[0],
        )
    unclaimed = materialise(module, placements, policy.compute, mesh.device)
    blocks: Sequence[str] = () if plan else own.blocks
    if chain:
        blocks = chain.names[part.start : part.stop]
    blocks = blocks if mesh.layout.zero == 3 else ()
    groups = group_parameters(module, [module.get_submodule(name) for name in blocks])
    parameters = ShardedParameters(
        [[(p, unclaimed.pop(p)) for p in group if p in unclaimed] for group in groups], mesh, policy
    )
    if late:
        late.connect(parameters)
    _keep_weights_in_place(module)
    stage = OwnStage(own, module, parameters, policy, seed, ranks, seeds, links, index)
    if plan:
        stage.planned = PlannedLoss(plan, module, mesh)
        stage.planned.check_same()
    if blocks:
        stage.blocks = Blocks(blocks, module, groups, parameters)
        stage.buckets = stage.blocks.rest
    return stage


def _keep_weights_in_place(module: nn.Module) -> None:
    """Make recurrent layers leave their weights in the buckets: on CUDA they would move them into memory of their own,
    when they are first called with other parameters, and where a model asks for it."""
    for recurrent in (each for each in module.modules() if isinstance(each, nn.RNNBase)):
        recurrent.flatten_parameters = _leave  # type: ignore[method-assign]
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk of memory")


def _leave() -> None: ...
