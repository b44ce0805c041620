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
from shoal.engine.own.chain import Chain, find_chain
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
    """Counts of one micro-batch on one of the ranks that split the layers, of the model or of a stage of its pipeline.

    Attributes:
        parameters: trained elements of the rank.
        in_blocks: those in the blocks of ZeRO-3: the definition's, or the modules of the stage.
        blocks: number of these.
        frozen: bytes of buffers and of parameters that are not trained.
        flops: of matrix products, forward and backward.
        saved: bytes kept for the backward, without the parameters.
        kept: the same where blocks are recomputed: their inputs, and all outside of them.
        rebuilt: bytes that the largest block keeps, as it is recomputed.
        again: FLOPs of the blocks' forward.
        weight_flops: FLOPs of weight gradients that a schedule may compute later.
        between: bytes that these are computed from.
        sent: bytes that tensor parallelism sums, forward and backward.
        real: whether values were needed.
        forward_flops: FLOPs of the forward alone.
        message: bytes of the tensor that a stage gets from the one before.
        plan: of the operators, if the search splits them.
    """

    parameters: int
    in_blocks: int
    frozen: int
    flops: int
    saved: int
    sent: int
    real: bool = False
    forward_flops: int = 0
    message: int = 0
    kept: int = 0
    rebuilt: int = 0
    again: int = 0
    weight_flops: int = 0
    between: int = 0
    blocks: int = 0
    plan: LossPlan | None = None


@dataclass(frozen=True)
class ChainCounts:
    """Counts of the modules of a chain, each with what runs between it and the next; the first with all before it.

    Attributes:
        full: of the model.
        sizes: elements of each trained parameter on the rank.
        in_blocks: names of those that only one module uses.
        saved, sent, messages, kept, rebuilt, again, weight_flops, between: as in `OwnCounts`, of each module.
    """

    chain: Chain
    full: OwnCounts
    sizes: dict[str, int]
    in_blocks: frozenset[str]
    saved: tuple[int, ...]
    sent: tuple[int, ...]
    messages: tuple[int, ...]
    kept: tuple[int, ...]
    rebuilt: tuple[int, ...]
    again: tuple[int, ...]
    weight_flops: tuple[int, ...]
    between: tuple[int, ...]

    def assign(self, program: Program, *, sequence_parallel: bool = False) -> list[OwnCounts]:
        """Return the counts of each stage, whose modules are those that training would choose.

        Raises:
            UsageError: as in `Chain.assign` and `Chain.find_shared`.
        """
        chain, parts = self.chain, self.chain.assign(program, sequence_parallel=sequence_parallel)
        chain.find_shared(parts)
        work = chain.flops if any(chain.flops) else (1,) * len(chain.names)
        found = []
        for part in parts:
            used = [name for name in self.sizes if chain.uses(name, part)]
            share = sum(work[i] for i in part) / sum(work)
            found.append(replace(
                self.full, parameters=sum(self.sizes[name] for name in used),
                in_blocks=sum(self.sizes[name] for name in used if name in self.in_blocks), blocks=len(part),
                flops=round(self.full.flops * share), forward_flops=round(self.full.forward_flops * share),
                **{name: sum(getattr(self, name)[i] for i in part) for name in (
                    "saved", "sent", "kept", "again", "weight_flops", "between")},
                rebuilt=max(self.rebuilt[i] for i in part), message=self.messages[part.start] if part.start else 0,
            ))  # fmt: skip
        return found


def count_own_model(own: OwnModel, config: RunConfig) -> OwnCounts:
    """Count the first micro-batch, on fake tensors if that is possible; see `run_first`.

    Raises:
        UsageError: the model or its loss fails.
    """
    counter, real = _run(own, config, None)
    return replace(counter.full, real=real)


def count_chain(own: OwnModel, config: RunConfig) -> ChainCounts:
    """Count the first micro-batch by the modules of the pipeline's chain.

    Raises:
        UsageError: the model or its loss fails, or its modules are no chain.
    """
    policy, seed = POLICIES[config.train.precision], config.train.seed
    chain = find_chain(own, policy, seed, OwnDataset(own, "train", seed).batch(range(config.parallel.micro_batch)))
    counter, real = _run(own, config, chain)
    found = (counter.saved, counter.sent, counter.kept, counter.rebuilt, counter.again, counter.weight_flops,
             counter.between)
    saved, sent, kept, rebuilt, again, *late = (tuple(of[i] for i in range(len(chain.names))) for of in found)
    messages = tuple(sum(crossing.bytes for crossing in each) for each in chain.crossings)
    alone = {name for name in counter.sizes if len(chain.parts.get(name, ())) < 2}
    in_blocks = frozenset(name for name in alone if name.startswith(tuple(f"{link}." for link in chain.names)))
    return ChainCounts(
        chain, replace(counter.full, real=real), counter.sizes, in_blocks, saved, sent, messages, kept, rebuilt,
        again, *late,
    )  # fmt: skip


def extend(one: OwnCounts | ChainCounts, two: OwnCounts | ChainCounts, samples: int) -> OwnCounts | ChainCounts:
    """Return the counts of a micro-batch of some samples, from counts of the same kind with one and with two."""

    def along(a: int, b: int) -> int:
        return a + (samples - 1) * (b - a)

    changed: dict[str, Any] = {}
    for name in ("full", "flops", "forward_flops", "saved", "sent", "message", "messages", "kept", "rebuilt", "again",
                 "weight_flops", "between"):
        if not hasattr(one, name):
            continue
        a, b = (getattr(each, name) for each in (one, two))
        if isinstance(a, OwnCounts):
            changed[name] = extend(a, b, samples)
        else:
            changed[name] = tuple(map(along, a, b)) if isinstance(a, tuple) else along(a, b)
    return replace(one, **changed)


def _run(own: OwnModel, config: RunConfig, chain: Chain | None) -> tuple[_Counter, bool]:
    policy, seed = POLICIES[config.train.precision], config.train.seed
    batch = OwnDataset(own, "train", seed).batch(range(config.parallel.micro_batch))
    return run_first(own, policy, seed, batch, partial(_Counter, own, policy, chain), SplitRanks.alone(config.parallel))


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
        saved, sent: bytes by the index of the link that runs.
    """

    def __init__(self, own: OwnModel, policy: Policy, chain: Chain | None, module: nn.Module, batch: OwnBatch):
        self._at, self._block, self._flops, self._runs = 0, -1, 0, True
        self.saved, self.sent, self.kept = Counter[int](), Counter[int](), Counter[int]()
        self.rebuilt, self.again = Counter[int](), Counter[int]()  # by the block's index; in a chain the link's
        self.weight_flops, self.between = Counter[int](), Counter[int]()
        self._entered: Tensor | None = None
        late = _CountedLate(module) if chain else None
        for i, name in enumerate(chain.names if chain else ()):
            module.get_submodule(name).register_forward_pre_hook(lambda _, args, i=i: self._begin(i))
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
            loss.backward()
            if chain and late:
                self._count_late(late, {p: max(chain.parts.get(name, {0})) for name, p in trained.items()})
        self.sizes = {name: p.numel() for name, p in trained.items()}
        self.full = OwnCounts(
            parameters=sum(self.sizes.values()), blocks=len(blocks),
            in_blocks=sum(p.numel() for p in trained.values() if id(p) in grouped),
            frozen=sum(x.numel() * x.element_size() for x in untrained), flops=self._counter.get_total_flops(),
            saved=self.saved.total(), sent=self.sent.total(), forward_flops=forward, kept=self.kept.total(),
            rebuilt=max(self.rebuilt.values(), default=0), again=self.again.total(),
        )  # fmt: skip

    def _count_late(self, late: _CountedLate, links: dict[nn.Parameter, int]) -> None:
        """Count weight gradients, and what they are computed from, by the last module that uses the weight."""
        seen = set[int]()
        for weight, term, kept in late.found:
            before, link = self._counter.get_total_flops(), max(0, links[weight])
            term(torch.empty_like(weight), True)
            self.weight_flops[link] += self._counter.get_total_flops() - before
            for tensor in kept:
                if _storage(tensor) not in seen:
                    seen.add(_storage(tensor))
                    self.between[link] += tensor.untyped_storage().nbytes()

    def _begin(self, link: int) -> None:
        self._at = link

    def _keep(self, tensor: Tensor) -> Tensor:
        if _storage(tensor) not in self._seen:
            self._seen.add(_storage(tensor))
            size = tensor.untyped_storage().nbytes()
            self.saved[self._at] += size
            if self._block < 0:
                self.kept[self._at] += size
            else:
                self.rebuilt[self._block] += size
        return tensor

    def _enter_block(self, block: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._runs:  # it recomputes by itself
            return
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and x.requires_grad:
                self.kept[self._at] += x.numel() * x.element_size()
        self._block, self._flops = block, self._counter.get_total_flops()

    def _leave_block(self) -> None:
        if not self._runs:
            return
        self.again[self._block] += self._counter.get_total_flops() - self._flops
        self._block = -1

    def _enter(self, ranks: SplitRanks, x: Tensor) -> None:
        if x is not self._entered:  # queries, keys and values share one
            self._entered = x
            self._send(x, 1 if ranks.find_part(x) is None else 1.5)  # gathered twice and scattered once

    def _send(self, x: Tensor, times: float = 1) -> None:
        """Count a sum over ranks: of the output of a layer split by input, or the gradient of the input of others."""
        self.sent[self._at] += int(x.numel() * x.element_size() * times)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
