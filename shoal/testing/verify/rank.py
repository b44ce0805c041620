"""The engine on one rank of the verified layout, and the comparison of this rank's part.

A rank compares its own pieces with the reference's files and returns only numbers, so that no rank gathers a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from safetensors import safe_open

from shoal.base.boxes import Box, Piece
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.data.batches import Batch, Dataset
from shoal.engine.device import choose_transport, pick_device
from shoal.pipeline.program import Op
from shoal.testing.verify.faults import FAULTS
from shoal.testing.verify.reference import ComparisonJob, StepTotals, step_file, trace_file, with_experts
from shoal.testing.verify.trace import Choices, ForwardTrace, Tracer, largest, trace_errors
from shoal.training.dry_run.dry_run import make_samples
from shoal.training.step.engine import Engine


@dataclass(frozen=True)
class RankStep(StepTotals):
    """Results of one step on one rank, with the choices of its own tokens."""

    samples: list[list[int]]  # for each micro-batch of this step, the indices of its samples in the global batch
    # largest absolute differences by "gradient/NAME", "weight/NAME" or "in use/NAME", also of each expert
    # (`with_experts`)
    differences: dict[str, float] = field(default_factory=dict)
    trace: dict[str, tuple[float, float, int]] = field(default_factory=dict)  # see `trace_errors`


@dataclass
class RankReport:
    where: str  # the rank's number and coordinates
    replica: int  # its data-parallel replica
    held: list[tuple[str, tuple[int, ...], Box, bool]] = field(default_factory=list)
    """(parameter, global shape, box, whether the rank is the primary owner) of each piece."""

    steps: dict[tuple[str, int], RankStep] = field(default_factory=dict)  # by (rule, step)


class RecordingDataset:
    """Dataset that records which samples were read."""

    def __init__(self, data: Dataset):
        self.data, self.asked = data, list[list[int]]()
        self.vocab_size, self.samples, self.fingerprint = data.vocab_size, data.samples, data.fingerprint

    def batch(self, indices: Sequence[int]) -> Batch:
        self.asked.append(list(indices))
        return self.data.batch(indices)


def compare(job: ComparisonJob) -> RankReport:
    """Run every rule of the job on this rank and compare each step."""
    config = next(iter(job.rules.values()))
    layout, rank = config.parallel, dist.get_rank()
    device = pick_device(config.train.device, rank, shared=True)
    with FAULTS[job.inject].inject() if job.inject else nullcontext():
        # One mesh for all rules: groups are made once, since their names depend on how many a process has made.
        mesh = Mesh(layout, rank, device, job.transport or choose_transport(device, layout.world_size))
        report = RankReport(mesh.describe(), rank // (layout.cp * layout.tp) % layout.dp)
        for rule, config in job.rules.items():
            samples = RecordingDataset(make_samples(config, job.shape))
            engine = Engine(config, job.shape, mesh, samples)
            report.held = [
                (name, piece.global_shape, piece.box, piece.primary)
                for name, pieces in engine.parameters.weights().items()
                for piece in pieces
            ]
            for step in range(job.steps):
                report.steps[rule, step] = _compare_step(engine, job, rule, step, samples)
    return report


def _compare_step(engine: Engine, job: ComparisonJob, rule: str, step: int, samples: RecordingDataset) -> RankStep:
    tracers = [Tracer(stage.module) for stage in engine.stages if job.trace and step == job.steps - 1]
    scale = engine.loss_scale.value if engine.loss_scale else 1.0
    choices = Choices([stage.module for stage in engine.stages], job.shape, engine.config.data.sequence_length)
    result = engine.step(step)
    n = engine.config.train.global_batch
    # Samples of the next step may have been read too.
    places = [[index - step * n for index in indices] for indices in samples.asked if indices[0] // n == step]
    routing = engine.routing.totals.cpu() if engine.routing else None
    depths = engine.depths.totals.cpu() if engine.depths else None
    found = RankStep(result.loss, result.gradient_norm, routing, choices.taken(), depths, places)
    held = {
        "gradient": engine.parameters.reduced_gradients(), "weight": engine.weights(),
        "in use": _unsharded_weights(engine),
    }
    with safe_open(step_file(job.folder, rule, step), "pt") as file:
        for kind, tensors in held.items():
            for name, pieces in tensors.items():
                found.differences.update(compare_pieces(file, kind, name, pieces))
    inside = all(0 <= index < n for indices in places for index in indices)
    if not inside or len(places) < engine.microbatches:
        return found  # other samples than the step's: `check_samples` reports them
    for tracer, stage in zip(tracers, engine.stages, strict=False):  # no tracers, or one per stage
        actions = engine.program.actions[engine.mesh.index("pp")]
        passed = [
            ForwardTrace(places[a.microbatch], a.microbatch, engine.runtime.tokens, engine.runtime.slice_tokens(a.part))
            for a in actions
            if a.op is Op.FORWARD and a.stage == stage.index
        ]
        errors = trace_errors(tracer, trace_file(job.folder), engine.mesh, job.shape, passed, scale)
        found.trace.update(errors)
    return found


def _unsharded_weights(engine: Engine) -> dict[str, list[Piece]]:
    """Return the weights of the next forward, where they stay unsharded between steps."""
    found: dict[str, list[Piece]] = {}
    for bucket in engine.parameters.buckets:
        if bucket.keep_full:
            for slot in bucket.slots:
                box = slot.placement.box
                tensor = slot.parameter.detach()[tuple(slice(n) for n in box.shape)]  # without padding
                found.setdefault(slot.placement.name, []).append(Piece(slot.placement.global_shape, box, tensor))
    return found


def compare_pieces(file: safe_open, kind: str, name: str, pieces: Sequence[Piece]) -> dict[str, float]:
    """Return the differences of this rank's pieces of a parameter from the reference's (`RankStep.differences`)."""
    expected = file.get_slice(f"{'gradient' if kind == 'gradient' else 'weight'}/{name}")
    key = f"{kind}/{name}"
    found = {key: 0.0}
    for piece in pieces:
        if tuple(expected.get_shape()) != piece.global_shape:
            return {key: torch.inf}
        if piece.box.numel == 0:
            continue
        difference = piece.tensor.cpu().double() - expected[piece.box.slices]
        for one, part in with_experts(key, difference, piece.box.offset[0]):
            found[one] = max(found.get(one, 0.0), largest(part))
    return found
