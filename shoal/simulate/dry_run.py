"""A run's real model, sharding and program on one rank of a world of any size: on fake tensors, without the others.

Every operation is called and none computes: torch's fake tensors have shapes, dtypes and lives, but no numbers. What
the other ranks would send is taken as received. So a laptop counts, of any rank, what the run will really do: FLOPs,
collectives, and the bytes that are alive at every moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.catalog import ModelShape
from shoal.comm.dry import DryMesh
from shoal.config import RunConfig
from shoal.data.batches import Dataset, SyntheticDataset
from shoal.errors import UsageError
from shoal.models.experts.balance import routers_of
from shoal.models.experts.gates import Choice
from shoal.models.experts.router import Router, RoutingContext
from shoal.pipeline.program import Action
from shoal.simulate.tracker import Tracker, tensors_in
from shoal.train.engine import Engine


@dataclass
class Moment:
    """What one action of the program did to memory.

    Attributes:
        action: which.
        peak: most bytes alive in it.
        alive: when it ended.
    """

    action: Action
    peak: int
    alive: int


@dataclass
class CountedStep:
    """One step of one rank, counted.

    Attributes:
        flops: by torch operation.
        sent: bytes, by axis and kind of collective (`shoal.comm.group.Group.count`).
        calls: collectives, by axis, kind and bytes of the tensor.
        moments: of memory, action by action.
        peak: most bytes alive.
    """

    flops: dict[str, int]
    sent: dict[tuple[str, str], float]
    calls: dict[tuple[str, str, int], int]
    moments: list[Moment] = field(repr=False)
    peak: int


@dataclass
class Counted:
    """A rank of a run, counted.

    Attributes:
        rank: which.
        where: its coordinates, in words.
        parameters: elements that it holds, padding left out.
        held: bytes alive between steps, by what they hold.
        steps: in order.
    """

    rank: int
    where: str
    parameters: int
    held: dict[str, int]
    steps: list[CountedStep]


class Recorder:
    """Hears of a runtime's actions, and notes what each did to memory."""

    def __init__(self, tracker: Tracker):
        self.tracker, self.moments = tracker, []

    def begin(self, action: Action) -> None:
        """An action begins."""
        self.tracker.rewind()

    def arrived(self, action: Action) -> None:
        """What it waited for is there."""

    def end(self, action: Action) -> None:
        """It is done."""
        self.moments.append(Moment(action, self.tracker.rewind(), self.tracker.alive))


class DryEngine(Engine):
    """An engine whose parameters have no values."""

    def _initialise(self) -> None:
        self.parameters.gather()
        for stage in self.stages:
            for router in routers_of(stage.module):
                router._choose = partial(_evenly, router, router._choose)


def _evenly(router: Router, choose: Callable, logits: Tensor, context: RoutingContext) -> tuple[Choice, Tensor]:
    """What a gate makes of scores, but for which experts a token gets: one after the other, the next ones each time."""
    choice, logits = choose(logits, context)
    b, s, count = logits.shape
    with unset_fake_temporarily():
        token = torch.arange(s).unsqueeze(1)
        chosen = torch.zeros(b, s, router.experts.count, dtype=torch.bool)
        chosen[:, token, (token * router.experts.per_token + torch.arange(router.experts.per_token)) % count] = True
    return choice._replace(chosen=chosen), logits


def dry_run(config: RunConfig, shape: ModelShape, rank: int, *, steps: int = 2, as_here: bool = False) -> Counted:
    """Count the first steps of one rank.

    Args:
        config: the run; what is compiled is counted as it is without the compiler.
        shape: the model.
        rank: of the world.
        as_here: with the buffers of gloo, and torch's norms and attention on the CPU, as if the ranks were processes of
            this machine; else with NCCL, which needs none, and with norms and attention that are one operation each,
            as on CUDA.

    Routers of experts, which have no numbers to choose by, give every expert as many tokens, and drop none.

    Raises:
        UsageError: ranks share sequences, and the model has experts or layers that only some tokens pass through: what
            each then computes or sends depends on numbers, which nothing has here.
    """
    if shape.experts and config.parallel.cp > 1:
        raise UsageError(
            f"A dry run cannot tell which tokens go to which experts with parallel.cp = {config.parallel.cp}."
            "\n  Count with cp = 1, or measure."
        )
    if shape.depths and (config.parallel.cp > 1 or config.parallel.sequence_parallel):
        raise UsageError(
            "A dry run has no numbers, so no router can choose which tokens pass through a layer (model.depths), and "
            "with cp or sequence_parallel it depends on them what is sent.\n  Count the run without these, or measure."
        )
    fused = {} if as_here or config.train.attention != "auto" else {"attention": "sdpa"}
    config = config.model_copy(update={"train": config.train.model_copy(update={"compile": False, **fused})})
    mesh = DryMesh(config.parallel, rank, by_gloo=as_here)
    with _faked(fused_norms=not as_here), Tracker() as tracker:
        return count(DryEngine(config, shape, mesh, samples_of(config, shape)), tracker, steps)


def samples_of(config: RunConfig, shape: ModelShape) -> Dataset:
    """Random tokens, in packed documents where the run has them."""
    data = config.data
    return SyntheticDataset(shape.vocab, data.sequence_length, config.train.seed, documents=data.document_mask)


def count(engine: Engine, tracker: Tracker, steps: int) -> Counted:
    """Count the first steps of an engine that was made while the tracker was entered."""
    counted = [_step(engine, step, tracker) for step in range(steps)]
    elements = sum(slot.split.numel for bucket in engine.parameters.buckets for slot in bucket.slots)
    held = engine.parameters.bytes() | {"optimizer": engine.optimizer.bytes()}
    return Counted(engine.mesh.rank, engine.mesh.describe(), elements, held, counted)


def _step(engine: Engine, step: int, tracker: Tracker) -> CountedStep:
    recorder = Recorder(tracker)
    engine.runtime.recorders.append(recorder)
    tracker.flops.clear()
    sent, calls = engine.mesh.sent(), engine.mesh.calls()
    engine.step(step)
    engine.runtime.recorders.remove(recorder)
    peak = max(moment.peak for moment in recorder.moments)
    return CountedStep(
        dict(tracker.flops), dict(engine.mesh.sent() - sent), dict(engine.mesh.calls() - calls), recorder.moments, peak
    )


class _Numberless(TorchDispatchMode):
    """Small real tensors (token ids, ranks) are computed with; a number of a fake is 1."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        tensors = [*tensors_in((*args, *kwargs.values()))]
        if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            return 1.0 if args[0].is_floating_point() else 1


class _FusedNorm(torch.autograd.Function):
    """What CUDA's RMSNorm makes and keeps: its input, and 1/rms of each row in float32 at least."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=exact))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@contextmanager
def _fused_norms() -> Iterator[None]:
    """RMSNorm as CUDA has it, where torch's CPU has it in parts; also where backward computes it again."""
    parts = F.rms_norm
    F.rms_norm = lambda x, shape, weight, eps: _FusedNorm.apply(x, weight)
    try:
        yield
    finally:
        F.rms_norm = parts


@contextmanager
def _faked(*, fused_norms: bool) -> Iterator[None]:
    """New tensors have no numbers."""
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Numberless())
        if fused_norms:
            stack.enter_context(_fused_norms())
        yield
