"""Dry run: execute one rank of a world of any size on fake tensors, with its real model, sharding and program.

Every operation is called and none computes: torch's fake tensors have shapes, dtypes and lifetimes, but no values.
Messages of other ranks count as received. A laptop can thus count what any rank will do: FLOPs, collectives, and the
live bytes at every moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)

from shoal.base.errors import UsageError
from shoal.engine import kernels
from shoal.engine.collectives.mesh import DryMesh
from shoal.engine.data.batches import Dataset, SyntheticDataset
from shoal.engine.models import attention_kernels
from shoal.engine.models.attention_kernels import CudaDevice
from shoal.engine.models.experts.gates import Choice
from shoal.engine.models.experts.router import Router, RoutingContext, find_modules
from shoal.engine.models.mixture_of_depths import MixtureOfDepths
from shoal.engine.parallel.context.causal_blocks import token_positions
from shoal.engine.parallel.context.token_order import TokenAssignment, assign_tokens
from shoal.engine.parallel.mixture_of_depths import assign_chosen
from shoal.engine.runtime import Recorder
from shoal.pipeline.program import Action
from shoal.planning.cost.time.traffic import evenly_taken
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig
from shoal.training.dry_run.own import DryOwnEngine, count_own
from shoal.training.dry_run.tracker import Tracker, tensors_in
from shoal.training.samples import open_samples
from shoal.training.step.engine import Engine


@dataclass
class ActionMemory:
    """Live bytes in one action of the program: peak, and value at its end."""

    action: Action
    peak: int
    alive: int


@dataclass
class CountedStep:
    """Counts of one step of one rank."""

    flops: dict[str, int]  # by torch operation
    sent: dict[tuple[str, str], float]  # bytes by axis and kind of collective (`collectives.group.Group.count`)
    calls: dict[tuple[str, str, int], int]  # number by axis, kind and bytes of the tensor
    moments: list[ActionMemory] = field(repr=False)
    peak: int  # maximum live bytes


@dataclass
class Counted:
    """Counts of one rank of a run."""

    rank: int
    where: str  # description of its coordinates
    parameters: int  # number of local elements, without padding
    held: dict[str, int]  # live bytes between steps, by content
    steps: list[CountedStep]


class MemoryRecorder(Recorder):
    """`Recorder` of the memory of each action, and of the peak between actions."""

    def __init__(self, tracker: Tracker):
        self.tracker, self.between = tracker, 0
        self.moments: list[ActionMemory] = []
        tracker.rewind()

    def begin(self, action: Action) -> None:
        self.between = max(self.between, self.tracker.rewind())

    def end(self, action: Action) -> None:
        self.moments.append(ActionMemory(action, self.tracker.rewind(), self.tracker.alive))


class ProgressRecorder(Recorder):
    """`Recorder` that shows how many of the actions of all steps are done."""

    def __init__(self, actions: int, steps: int, show: Callable[[float, str], None]):
        self.actions, self.steps, self.show, self.done = actions, steps, show, 0

    def end(self, action: Action) -> None:
        self.done += 1
        share = self.done / self.actions
        self.show(share, f"step {min(self.steps, int(share * self.steps) + 1)} of {self.steps}")


class DryEngine(Engine):
    """Engine whose parameters have no values."""

    def initialise(self) -> None:
        self.parameters.gather()
        for stage in self.stages:
            for router in find_modules(stage.module, Router):
                spread = assign_chosen(self.shape, self.mesh, self.spread) if self.shape.skips(router.layer) else None
                evenly = partial(_choose_evenly, router, router._choose, spread or self.spread)
                router._choose = evenly  # type: ignore[method-assign]  # scores without values choose nothing
            for depth in find_modules(stage.module, MixtureOfDepths):
                depth.choose = _choose_spaced


def _choose_evenly(
    router: Router, choose: Callable, spread: TokenAssignment, logits: Tensor, context: RoutingContext
) -> tuple[Choice, Tensor]:
    """Replace a gate, as fake scores have no values: assign each rank's tokens to the experts in cyclic order."""
    choice, logits = choose(logits, context)
    experts, (b, s, _) = router.experts, logits.shape
    with unset_fake_temporarily():
        ranks = range(spread.ring * spread.ulysses)
        token = torch.cat([token_positions(spread.chunks(rank), torch.device("cpu")) for rank in ranks])
        number = torch.arange(s).unsqueeze(1) * experts.per_token + torch.arange(experts.per_token)
        chosen = torch.zeros(b, s, experts.count, dtype=torch.bool)
        chosen[:, token.unsqueeze(1), number % experts.count] = True
    return choice._replace(chosen=chosen.to(logits.device, non_blocking=True)), logits


def _choose_spaced(scores: Tensor, k: int) -> Tensor:
    """Replace `choose_highest`, as fake scores have no values: take k equally spaced tokens."""
    with unset_fake_temporarily():
        chosen = torch.tensor(evenly_taken(k, scores.shape[1])).repeat(len(scores), 1)
    return chosen.to(scores.device)


def dry_run(
    config: RunConfig, shape: ModelShape, rank: int, *, steps: int = 2, on_cpu: bool = False,
    show: Callable[[float, str], None] | None = None,
) -> Counted:  # fmt: skip
    """Count the first steps of one rank.

    Routers have no scores. Every expert gets the same number of tokens, and none is dropped; layers that select tokens
    take equally spaced ones.

    Args:
        config: counted without the compiler.
        on_cpu: whether to count gloo's buffers and torch's CPU norms and attention, as if the ranks were processes of
            this machine; otherwise NCCL, which needs no buffers, fused operators and torch's attention, as on CUDA.
        show: called after each action of the program with the fraction that is done, and the number of the step.

    Raises:
        UsageError: context-parallel ranks do not send the same number of tokens to every expert; a model of one's own
            reads values in its forward.
    """
    if shape.experts and config.parallel.cp > 1:
        _check_even(config, shape)
    fused = {} if on_cpu or config.train.attention != "auto" else {"attention": "sdpa"}
    config = config.replace(train={"compile": False, **fused})
    mesh = DryMesh(config.parallel, rank, by_gloo=on_cpu)
    own, samples = bool(config.model.module), make_samples(config, shape)
    with count_own() if own else nullcontext(), _faked(fused=not on_cpu and not own), Tracker() as tracker:
        engine = (DryOwnEngine if own else DryEngine)(config, shape, mesh, samples)
        if show is not None:
            actions = steps * len(engine.program.actions[mesh.index("pp")])
            engine.runtime.recorders.append(ProgressRecorder(actions, steps, show))
        return count(engine, tracker, steps)


def _check_even(config: RunConfig, shape: ModelShape) -> None:
    """Reject experts to which context-parallel ranks cannot send equal numbers of tokens.

    A rank would receive a different number than it sends, which only the other ranks know.
    """
    layout, experts, s = config.parallel, shape.moe, config.data.sequence_length
    for tokens in sorted({shape.taken(layer, s) for layer in experts.layers(shape.blocks)}):
        each = assign_tokens(layout, tokens)
        lengths = sorted({sum(each.lengths(rank)) for rank in range(layout.cp)})
        if len(lengths) > 1 or lengths[0] % layout.tp or lengths[0] // layout.tp * experts.per_token % experts.count:
            several = layout.cp * layout.tp * experts.count // gcd(experts.count, experts.per_token)
            raise UsageError(
                f"parallel.cp = {layout.cp}: a dry run cannot give each of {experts.count} experts an equal number of "
                f"the {tokens} tokens of a sequence from each rank.\n  Use a sequence length that is a multiple of "
                f"{several}."
            )


def make_samples(config: RunConfig, shape: ModelShape) -> Dataset:
    """Return random tokens with very uneven masks, in packed documents if the run uses them; or a definition's data."""
    data = config.data
    if config.model.module:
        return open_samples(config, "train")
    return SyntheticDataset(shape.vocab, data.sequence_length, config.train.seed, documents=data.document_mask)


def count(engine: Engine, tracker: Tracker, steps: int) -> Counted:
    """Count the first steps of an engine that was constructed with the tracker active."""
    counted = [_step(engine, step, tracker) for step in range(steps)]
    elements = sum(slot.placement.numel for bucket in engine.parameters.buckets for slot in bucket.slots)
    held = engine.parameters.bytes() | {"optimizer": engine.optimizer.bytes()}
    return Counted(engine.mesh.rank, engine.mesh.describe(), elements, held, counted)


def _step(engine: Engine, step: int, tracker: Tracker) -> CountedStep:
    recorder = MemoryRecorder(tracker)
    engine.runtime.recorders.append(recorder)
    tracker.flops.clear()
    sent, calls = engine.mesh.sent(), engine.mesh.calls()
    engine.step(step)
    engine.runtime.recorders.remove(recorder)
    # Sophia's estimates have passes of their own, before the first action.
    peak = max(recorder.between, tracker.rewind(), *(moment.peak for moment in recorder.moments))
    return CountedStep(
        dict(tracker.flops), dict(engine.mesh.sent() - sent), dict(engine.mesh.calls() - calls), recorder.moments, peak
    )


class _Numberless(FakeTensorMode):
    """Fake tensors beside small real ones (token ids, ranks), which are computed; the value of a fake number is 1."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        tensors = [*tensors_in((*args, *kwargs.values()))]
        if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **kwargs)  # the mode is off in here
        try:
            return self.dispatch(func, types, args, kwargs)
        except DataDependentOutputException:
            return 1.0 if args[0].is_floating_point() else 1


@contextmanager
def _faked(*, fused: bool) -> Iterator[None]:
    """Create tensors without values in the enclosed code, and use fused operators as on CUDA."""
    use_fused, describe_device = kernels.use_fused, attention_kernels.describe_device
    if fused:
        kernels.use_fused = lambda x: x.dtype != torch.float64
        attention_kernels.describe_device = lambda device: CudaDevice((9, 0), 0)  # type: ignore[assignment]
    try:
        with _Numberless(allow_non_fake_inputs=True):
            yield
    finally:
        kernels.use_fused, attention_kernels.describe_device = use_fused, describe_device
