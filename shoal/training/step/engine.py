"""One rank's training engine: the way of a step, from the step's number to updated weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shoal.base.boxes import Piece
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce, read
from shoal.engine.data.batches import Batch, Dataset
from shoal.engine.data.prefetch import Ahead
from shoal.engine.optim.build import build_for
from shoal.engine.optim.schedule import learning_rate
from shoal.engine.optim.sophia import Sophia
from shoal.engine.parallel.apply import build_stages, initialise
from shoal.engine.parallel.context.causal_blocks import places_of
from shoal.engine.parallel.context.token_order import spread
from shoal.engine.parallel.float8 import Float8
from shoal.engine.parallel.zero.optimizer_shards import shards_of
from shoal.engine.precision.loss_scale import LossScale
from shoal.engine.precision.policy import POLICIES
from shoal.engine.runtime import Runtime
from shoal.pipeline.checker import check
from shoal.pipeline.from_layout import forwards_of, program_of, slices_of
from shoal.pipeline.program import Program
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig
from shoal.training.resilience.spikes import Skips
from shoal.training.step.curvature import estimate
from shoal.training.step.mixture_of_depths import DepthsRouting, Foreseen
from shoal.training.step.optimizer_step import ManyUpdates, OneUpdate
from shoal.training.step.routing import Routed, Routing


@dataclass(frozen=True)
class StepResult:
    """What one step computed, equal on all ranks.

    Attributes:
        loss: mean over the global batch's unmasked tokens [nats].
        gradient_norm: of the whole model, before clipping (the mean over several updates); not finite where the step
            was skipped.
        learning_rate: that the update used.
        tokens: unmasked targets in the global batch.
        stop: whether any rank was asked to stop.
        loss_scale: that the loss was multiplied by; 1 without one.
        skipped: whether no update was made, since a gradient overflowed.
    """

    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    stop: bool
    loss_scale: float = 1.0
    skipped: bool = False


class Engine:
    """This rank's stages of the model, their optimizer, and the program they run.

    Args:
        config: the run.
        shape: the model, from ``config.model`` and the tokenizer.
        mesh: of ``config.parallel``.
        samples: the training data; every rank sees the same.
    """

    def __init__(self, config: RunConfig, shape: ModelShape, mesh: Mesh, samples: Dataset):
        self.config, self.shape, self.mesh, self.samples = config, shape, mesh, samples
        layout, train = config.parallel, config.train
        self.policy = POLICIES[train.precision]
        self.microbatches = layout.microbatches(train.global_batch)
        self.slices = slices_of(
            layout, shape, microbatches=self.microbatches, sequence_length=config.data.sequence_length
        )
        self.program = program_of(layout, self.microbatches, len(self.slices))
        check(self.program, tied=shape.tied)
        self.spread = spread(layout, config.data.sequence_length, self.slices)
        self.float8 = Float8.of(self.policy, config.float8, shape, mesh.device)
        # A relaxed run keeps its replicas together in its own way: to all that follows, each is alone.
        self.here = mesh if layout.sync == "all-reduce" else mesh.replica()
        # To make a group its ranks wait for each other, and meanwhile move nothing that they have under way: so what a
        # step needs is made before it.
        for view, axis in ((mesh, "world"), (self.here, "world"), (mesh, "dp")):
            view.group(axis)
        self.stages, self.parameters = build_stages(
            shape, self.program, self.here, self.policy, self.spread,
            kernel=attention_kernel(train.attention, mesh.device, self.policy.compute), compile=train.compile,
            float8=self.float8,
        )
        self._initialise()
        self.routing = Routing(self.stages, self.program, mesh, shape) if shape.experts else None
        self.validated: Routed | None = None  # what routers did in the last validation
        self.depths = DepthsRouting(self.stages, mesh, shape) if shape.depths else None
        for stage in self.stages:
            stage.module.sequences, stage.module.seed = train.global_batch, train.seed
        mixed = shape.experts is not None
        shards = shards_of(self.parameters, self.here, config.optimizer, self.policy.storage, mixed=mixed)
        self.optimizer = build_for(self.policy, config.optimizer, shards, train.seed, compile=train.compile)
        self.observe: Callable[[], object] | None = None  # called before each update, when the gradients are complete
        self.estimating = False  # passes are under way that estimate the Hessian, and are none of the step's own
        self.loss_scale = LossScale(config.loss_scale) if self.policy.formats.scaled else None
        self.runtime = self._runtime(self.program)
        engine = weakref.ref(self)  # the thread that makes them must not own the engine
        self._ahead = lambda step: engine().make_batches(step)
        self.skip(Skips())
        self.shift = 0  # places on among the replicas, whose samples this one takes: to compute a step twice

    def skip(self, skips: Skips) -> None:
        """Leave out these batches of the data from now on."""
        self.skips = skips
        self.batches_of = Ahead(self._ahead, self.config.train.steps)

    def _initialise(self) -> None:
        initialise(self.parameters, self.shape, self.config.train.seed)

    def _runtime(self, program: Program) -> Runtime:
        layout, rank = self.config.parallel, self.mesh.index("cp")
        lengths = self.spread.lengths(rank)
        return Runtime(
            program, self.stages, self.here,
            hidden_shape=(layout.micro_batch, sum(lengths) // layout.token_multiple, self.shape.hidden // layout.tp_x),
            dtype=self.policy.compute, slices=lengths,
            tokens=places_of(self.spread.chunks(rank), self.mesh.device) if layout.cp > 1 else None,
        )

    # ---- one step ----------------------------------------------------------------------------------------------

    def step(self, step: int, *, stop: bool = False, dry: bool = False) -> StepResult | None:
        """Run step number ``step`` (0 is the first): its samples are a pure function of that number.

        Args:
            stop: whether this rank was asked to stop; all ranks learn it from the result.
            dry: compute everything but leave the weights alone; returns None.

        Raises:
            NonFinite: on every rank alike, before any weight is changed (`ManyUpdates`: of that stage).
        """
        batches = self.batches_of(step)
        update_of = self.program.update_of
        tokens = self._count(batches, [update_of[m] for m in range(self.microbatches)])
        rate = learning_rate(step, self.config.train.steps, self.config.optimizer)
        kind = ManyUpdates if self.program.updates > 1 else OneUpdate
        if self.routing:
            self.routing.begin()
        if self.depths:
            self.depths.begin()
        updates = kind(self, step, sum(tokens), stop=stop, rate=None if dry else rate)
        loss_scale = self.loss_scale.value if self.loss_scale else 1.0
        for stage in self.stages:  # routers begin the backward of their own losses, which are means over sequences
            stage.module.sequences = self.config.train.global_batch / loss_scale
        scale = np.array([loss_scale / max(1, tokens[update_of[m]]) for m in range(self.microbatches)])
        batches = [batch.to(self.mesh.device) for batch in batches]
        if not dry and isinstance(self.optimizer, Sophia) and self.optimizer.due:
            self.optimizer.learn(estimate(self, step, batches, sum(tokens)))
        updates.finish(self.runtime.step(batches, scale, updates))
        if dry:
            return None
        if self.float8:
            self.float8.end_step(self.mesh.group("world"))
        return StepResult(
            updates.loss, updates.norm, rate, updates.tokens, updates.stopped, loss_scale, updates.skipped
        )

    def make_batches(self, step: int) -> list[Batch]:
        """This replica's samples of a step, micro-batch after micro-batch, on the host."""
        return [self._batch(self.samples, step, m) for m in range(self.microbatches)]

    def _batch(self, samples: Dataset, step: int, microbatch: int) -> Batch:
        """This replica's samples of one micro-batch, on the host: consecutive replicas take consecutive runs."""
        start = self.first_sample(step, microbatch)
        return samples.batch(range(start, start + self.config.parallel.micro_batch))

    def first_sample(self, step: int, microbatch: int) -> int:
        """The global index of the first sample of one of this replica's micro-batches."""
        layout = self.config.parallel
        replica = (self.mesh.index("dp") + self.shift) % layout.dp
        place = (microbatch * layout.dp + replica) * layout.micro_batch
        return self.skips.batch(step) * self.config.train.global_batch + place

    def _count(self, batches: Sequence[Batch], update_of: Sequence[int]) -> list[int]:
        """Unmasked targets of each update's micro-batches, of all replicas."""
        counts = torch.zeros(max(update_of) + 1, dtype=torch.int64)
        for batch, update in zip(batches, update_of, strict=True):
            counts[update] += batch.unmasked()
        return read(all_reduce(counts.to(self.mesh.device), self.mesh.group("dp")))

    def evaluate(self, samples: Dataset) -> float:
        """Mean loss [nats per token] of the first ``validation_sequences`` samples, rounded up to whole passes.

        What routers did in them is then in ``validated``.
        """
        per_pass = self.config.parallel.micro_batch * self.config.parallel.dp
        passes = -(-self.config.train.validation_sequences // per_pass)
        program = forwards_of(self.program, passes)
        batches = [samples.batch(self._validation_indices(m)) for m in range(passes)]
        tokens = max(1, *self._count(batches, [0] * passes))
        batches = [batch.to(self.mesh.device) for batch in batches]
        if self.routing:
            self.routing.begin_validation()
        loss = self._runtime(program).evaluate(batches) * (self.mesh.index("tp") == 0)
        if self.routing:
            self.validated = self.routing.end_validation(passes * per_pass, self.config.data.sequence_length)
        return read(all_reduce(loss, self.mesh.group("world"))) / tokens

    def _validation_indices(self, microbatch: int) -> range:
        n = self.config.parallel.micro_batch
        start = (microbatch * self.config.parallel.dp + self.mesh.index("dp")) * n
        return range(start, start + n)

    # ---- state -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, list[Piece]]:
        """Everything that a checkpoint holds, under names that are the same on every layout."""
        state = {f"model.{name}": pieces for name, pieces in self.weights().items()}
        for kind, parameters in self.optimizer.states().items():
            state |= {f"optimizer.{kind}.{name}": pieces for name, pieces in parameters.items()}
        if self.float8 and self.float8.history:
            state |= self.float8.history.state(primary=self.mesh.rank == 0)
        return state

    def routed(self) -> Routed | None:
        """What the routers did in the last step; None without experts."""
        if self.routing is None:
            return None
        return Routed.of(self.routing.totals, self.shape, self.config.train.global_batch,
                         self.config.data.sequence_length)

    def foreseen(self) -> Foreseen | None:
        """How well it was foreseen in the last step which tokens pass through layers; None where all do."""
        if self.depths is None:
            return None
        return self.depths.foreseen(self.config.train.global_batch, self.config.data.sequence_length)

    def weights(self) -> dict[str, list[Piece]]:
        """The pieces of the model on this rank: parameters, and the biases of routers."""
        return self.parameters.weights() | (self.routing.state() if self.routing else {})

    def restored(self, updates: int) -> None:
        """The state was overwritten with that after so many updates: spread it."""
        self.optimizer.resume_at(updates)
        if self.float8 and self.float8.history:
            self.float8.history.restored()
        self.parameters.gather()


def attention_kernel(choice: str, device: torch.device, dtype: torch.dtype) -> str:
    """The kernel of a run; "auto" is what `shoal bench attention` measured fastest.

    That is sdpa, but in bf16 on the CPU, where torch's kernel is slow, attention written out.
    """
    if choice != "auto":
        return choice
    return "explicit" if device.type == "cpu" and dtype == torch.bfloat16 else "sdpa"
