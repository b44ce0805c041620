"""Components of one rank's training engine: model stages, optimizer, program and batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from shoal.base.boxes import Piece
from shoal.base.files import expanded
from shoal.engine.checkpoint.hugging_face import HFWeights
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.data.batches import Batch, Dataset, Prefetcher
from shoal.engine.data.order import OverlappingShards
from shoal.engine.optim.build import build_for
from shoal.engine.parallel.apply import LocalStage, build_stages, initialise
from shoal.engine.parallel.context.causal_blocks import token_positions
from shoal.engine.parallel.context.token_order import assign_tokens
from shoal.engine.parallel.float8 import Float8
from shoal.engine.parallel.zero.optimizer_shards import build_optimizer_shards
from shoal.engine.parallel.zero.rank_parameters import RankParameters
from shoal.engine.precision.loss_scale import LossScale
from shoal.engine.precision.policy import POLICIES
from shoal.engine.runtime import Runtime
from shoal.pipeline.checker import check_program
from shoal.pipeline.from_layout import build_layout_program, choose_slices
from shoal.pipeline.program import Program
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig
from shoal.spec.sync_methods import COMPRESSED
from shoal.training.resilience.spikes import Skips
from shoal.training.step.routing import DepthsRouting, ExpertRouting


class EngineState:
    """Model stages of this rank, their optimizer and the program that they run.

    Args:
        samples: training data; equal on every rank.
        initial: whether to compute the initial values; without them the parameters are undefined.

    Attributes:
        sync_mesh: ranks that are synchronised in every step. With parallel.sync this is one replica, and the method
            synchronises the replicas.
        loss_replicas: group whose tokens the loss is averaged over.
        observe: callback of each step, called when the gradients are complete.
        estimating: whether the running passes estimate the Hessian instead of computing the step.
        replica_offset: offset of the replica whose samples are used, to compute a step twice.
        validated: metrics of the expert routers in the last validation.
    """

    def __init__(
        self, config: RunConfig, shape: ModelShape, mesh: Mesh, samples: Dataset, *, initial: bool = True
    ):
        self.config, self.shape, self.mesh, self.samples = config, shape, mesh, samples
        layout, train = config.parallel, config.train
        self.policy = POLICIES[train.precision]
        self.microbatches = layout.microbatches(train.global_batch)
        self.slices = choose_slices(
            layout, shape, microbatches=self.microbatches, sequence_length=config.data.sequence_length
        )
        self.program = build_layout_program(layout, self.microbatches, len(self.slices))
        check_program(self.program, tied=shape.tied)
        self.spread = assign_tokens(layout, config.data.sequence_length, self.slices)
        self.float8 = Float8.from_policy(self.policy, config.float8, shape, mesh.device)
        exact = layout.sync == "all-reduce"
        self.sync_mesh = mesh if exact else mesh.replica()
        # Creating a group blocks its ranks and stalls in-flight transfers, so create groups before the first step.
        for view, axis in ((mesh, "world"), (self.sync_mesh, "world"), (mesh, "dp")):
            view.group(axis)
        self.loss_replicas = (mesh if exact or layout.sync in COMPRESSED else self.sync_mesh).group("dp")
        self.stages, self.parameters = self.build_stages()
        if initial:
            self.initialise()
        self.routing = ExpertRouting(self.stages, self.program, mesh, shape) if shape.experts else None
        self.depths = DepthsRouting(self.stages, mesh, shape) if shape.depths else None
        self.layer_counts = [counts for counts in (self.routing, self.depths) if counts]
        self.validated: dict[str, Any] = {}
        mixed = shape.experts is not None
        shards = build_optimizer_shards(
            self.parameters, self.sync_mesh, config.optimizer, self.policy.storage, mixed=mixed
        )
        self.optimizer = build_for(self.policy, config.optimizer, shards, train.seed, compile=train.compile)
        self.observe: Callable[[], object] | None = None
        self.estimating = False
        self.loss_scale = LossScale(config.loss_scale) if self.policy.formats.scaled else None
        self.runtime = self.build_runtime(self.program)
        self.replica_offset = 0
        self.skip(Skips())

    def build_stages(self) -> tuple[list[LocalStage], RankParameters]:
        """Build this rank's stages, with undefined parameters."""
        train = self.config.train
        return build_stages(
            self.shape, self.program, self.sync_mesh, self.policy, self.spread,
            kernel=attention_kernel(train.attention, self.mesh.device, self.policy.compute), seed=train.seed,
            compile=train.compile, cuda_graphs=train.cuda_graphs, float8=self.float8,
        )

    def initialise(self) -> None:
        """Fill the parameters with the initial values of the run's seed."""
        initialise(self.parameters, self.shape, self.config.train.seed)

    def weights(self) -> dict[str, list[Piece]]:
        """Return the model's pieces on this rank: parameters and router biases."""
        return self.parameters.weights() | (self.routing.state() if self.routing else {})

    @torch.no_grad()
    def read_weights(self, folder: Path) -> None:
        """Replace the initial weights by a model folder's, of which each rank reads its own pieces."""
        weights = HFWeights(expanded(folder, "model.weights"), self.shape)
        for name, pieces in self.weights().items():
            for piece in pieces:
                weights.fill(name, piece)
        self.parameters.gather()

    def build_runtime(self, program: Program) -> Runtime:
        """Build the runtime that executes a program on this rank's stages."""
        layout, rank = self.config.parallel, self.mesh.index("cp")
        lengths = self.spread.lengths(rank)
        return Runtime(
            program, self.stages, self.sync_mesh,
            hidden_shape=(layout.micro_batch, sum(lengths) // layout.sequence_shards, self.shape.hidden // layout.tp_x),
            dtype=self.policy.compute, slices=lengths, cuda_graphs=self.config.train.cuda_graphs,
            tokens=token_positions(self.spread.chunks(rank), self.mesh.device) if layout.cp > 1 else None,
        )

    def complete_gradients(self, *_: object) -> None:
        """Sum the tied embedding's gradient over the first and last stages, which completes all gradients."""
        self.parameters.sum_ends()
        if self.observe:
            self.observe()

    def refresh_parameters(self) -> None:
        """Refresh the parameters used for computing after an update, if the program has no GATHER.

        They may be a copy, in another dtype or on the device.
        """
        if self.mesh.layout.zero in (0, 3):
            self.parameters.gather()

    # ---- batches -------------------------------------------------------------------------------------------------

    def skip(self, skips: Skips) -> None:
        """Exclude these batches of the data from now on."""
        self.skips = skips
        reference = weakref.ref(self)  # the prefetch thread must not own the engine

        def make(step: int) -> list[Batch]:
            engine = reference()
            assert engine is not None, "a deleted engine asks for no batches"
            return engine.make_batches(step)

        ahead = self.config.data.sampler != "pool"  # "pool" knows its next samples only when they are drawn
        self.get_batches: Callable[[int], list[Batch]] = Prefetcher(make, self.config.train.steps) if ahead else make

    def make_batches(self, step: int) -> list[Batch]:
        """Return this replica's micro-batches of a step, on the host."""
        return [self.samples.batch(self.sample_indices(step, m)) for m in range(self.microbatches)]

    def sample_indices(self, step: int, microbatch: int) -> Sequence[int]:
        """Return the global sample indices of one of this replica's micro-batches."""
        config, n = self.config, self.config.parallel.micro_batch
        replicas = config.parallel.dp
        replica = (self.mesh.index("dp") + self.replica_offset) % replicas
        if config.data.sampler == "overlap":
            own = OverlappingShards(replicas, replica, self.samples.samples, config.data.overlap)
            return own((step * self.microbatches + microbatch) * n + np.arange(n)).tolist()
        first = self.skips.batch(step) * config.train.global_batch + (microbatch * replicas + replica) * n
        return range(first, first + n)


def attention_kernel(
    choice: Literal["auto", "sdpa", "explicit"], device: torch.device, dtype: torch.dtype
) -> Literal["sdpa", "explicit"]:
    """Resolve the attention kernel of a run.

    "auto" takes the fastest of `shoal bench attention`: sdpa, except for bf16 on the CPU, where torch's kernel is slow.
    """
    if choice != "auto":
        return choice
    return "explicit" if device.type == "cpu" and dtype == torch.bfloat16 else "sdpa"
