"""The single stage of a model of one's own: its parameters in ZeRO's buckets, its buffers, and what it draws."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from shoal.base.boxes import Box, Piece
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce
from shoal.engine.models.cache import Slice
from shoal.engine.models.initial import stream_key
from shoal.engine.own.definition import OwnModel
from shoal.engine.own.samples import OwnBatch
from shoal.engine.parallel.apply import LocalStage, materialise
from shoal.engine.parallel.placement import replicate
from shoal.engine.parallel.zero.rank_parameters import RankParameters
from shoal.engine.parallel.zero.zero3_hooks import PrefetchHooks
from shoal.engine.parallel.zero.zero_engine import ShardedParameters
from shoal.engine.precision.policy import Policy


class Statistics:
    """Buffers that change in forwards, such as the running means of batch norms.

    Each micro-batch of a step starts with the step's first values; the next step starts with the mean of what all
    micro-batches of all replicas made of them. So they depend on the size of a micro-batch, and not on the layout.
    Whole numbers, such as counters, take the largest.
    """

    def __init__(self, module: nn.Module):
        kept = module.state_dict(keep_vars=True)
        self.buffers = {name: b for name, b in module.named_buffers() if name in kept and b.numel()}
        self._start: dict[str, Tensor] = {}
        self._made: dict[str, Tensor] = {}
        self._passes = 0

    def begin(self) -> None:
        """Begin a step, after one that did not end."""
        self.cancel()
        self._start = {name: buffer.clone() for name, buffer in self.buffers.items()}
        self._made, self._passes = {}, 0

    def rewind(self) -> None:
        """Begin a micro-batch."""
        for name, start in self._start.items():
            self.buffers[name].copy_(start)

    def cancel(self) -> None:
        """Go back to the values before the step, if one began and did not end."""
        self.rewind()
        self._start = {}

    @torch.no_grad()
    def collect(self) -> None:
        """End a micro-batch."""
        self._passes += 1
        for name, buffer in self.buffers.items():
            made = buffer.double() if buffer.is_floating_point() else buffer
            before = self._made.get(name)
            if before is None:
                self._made[name] = made.clone()
            else:
                self._made[name] = before + made if buffer.is_floating_point() else torch.maximum(before, made)

    @torch.no_grad()
    def end(self, mesh: Mesh) -> None:
        """End a step. Collective over the replicas."""
        for name, buffer in self.buffers.items():
            mean = buffer.is_floating_point()
            total = all_reduce(self._made[name], mesh.group("dp"), ReduceOp.SUM if mean else ReduceOp.MAX)
            buffer.copy_(total / (self._passes * mesh.size("dp")) if mean else total)
        self._start = {}


def draw_as(seed: int, batch: OwnBatch) -> None:
    """Seed torch's generators by a micro-batch, so that dropout and the like do not depend on the layout."""
    torch.manual_seed(stream_key(seed, f"batch {batch.first}") & (1 << 63) - 1)


class OwnStage(LocalStage):
    """The only stage of an own model.

    Attributes:
        counted: number of terms of the losses since it was last set to 0, float64 [].
    """

    def __init__(self, own: OwnModel, module: nn.Module, parameters: ShardedParameters, policy: Policy, seed: int):
        self.index = self.part = 0
        self.own, self.module, self.parameters = own, module, parameters  # type: ignore[assignment]
        self.policy, self.seed = policy, seed
        self.statistics = Statistics(module)
        device = parameters.mesh.device
        self.counted = torch.zeros((), dtype=torch.float64, device=device)
        self.buckets = [] if parameters.zero < 3 else parameters.buckets

    def forward(self, batch: OwnBatch, hidden: Tensor | None, part: Slice | None) -> Tensor:  # type: ignore[override]
        """Return the summed loss of a micro-batch; without gradients, as in a validation."""
        training = torch.is_grad_enabled()
        batch = batch.map(lambda tensor: tensor.to(self.policy.compute) if tensor.is_floating_point() else tensor)
        for bucket in self.buckets:
            bucket.gather()
        for bucket in self.buckets:
            bucket.wait()
        if training:
            self.statistics.rewind()
            draw_as(self.seed, batch)
        self.module.train(training)
        loss, terms = self.own.loss(self.module, batch.values)
        if training:
            self.statistics.collect()
        else:
            for bucket in self.buckets:
                bucket.free()
        self.counted += terms
        return loss

    def state(self, rank: int) -> dict[str, list[Piece]]:
        """Return, by name, the values that are saved besides the trained parameters: buffers and frozen parameters."""
        frozen = {name: p for name, p in self.module.named_parameters() if not p.requires_grad}
        return {
            name: [Piece(tuple(value.shape), Box.full(tuple(value.shape)), value.data, rank == 0)]
            for name, value in (frozen | self.statistics.buffers).items()
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


def build_own_stage(own: OwnModel, mesh: Mesh, policy: Policy, seed: int) -> OwnStage:
    """Build the stage with its parameters in buckets; `OwnStage.fill` or a checkpoint fills them."""
    module = own.build(seed)
    for parameter in module.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(mesh.device, policy.compute)
    wide = policy.compute if policy.compute == torch.float64 else None
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            owner._buffers[name] = buffer.to(mesh.device, wide if buffer.is_floating_point() else None)
    placements = {
        name: replicate(name, parameter, mesh, partial=False)
        for name, parameter in module.named_parameters() if parameter.requires_grad
    }
    unclaimed = materialise(module, placements, policy.compute, mesh.device)
    units = list(_units(own, module, mesh.layout.zero == 3))
    owned = [list(dict.fromkeys(p for each in modules for p in each.parameters())) for modules in units]
    parameters = ShardedParameters(
        [[(p, unclaimed.pop(p)) for p in unit if p in unclaimed] for unit in owned], mesh, policy
    )
    stage = OwnStage(own, module, parameters, policy, seed)
    if mesh.layout.zero == 3 and own.blocks:
        blocks = {p for unit in owned[:-1] for p in unit}
        stage.buckets = [b for b in parameters.buckets if not all(slot.parameter in blocks for slot in b.slots)]
        needed = [
            [bucket for bucket in parameters.buckets if any(slot.parameter in set(unit) for slot in bucket.slots)]
            for unit in owned[:-1]
        ]
        keep = 0 if mesh.layout.reshard_after_forward else len(needed)
        PrefetchHooks(list(zip(units[:-1], needed, strict=True)), parameters, ahead=mesh.layout.prefetch, keep=keep)
    return stage


def _units(own: OwnModel, module: nn.Module, sharded: bool) -> Iterator[list[nn.Module]]:
    """Yield the groups of modules whose parameters are adjacent; in ZeRO-3, each block and then the rest."""
    if not sharded:
        yield from ([each] for each in module.modules() if next(each.parameters(recurse=False), None) is not None)
        return
    for name in own.blocks:
        yield [module.get_submodule(name)]
    yield [module]
