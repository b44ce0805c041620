"""A run's real model, sharding and program on one rank of a world of any size: on fake tensors, without the others.

Every operation is called and none computes: torch's fake tensors have shapes, dtypes and lives, but no numbers. What
the other ranks would send is taken as received. So a laptop counts, of any rank, what the run will really do: FLOPs,
collectives, and the bytes that are alive at every moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.catalog import ModelShape
from shoal.comm.dry import DryMesh
from shoal.config import RunConfig
from shoal.data.batches import Dataset, SyntheticDataset
from shoal.errors import UsageError
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


def dry_run(config: RunConfig, shape: ModelShape, rank: int, *, steps: int = 2, as_here: bool = False) -> Counted:
    """Count the first steps of one rank.

    Args:
        config: the run; what is compiled is counted as it is without the compiler.
        shape: the model.
        rank: of the world.
        as_here: with the buffers of gloo and torch's norms on the CPU, as if the ranks were processes of this machine;
            else with NCCL, which needs none, and norms that are one operation, as on CUDA.

    Raises:
        UsageError: the model has experts, or layers that only some tokens pass through, and ranks share sequences: what
            each computes or sends depends on numbers, which nothing has here.
    """
    if shape.experts:
        raise UsageError(
            "A dry run has no numbers, so no router can choose experts.\n  Count the model without experts, or measure."
        )
    if shape.depths and (config.parallel.cp > 1 or config.parallel.sequence_parallel):
        raise UsageError(
            "A dry run has no numbers, so no router can choose which tokens pass through a layer (model.depths), and "
            "with cp or sequence_parallel it depends on them what is sent.\n  Count the run without these, or measure."
        )
    config = config.model_copy(update={"train": config.train.model_copy(update={"compile": False})})
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


class _FusedNorms(TorchFunctionMode):
    """RMSNorm as CUDA has it, where torch's CPU has it in parts."""

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        if func is torch.rms_norm:
            return torch.ops.aten._fused_rms_norm(*args, **kwargs)[0]
        return func(*args, **kwargs)


@contextmanager
def _faked(*, fused_norms: bool) -> Iterator[None]:
    """New tensors have no numbers."""
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Numberless())
        if fused_norms:
            stack.enter_context(_FusedNorms())
        yield
