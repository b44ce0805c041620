"""What one rank's training engine is made of: its stages of the model, their optimizer, and the program they run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Literal

import torch

from shoal.engine.collectives.mesh import Mesh
from shoal.engine.data.batches import Batch, Dataset
from shoal.engine.data.prefetch import Ahead
from shoal.engine.optim.build import build_for
from shoal.engine.parallel.apply import build_stages, initialise
from shoal.engine.parallel.context.causal_blocks import places_of
from shoal.engine.parallel.context.token_order import spread
from shoal.engine.parallel.float8 import Float8
from shoal.engine.parallel.zero.optimizer_shards import shards_of
from shoal.engine.precision.loss_scale import LossScale
from shoal.engine.precision.policy import POLICIES
from shoal.engine.runtime import Runtime
from shoal.pipeline.checker import check_program
from shoal.pipeline.from_layout import build_layout_program, choose_slices
from shoal.pipeline.program import Program
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig
from shoal.training.resilience.spikes import Skips
from shoal.training.step.mixture_of_depths import DepthsRouting
from shoal.training.step.routing import Routed, Routing


class EngineState:
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
        self.slices = choose_slices(
            layout, shape, microbatches=self.microbatches, sequence_length=config.data.sequence_length
        )
        self.program = build_layout_program(layout, self.microbatches, len(self.slices))
        check_program(self.program, tied=shape.tied)
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
        self._ahead = _batches_of(weakref.ref(self))  # the thread that makes them must not own the engine
        self.skip(Skips())
        self.shift = 0  # places on among the replicas, whose samples this one takes: to compute a step twice

    def skip(self, skips: Skips) -> None:
        """Leave out these batches of the data from now on."""
        self.skips = skips
        self.batches_of: Callable[[int], list[Batch]] = Ahead(self._ahead, self.config.train.steps)

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

    def make_batches(self, step: int) -> list[Batch]:
        """This replica's samples of a step, micro-batch after micro-batch, on the host."""
        n = self.config.parallel.micro_batch
        starts = (self.first_sample(step, m) for m in range(self.microbatches))
        return [self.samples.batch(range(start, start + n)) for start in starts]

    def first_sample(self, step: int, microbatch: int) -> int:
        """The global index of the first sample of one of this replica's micro-batches."""
        layout = self.config.parallel
        replica = (self.mesh.index("dp") + self.shift) % layout.dp
        place = (microbatch * layout.dp + replica) * layout.micro_batch
        return self.skips.batch(step) * self.config.train.global_batch + place


def _batches_of(reference: weakref.ref[EngineState]) -> Callable[[int], list[Batch]]:
    def make(step: int) -> list[Batch]:
        engine = reference()
        assert engine is not None, "an engine that is gone asks for no batches"
        return engine.make_batches(step)

    return make


def attention_kernel(
    choice: Literal["auto", "sdpa", "explicit"], device: torch.device, dtype: torch.dtype
) -> Literal["sdpa", "explicit"]:
    """The kernel of a run; "auto" is what `shoal bench attention` measured fastest.

    That is sdpa, but in bf16 on the CPU, where torch's kernel is slow, attention written out.
    """
    if choice != "auto":
        return choice
    return "explicit" if device.type == "cpu" and dtype == torch.bfloat16 else "sdpa"
