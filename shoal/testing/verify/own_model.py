"""Verify the layout of a model of one's own against plain PyTorch, and against one device, in float64.

Plain autograd, in a loop over all micro-batches, computes each step's gradients again from the weights that the ranks
had. A run on one device must have the same weights and buffers after each step.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.distributed import ReduceOp

from shoal.base.boxes import Piece
from shoal.base.errors import UsageError
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce
from shoal.engine.device import choose_transport, pick_device
from shoal.engine.own.definition import drawing, load_own_model
from shoal.engine.own.formats import widen
from shoal.engine.own.links import LinkSeeds
from shoal.engine.own.samples import OwnDataset
from shoal.engine.own.stage import Statistics, draw_as
from shoal.engine.precision.policy import POLICIES
from shoal.launch.worker_pool import Pool, RankError
from shoal.pipeline.from_layout import build_layout_program
from shoal.planning.auto.own_loss import with_plan
from shoal.spec.config import RunConfig
from shoal.spec.layout import Layout
from shoal.testing.verify.compare import TOLERANCES, Mismatch, Verdict, describe_reference
from shoal.testing.verify.emulate_own import emulate_own_steps
from shoal.training.check import check
from shoal.training.samples import open_samples, try_samples
from shoal.training.step.own_engine import OwnEngine

LIMIT_SECONDS = 600.0
ROUNDING = 1e-6  # of the largest gradient: a bias before a batch norm has gradients of rounding alone

Tensors = dict[str, Tensor]
RankStep = tuple[float, float, dict[str, list[Piece]], dict[str, list[Piece]], frozenset[str]]
"""One step on one rank: loss, gradient norm, gradients, state, and uneven parameters."""


@dataclass(frozen=True)
class OwnStep:
    """One step on all ranks: its loss, unsharded gradients of the update, and what a checkpoint would store of it."""

    loss: float
    norm: float  # of the gradients before they are clipped
    gradients: Tensors
    after: Tensors
    uneven: frozenset[str]  # parameters that all tensor-parallel ranks hold, and of which they have other gradients


def verify_own_model(console: Console, config: RunConfig, steps: int, device: str) -> Verdict:
    """Train a few steps on the ranks of a layout and compare each; print the outcome.

    Raises:
        UsageError: the run is impossible, or a step fails.
    """
    begin = time.monotonic()
    own = load_own_model(config.model.module)
    optimizer = "of its own" if own.make_optimizer else config.optimizer.name
    console.print(f"[bold]verify[/]    {config.model.title} on {config.parallel.describe()}, fp64, "
                  f"optimizer {optimizer}, {steps} steps of {config.train.global_batch} samples")
    exact = config.replace(train={"precision": "fp64"})
    with tempfile.TemporaryDirectory(prefix="shoal-plan-") as made:
        planned = with_plan(exact, Path(made))
        check(config if planned is exact else planned)
        try_samples(planned)
        with Pool(config.parallel.world_size, device=device) as pool:
            verdict = compare_own_model(pool, planned, steps, device)
    reference = describe_reference(config.parallel, "plain PyTorch and one device")
    verdict.print(console, "fp64", reference, time.monotonic() - begin)
    if note := describe_scale(config):
        console.print(f"note      {note}")
    return verdict


def describe_scale(config: RunConfig) -> str:
    """Return why the loss is no sum over its batch: a batch with each sample twice does not count twice. Else nothing.

    Or why it depends on the passes before: the same batch has another loss.
    All layouts with the same `micro_batch` compute the same mean of a micro-batch, so that their comparison does not
    find it.
    """
    own, seed, n = load_own_model(config.model.module), config.train.seed, config.parallel.micro_batch
    samples, module = OwnDataset(own, "train", seed), own.build(seed).double().eval()
    found = []
    if samples.draws:
        return ""
    try:
        for indices in ([*range(n)], [*range(n)], [*range(n)] * 2):
            with torch.no_grad(), drawing(seed):
                batch = widen(samples.batch(indices), POLICIES["fp64"])
                loss, terms, _ = own.compute(module, batch.values)
            found.append((float(loss), float(terms)))
    except Exception:  # its batches have one size, or it cannot compute without gradients
        return ""
    once, again, twice = found
    if not all(map(math.isclose, once, again)):
        return ("a batch has another loss in a second pass: its model or loss() counts or keeps something in no "
                "buffer, so what is trained depends on which rank computes what")
    if not all(once):
        return ""
    times = [b / a for a, b in zip(once, twice, strict=True)]
    if all(math.isclose(each, 2, rel_tol=1e-6) for each in times):
        return ""
    return (f"with each sample twice, a batch has {times[0]:.3g} times the loss and {times[1]:.3g} times the terms: "
            "loss() returns no sums over its batch, so what is trained depends on micro_batch")


def compare_own_model(pool: Pool, config: RunConfig, steps: int, device: str = "cpu") -> Verdict:
    """Run the steps on the layout's ranks and on one, and compare both and plain autograd.

    An asynchronous pipeline is compared with its emulation (`shoal.testing.verify.emulate_own`).

    Raises:
        UsageError: a step fails.
    """
    config = config.replace(train={"precision": "fp64", "device": device, "steps": steps})
    layout = config.parallel
    stale = build_layout_program(layout, layout.microbatches(config.train.global_batch)).updates > 1
    alone = config.replace(parallel=Layout(micro_batch=layout.micro_batch))
    try:
        found, *others = (
            _assemble(pool.run(run_steps, each.parallel.world_size, each, steps, timeout=LIMIT_SECONDS))
            for each in ((config,) if stale else (config, alone))
        )
    except RankError as error:
        _, usage, message = error.failures[0][1].rpartition(f"{UsageError.__module__}.{UsageError.__name__}: ")
        if usage:
            raise UsageError(message.rstrip()) from error
        raise UsageError(f"model.module: a step fails in float64: {error.reason}.") from error
    reference = pick_device(device, 0, shared=True)  # the same one: others draw other random numbers
    wanted = others[0] if others else [
        OwnStep(*each, frozenset()) for each in emulate_own_steps(config, steps, reference)
    ]
    verdict, own = Verdict(), load_own_model(config.model.module)
    rule = "its own" if own.make_optimizer else config.optimizer.name
    before = own.build(config.train.seed).double().state_dict()
    for step, (mine, other) in enumerate(zip(found, wanted, strict=True)):
        if not math.isclose(mine.loss, other.loss, rel_tol=TOLERANCES["fp64"].gradient, abs_tol=1e-12):
            text = f"step {step}, loss: {mine.loss:.12g}, of one device {other.loss:.12g}"
            if config.parallel.tp > 1:
                text += ". A sum over the ranks of tp may be missing in tensor_parallel: rowwise or moe_tp_experts"
            verdict.findings.append(Mismatch(step, rule, "loss", "", math.inf, (), text))
        gradients, norm = (other.gradients, other.norm) if stale else compute_gradients(config, step, before, reference)
        _compare(verdict, rule, step, "gradient", mine.gradients, gradients, mine.uneven)
        if not math.isclose(mine.norm, norm, rel_tol=TOLERANCES["fp64"].gradient, abs_tol=1e-12):
            text = f"step {step}, gradient norm before clipping: {mine.norm:.12g}, of plain PyTorch {norm:.12g}"
            if not any(each.step == step and each.phase == "gradient" for each in verdict.findings):
                text += ". All gradients have the same wrong factor, which clipping hides"
            off = abs(mine.norm / norm - 1) if norm else math.inf
            verdict.findings.append(Mismatch(step, rule, "gradient norm", "", off, (), text))
        _compare(verdict, rule, step, "weight", mine.after, other.after)
        before = mine.after
    return verdict


def run_steps(config: RunConfig, steps: int) -> list[RankStep]:
    """Run steps on this rank; return the loss, gradients and state of each, as pieces that it saves, and `uneven`."""
    rank = dist.get_rank()
    device = pick_device(config.train.device, rank, shared=True)
    mesh = Mesh(config.parallel, rank, device, choose_transport(device, config.parallel.world_size))
    engine = OwnEngine(config, check(config), mesh, open_samples(config, "train"))
    results = []
    for step in range(steps):
        done = engine.step(step)
        gradients = _owned(engine.parameters.reduced_gradients())
        results.append((done.loss, done.gradient_norm, gradients, _owned(engine.weights()), _find_uneven(engine)))
    return results


def _find_uneven(engine: OwnEngine) -> frozenset[str]:
    """Return the parameters that all tensor-parallel ranks hold, and of which they have other gradients. Collective."""
    group, uneven = engine.mesh.group("tp"), set()
    placements = {slot.placement.name: slot.placement for bucket in engine.parameters.buckets for slot in bucket.slots}
    for name, pieces in engine.parameters.reduced_gradients().items():
        if group is None or placements[name].box.shape != placements[name].global_shape:
            continue
        for piece in pieces:
            most, least = (all_reduce(piece.tensor.clone(), group, op) for op in (ReduceOp.MAX, ReduceOp.MIN))
            if float((most - least).max()) > TOLERANCES["fp64"].gradient * float(most.abs().max()):
                uneven.add(name)
    return frozenset(uneven)


def _owned(named: dict[str, list[Piece]]) -> dict[str, list[Piece]]:
    return {
        name: [Piece(p.global_shape, p.box, p.tensor.cpu().clone()) for p in pieces if p.primary]
        for name, pieces in named.items()
    }


def _assemble(ranks: list[list[RankStep]]) -> list[OwnStep]:
    """Join the pieces of all ranks."""

    def join(parts: Iterable[dict[str, list[Piece]]]) -> Tensors:
        found: Tensors = {}
        for part in parts:
            for name, pieces in part.items():
                for piece in pieces:
                    dtype = torch.promote_types(piece.tensor.dtype, torch.float64)
                    full = found.setdefault(name, torch.full(piece.global_shape, math.nan, dtype=dtype))
                    full[piece.box.slices] = piece.tensor
        return found

    steps = zip(*ranks, strict=True)
    return [
        OwnStep(step[0][0], step[0][1], join(rank[2] for rank in step), join(rank[3] for rank in step), step[0][4])
        for step in steps
    ]


def compute_gradients(config: RunConfig, step: int, values: Tensors, device: torch.device) -> tuple[Tensors, float]:
    """Compute a step's gradients with plain autograd, one micro-batch after the other.

    Returns:
        The clipped gradients, on the host, and the norm before clipping.
    """
    own, seed, n = load_own_model(config.model.module), config.train.seed, config.parallel.micro_batch
    samples, terms = OwnDataset(own, "train", seed), 0.0
    module = own.build(seed).to(device).double().train()
    module.load_state_dict({name: values.get(name, value) for name, value in module.state_dict().items()})
    statistics, seeds = Statistics(module), LinkSeeds(own, module, seed)
    statistics.begin()
    for first in range(step * config.train.global_batch, (step + 1) * config.train.global_batch, n):
        batch = widen(samples.batch(range(first, first + n)).to(device), POLICIES["fp64"])
        statistics.rewind()
        draw_as(seed, batch)
        seeds.first = batch.first
        loss, count, _ = own.compute(module, batch.values)
        loss.backward()
        terms += float(count)
    gradients = {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).cpu() / (terms or 1.0)
        for name, p in module.named_parameters() if p.requires_grad
    }
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
    clip = config.optimizer.clip_norm
    factor = clip / norm if clip and norm > clip else 1
    return {name: gradient * factor for name, gradient in gradients.items()}, norm


def _compare(
    verdict: Verdict, rule: str, step: int, kind: str, found: Tensors, wanted: Tensors,
    uneven: frozenset[str] = frozenset(),
) -> None:
    tolerance = TOLERANCES["fp64"].gradient
    errors = sorted(_errors(found, wanted), key=lambda each: each[0] not in uneven)  # clipping spreads their error
    for name, error in errors:
        worst = verdict.table.get(("all", kind), 0.0)
        verdict.table["all", kind] = max(worst, error)
        if not error <= tolerance:
            text = f"step {step}, {kind} of {name}: {error:.1e} of its largest element"
            if name in uneven:
                text += (". Each rank of tp has another part of it: give its module 'replicated_with_grad_allreduce' "
                         "in tensor_parallel, or split its layer")
            verdict.findings.append(Mismatch(step, rule, kind, name, error, (), text))


def _errors(found: Tensors, wanted: Tensors) -> Iterator[tuple[str, float]]:
    """Yield the largest error of each tensor, relative to its largest element; if that is rounding, to the model's."""
    most = max((float(value.abs().max()) for value in wanted.values() if value.numel()), default=0.0)
    for name, value in wanted.items():
        if name not in found:
            yield name, math.inf
        elif value.numel():
            largest = max(float(value.abs().max()), ROUNDING * most) or 1.0
            yield name, float((found[name] - value).abs().max()) / largest
