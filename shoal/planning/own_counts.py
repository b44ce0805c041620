"""Counts of a model of one's own, from one micro-batch on fake tensors.

The module's own forward and backward run without values (`torch._subclasses.FakeTensorMode`), or with values on the CPU
if they need them. Their FLOPs and saved tensors are counted, in a pipeline for each module of its chain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from shoal.engine.own.blocks import group_parameters
from shoal.engine.own.chain import Chain, find_chain, get_input
from shoal.engine.own.definition import OwnModel
from shoal.engine.own.flops import count_flops
from shoal.engine.own.formats import autocast
from shoal.engine.own.samples import OwnBatch, OwnDataset
from shoal.engine.own.split_backward import LateGradients
from shoal.engine.own.tensor.layers import InputSplitLinear, OutputSplitLinear, SplitEmbedding, SplitRanks
from shoal.engine.own.trial import run_first
from shoal.engine.parallel.zero.gradients import Term
from shoal.engine.precision.policy import POLICIES, Policy
from shoal.engine.sharding.loss import LossPlan
from shoal.pipeline.program import Program
from shoal.spec.config import RunConfig


@dataclass(frozen=True)
class OwnCounts:
    """Counts of one micro-batch on one of the ranks that split the layers: of the model, of a stage of its pipeline, or
    of a module of its chain.
    """

    parameters: int = 0  # trained elements of the rank
    in_blocks: int = 0  # those in the blocks of ZeRO-3: the definition's, or the modules of the stage
    blocks: int = 0  # number of these
    frozen: int = 0  # bytes of buffers and of parameters that are not trained
    flops: int = 0  # of matrix products, forward and backward
    saved: int = 0  # bytes kept for the backward, without the parameters
    kept: int = 0  # the same where blocks are recomputed: their inputs, and all outside of them
    rebuilt: int = 0  # bytes that the largest block keeps, as it is recomputed
    again: int = 0  # FLOPs of the blocks' forward
    weight_flops: int = 0  # FLOPs of weight gradients that a schedule may compute later
    between: int = 0  # bytes that these are computed from
    sent: int = 0  # bytes that tensor parallelism sums, forward and backward
    sums: int = 0  # number of these sums
    real: bool = False  # whether values were needed
    forward_flops: int = 0  # FLOPs of the forward alone
    message: int = 0  # bytes of the tensor that a stage gets from the one before
    plan: LossPlan | None = None  # of the operators, if the search splits them

    @staticmethod
    def add(counts: Sequence[OwnCounts]) -> OwnCounts:
        """Return the counts of modules or stages in order, together; each stage has its copy of the buffers."""
        sums = {name: sum(getattr(each, name) for each in counts) for name in SUMS}
        return replace(counts[0], **sums, rebuilt=max(each.rebuilt for each in counts))

    def extend(self, two: OwnCounts, samples: int) -> OwnCounts:
        """Return the counts of some samples, given these of one sample and the counts of two."""
        of_both = {name: (getattr(self, name), getattr(two, name)) for name in GROWING}
        return replace(self, **{name: a + (samples - 1) * (b - a) for name, (a, b) in of_both.items()})


ACTIVE = ("flops", "forward_flops", "saved", "sent", "kept", "again", "weight_flops", "between")
SUMS = (*ACTIVE, "sums", "parameters", "in_blocks", "blocks", "frozen")
GROWING = (*ACTIVE, "rebuilt", "message")
"""Counts that add up over modules and stages, and counts that grow with the samples of a micro-batch."""


@dataclass(frozen=True)
class ChainCounts:
    """Counts of a chain of modules."""

    chain: Chain
    full: OwnCounts  # of the model
    sizes: dict[str, int]  # elements of each trained parameter on the rank
    in_blocks: frozenset[str]  # names of those that only one module uses
    # of each, with what runs between it and the next, the first with all before it; parameters are in `sizes`
    modules: tuple[OwnCounts, ...]

    def assign(self, program: Program, *, sequence_parallel: bool = False) -> list[OwnCounts]:
        """Return the counts of each stage, whose modules are those that training would choose.

        Raises:
            UsageError: as in `Chain.assign` and `Chain.find_shared`.
        """
        parts = self.chain.assign(program, sequence_parallel=sequence_parallel)
        self.chain.find_shared(parts)
        found = []
        for part in parts:
            used = [name for name in self.sizes if self.chain.uses(name, part)]
            found.append(replace(
                OwnCounts.add(self.modules[part.start : part.stop]), parameters=sum(self.sizes[name] for name in used),
                in_blocks=sum(self.sizes[name] for name in used if name in self.in_blocks), blocks=len(part),
                frozen=self.full.frozen, real=self.full.real,
            ))  # fmt: skip
        return found

    def extend(self, two: ChainCounts, samples: int) -> ChainCounts:
        """Return the counts of some samples, given these of one sample and the counts of two."""
        modules = zip(self.modules, two.modules, strict=True)
        return replace(
            self, full=self.full.extend(two.full, samples), modules=tuple(a.extend(b, samples) for a, b in modules)
        )


def count_own_model(own: OwnModel, config: RunConfig) -> OwnCounts:
    """Count the first micro-batch, on fake tensors if that is possible; see `run_first`.

    Raises:
        UsageError: the model or its loss fails.
    """
    return _run(own, config, None).full


def count_chain(own: OwnModel, config: RunConfig) -> ChainCounts:
    """Count the first micro-batch by the modules of the pipeline's chain.

    Raises:
        UsageError: the model or its loss fails, or its modules are no chain.
    """
    policy, seed = POLICIES[config.train.precision], config.train.seed
    chain = find_chain(own, policy, seed, OwnDataset(own, "train", seed).batch(range(config.parallel.micro_batch)))
    counter = _run(own, config, chain)
    messages = [0, *(sum(crossing.bytes for crossing in each) for each in chain.crossings[1:])]
    modules = tuple(
        OwnCounts(message=message, **{name: of[i] for name, of in counter.found.items()})
        for i, message in enumerate(messages)
    )
    alone = {name for name in counter.sizes if len(chain.parts.get(name, ())) < 2}
    in_blocks = frozenset(name for name in alone if name.startswith(tuple(f"{link}." for link in chain.names)))
    return ChainCounts(chain, counter.full, counter.sizes, in_blocks, modules)


def _run(own: OwnModel, config: RunConfig, chain: Chain | None) -> _Counter:
    policy, seed = POLICIES[config.train.precision], config.train.seed
    batch = OwnDataset(own, "train", seed).batch(range(config.parallel.micro_batch))
    count, ranks = partial(_Counter, own, policy, chain), SplitRanks.alone(config.parallel)
    counter, real = run_first(own, policy, seed, batch, count, ranks)
    counter.full = replace(counter.full, real=real)
    return counter


class _CountedLate(LateGradients):
    """Weight gradients that a schedule may compute later, of a module that no rank holds."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.found: list[tuple[nn.Parameter, Term, Sequence[Tensor]]] = []

    def trains(self, weight: object) -> bool:
        return isinstance(weight, nn.Parameter) and weight.requires_grad

    def waits(self) -> bool:
        return True

    def add(self, weight: nn.Parameter, term: Term, kept: Sequence[Tensor]) -> None:
        self.found.append((weight, term, kept))


class _Counter:
    """Counts of a module's forward and backward, in total and by the links of a chain.

    Attributes:
        found: by the name in `OwnCounts` and the index of the link that runs; ``rebuilt`` and ``again`` by the block's,
            in a chain the link's.
    """

    def __init__(self, own: OwnModel, policy: Policy, chain: Chain | None, module: nn.Module, batch: OwnBatch):
        self._at, self._block, self._flops, self._runs = 0, -1, 0, True
        names = ("flops", "forward_flops", "saved", "sent", "sums", "kept", "rebuilt", "again", "weight_flops",
                 "between")
        self.found: dict[str, Any] = {name: Counter() for name in names}
        self._link, self._begun = 0, 0  # the link whose FLOPs are counted, and those before it
        self._entered: Tensor | None = None
        late = _CountedLate(module) if chain else None
        for i, name in enumerate(chain.names if chain else ()):
            module.get_submodule(name).register_forward_pre_hook(partial(self._enter_link, i), with_kwargs=True)
        for i, name in enumerate(own.name_blocks(module)):
            block = module.get_submodule(name)
            block.register_forward_pre_hook(partial(self._enter_block, i), with_kwargs=True)
            block.register_forward_hook(lambda *_: self._leave_block())
        for layer in module.modules():
            if isinstance(layer, InputSplitLinear):
                layer.register_forward_hook(
                    lambda layer, _, y: self._send(y, layer.ranks.size if layer.scatters else 1))
            elif isinstance(layer, SplitEmbedding):
                layer.register_forward_hook(lambda _, args, y: self._send(y))
            elif isinstance(layer, OutputSplitLinear):
                layer.register_forward_pre_hook(lambda layer, args: self._enter(layer.ranks, args[0]))
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        blocks = [module.get_submodule(name) for name in own.blocks]
        grouped = {id(p) for group in group_parameters(module, blocks)[:-1] for p in group} if blocks else set()
        untrained = [x for x in (*module.parameters(), *module.buffers()) if not x.requires_grad]
        self._seen = {_storage(x) for x in (*trained.values(), *untrained, *batch.tensors())}
        with count_flops() as self._counter, saved_tensors_hooks(self._keep, lambda tensor: tensor):
            with autocast(policy, torch.device("cpu")):
                loss, _, _ = own.compute(module, batch.values)
            forward, self._runs = self._counter.get_total_flops(), False
            self._count_link(self._link)
            self.found["forward_flops"] = self.found["flops"].copy()
            loss.backward()
            self._count_link(0)
            if chain and late:
                self._count_late(late, {p: max(chain.parts.get(name, {0})) for name, p in trained.items()})
        self.sizes = {name: p.numel() for name, p in trained.items()}
        self.full = OwnCounts(
            parameters=sum(self.sizes.values()), blocks=len(blocks),
            in_blocks=sum(p.numel() for p in trained.values() if id(p) in grouped),
            frozen=sum(x.numel() * x.element_size() for x in untrained), flops=self._counter.get_total_flops(),
            forward_flops=forward, rebuilt=max(self.found["rebuilt"].values(), default=0),
            **{name: self.found[name].total() for name in ("saved", "sent", "sums", "kept", "again")},
        )  # fmt: skip

    def _count_late(self, late: _CountedLate, links: dict[nn.Parameter, int]) -> None:
        """Count weight gradients, and what they are computed from, by the last module that uses the weight."""
        seen = set[int]()
        for weight, term, kept in late.found:
            before, link = self._counter.get_total_flops(), max(0, links[weight])
            term(torch.empty_like(weight), True)
            flops = self._counter.get_total_flops() - before
            self.found["weight_flops"][link] += flops
            self.found["flops"][link] += flops
            for tensor in kept:
                if _storage(tensor) not in seen:
                    seen.add(_storage(tensor))
                    self.found["between"][link] += tensor.untyped_storage().nbytes()

    def _keep(self, tensor: Tensor) -> Tensor:
        if _storage(tensor) not in self._seen:
            self._seen.add(_storage(tensor))
            size = tensor.untyped_storage().nbytes()
            self.found["saved"][self._at] += size
            if self._block < 0:
                self.found["kept"][self._at] += size
            else:
                self.found["rebuilt"][self._block] += size
        return tensor

    def _enter_link(self, link: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._at = link
        if not self._runs or not link:  # the first has all before it
            return
        self._count_link(link)
        x = get_input(args, kwargs)
        if x.requires_grad:  # what follows its gradient is the backward of the link before
            # A link that returns its input has the same gradient, and its hook comes after that of the next link.
            x.register_hook(lambda _: self._count_link(min(self._link, link - 1)))

    def _count_link(self, following: int) -> None:
        """Count the FLOPs since the last call for the current link, and those from now on for the following one."""
        done = self._counter.get_total_flops()
        self.found["flops"][self._link] += done - self._begun
        self._link, self._begun = following, done

    def _enter_block(self, block: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._runs:  # it recomputes by itself
            return
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and x.requires_grad:
                self.found["kept"][self._at] += x.numel() * x.element_size()
        self._block, self._flops = block, self._counter.get_total_flops()

    def _leave_block(self) -> None:
        if not self._runs:
            return
        self.found["again"][self._block] += self._counter.get_total_flops() - self._flops
        self._block = -1

    def _enter(self, ranks: SplitRanks, x: Tensor) -> None:
        if x is not self._entered:  # queries, keys and values share one
            self._entered = x
            self._send(x, 1 if ranks.find_part(x) is None else 1.5)  # gathered twice and scattered once

    def _send(self, x: Tensor, times: float = 1) -> None:
        """Count a sum over ranks: of the output of a layer split by input, or the gradient of the input of others."""
        self.found["sums"][self._at] += 1
        self.found["sent"][self._at] += int(x.numel() * x.element_size() * times)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
