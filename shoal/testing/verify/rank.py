"""What runs on each rank of the layout that is verified: the engine, and the comparison of this rank's part.

A rank compares its own pieces with the reference's files and sends back numbers alone, so that no rank ever gathers a
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

from shoal.base.boxes import Box, Piece
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.data.batches import Batch, Dataset, SyntheticDataset
from shoal.pipeline.program import Op
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig
from shoal.testing.verify.faults import FAULTS
from shoal.testing.verify.reference import EXPERTS, expert_name, step_file, trace_file
from shoal.testing.verify.routing_trace import Choices
from shoal.testing.verify.trace import ForwardTrace, Tracer, largest, trace_errors
from shoal.training.step.engine import Engine


@dataclass(frozen=True)
class ComparisonJob:
    """One comparison.

    Attributes:
        rules: by name, the run with that optimizer.
        shape: the model.
        steps: training steps.
        folder: the reference's files.
        plant: a fault of `shoal.testing.verify.faults`, or "".
        trace: whether to compare the activations of the last step.
    """

    rules: dict[str, RunConfig]
    shape: ModelShape
    steps: int
    folder: Path
    plant: str = ""
    trace: bool = False


@dataclass
class RankStep:
    """What one rank had in one step.

    Attributes:
        loss, gradient_norm: as reported by the engine.
        samples: for each micro-batch, the places of its samples in the global batch, where they are of this step.
        routing: what all routers counted, as of `StepFacts`; None without experts.
        choices: which experts this rank's tokens were given to, by layer.
        depths: what all layers that take some tokens have counted.
        differences: by "gradient/NAME", "weight/NAME" or "in use/NAME", the largest absolute difference; of each expert
            too, by `expert_name`.
        trace: as of `trace_errors`.
    """

    loss: float
    gradient_norm: float
    samples: list[list[int]]
    routing: torch.Tensor | None = None
    choices: dict[int, int] = field(default_factory=dict)
    depths: torch.Tensor | None = None
    differences: dict[str, float] = field(default_factory=dict)
    trace: dict[str, tuple[float, float, int]] = field(default_factory=dict)


@dataclass
class RankReport:
    """What one rank found.

    Attributes:
        where: the rank's coordinates in words.
        replica: which data-parallel replica it belongs to.
        held: (parameter, whole shape, box, whether it is the primary owner) of each piece.
        steps: by (rule, step).
    """

    where: str
    replica: int
    held: list[tuple[str, tuple[int, ...], Box, bool]] = field(default_factory=list)
    steps: dict[tuple[str, int], RankStep] = field(default_factory=dict)


class Recorded:
    """Samples that remember which of them were asked for."""

    def __init__(self, data: Dataset):
        self.data, self.asked = data, list[list[int]]()
        self.vocab_size, self.samples, self.fingerprint = data.vocab_size, data.samples, data.fingerprint

    def batch(self, indices: Sequence[int]) -> Batch:
        """As of the samples."""
        self.asked.append(list(indices))
        return self.data.batch(indices)


def synthetic(config: RunConfig, shape: ModelShape) -> SyntheticDataset:
    """The data of a verification: random tokens, strongly uneven masks, packed documents where the run has them."""
    data = config.data
    return SyntheticDataset(shape.vocab, data.sequence_length, config.train.seed, documents=data.document_mask)


def compare(job: ComparisonJob) -> RankReport:
    """Run every rule of the job on this rank and compare each step."""
    layout = next(iter(job.rules.values())).parallel
    with FAULTS[job.plant].plant() if job.plant else nullcontext():
        # One mesh for all rules: groups are made once, since their names depend on how many a process has made.
        mesh = Mesh(layout, dist.get_rank())
        report = RankReport(mesh.describe(), dist.get_rank() // (layout.cp * layout.tp) % layout.dp)
        for rule, config in job.rules.items():
            samples = Recorded(synthetic(config, job.shape))
            engine = Engine(config, job.shape, mesh, samples)
            report.held = [
                (name, piece.whole, piece.box, piece.primary)
                for name, pieces in engine.parameters.weights().items()
                for piece in pieces
            ]
            for step in range(job.steps):
                report.steps[rule, step] = _step(engine, job, rule, step, samples)
    return report


def _step(engine: Engine, job: ComparisonJob, rule: str, step: int, samples: Recorded) -> RankStep:
    tracers = [Tracer(stage.module) for stage in engine.stages if job.trace and step == job.steps - 1]
    scale = engine.loss_scale.value if engine.loss_scale else 1.0
    choices = Choices([stage.module for stage in engine.stages], job.shape, engine.config.data.sequence_length)
    result = engine.step(step)
    n = engine.config.train.global_batch  # those of the next step may have been asked for too
    places = [[index - step * n for index in indices] for indices in samples.asked if indices[0] // n == step]
    routing = engine.routing.totals if engine.routing else None
    depths = engine.depths.totals if engine.depths else None
    found = RankStep(result.loss, result.gradient_norm, places, routing, choices.taken(), depths)
    with safe_open(step_file(job.folder, rule, step), "pt") as file:
        parameters = engine.parameters
        for key, held in (("gradient", parameters.reduced_gradients()), ("weight", engine.weights())):
            for name, pieces in held.items():
                found.differences |= differences(file, key, name, pieces)
        for name, pieces in _in_use(engine).items():
            found.differences |= differences(file, "weight", name, pieces, kind="in use")
    for tracer, stage in zip(tracers, engine.stages, strict=False):  # no tracers, or one for each
        actions = engine.program.actions[engine.mesh.index("pp")]
        passed = [
            ForwardTrace(places[a.microbatch], a.microbatch, engine.runtime.tokens, engine.runtime.slice_of(a.part))
            for a in actions
            if a.op is Op.FORWARD and a.stage == stage.index
        ]
        found.trace |= trace_errors(tracer, trace_file(job.folder), engine.mesh, job.shape.vocab, passed, scale)
    return found


def _in_use(engine: Engine) -> dict[str, list[Piece]]:
    """The parameters that the next forward will compute with, where they stay whole between steps."""
    found: dict[str, list[Piece]] = {}
    for bucket in engine.parameters.buckets:
        if bucket.keep_full:
            for slot in bucket.slots:
                box = slot.split.box
                here = slot.parameter.detach()[tuple(slice(n) for n in box.shape)]  # without padding
                found.setdefault(slot.split.name, []).append(Piece(slot.split.whole, box, here))
    return found


def differences(
    file: safe_open, key: str, name: str, pieces: Sequence[Piece], *, kind: str | None = None
) -> dict[str, float]:
    """The largest differences of what this rank has of a parameter, and of each expert in it, from the reference's.

    Args:
        file: of the reference's step, which has it as ``key/name``.
        kind: what to call it instead of ``key``.

    Returns:
        As of `RankStep`.
    """
    expected, name_here = file.get_slice(f"{key}/{name}"), f"{kind or key}/{name}"
    found = {name_here: 0.0}
    for piece in pieces:
        if tuple(expected.get_shape()) != piece.whole:
            return {name_here: torch.inf}
        if piece.box.numel == 0:
            continue
        difference = piece.tensor.double() - expected[piece.box.slices]
        found[name_here] = max(found[name_here], largest(difference))
        if EXPERTS in name:
            for expert, part in enumerate(difference, piece.box.offset[0]):
                one = expert_name(name_here, expert)
                found[one] = max(found.get(one, 0.0), largest(part))
    return found
