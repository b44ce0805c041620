"""Components of one rank's training engine: model stages, optimizer, program and batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from shoal.engine.checkpoint.hugging_face import HFWeights
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.data.batches import Batch, Dataset, Prefetcher
from shoal.engine.data.order import OverlappingShards
from shoal.engine.optim.build import build_for
from shoal.engine.optim.from_torch import MOMENTS
from shoal.engine.optim.rule import Rule
from shoal.engine.optim.shards import Shards
from shoal.engine.parallel.zero.optimizer_shards import build_optimizer_shards
from shoal.engine.precision.loss_scale import LossScale
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig
from shoal.spec.sync_methods import COMPRESSED
from shoal.training.resilience.spikes import Skips
from shoal.training.step.model_state import ModelState
from shoal.training.step.routing import DepthsRouting
from shoal.training.step.source_losses import SourceLosses


class EngineState(ModelState):
    """Model stages of this rank, their optimizer and the program that they run.

    Args:
        samples: training data; equal on every rank.
        initial: whether to compute the initial values; without them the parameters are undefined.

    Attributes:
        loss_replicas: group whose tokens the loss is averaged over.
        observe: callback of each step, called when the gradients are complete.
        estimating: whether the running passes estimate the Hessian instead of computing the step.
        replica_offset: offset of the replica whose samples are used, to compute a step twice.
        failed: float32 [] on the device, 1 after a started step that was not finite; then no update changes anything.
    """

    def __init__(
        self, config: RunConfig, shape: ModelShape, mesh: Mesh, samples: Dataset, *, initial: bool = True
    ):
        super().__init__(config, shape, mesh, trained=True)
        self.samples = samples
        layout = config.parallel
        mean = layout.sync == "all-reduce" or layout.sync in COMPRESSED
        self.loss_replicas = (mesh if mean else self.sync_mesh).group("dp")
        if initial:
            self.initialise()
        self.depths = DepthsRouting(self.stages, mesh, shape) if shape.depths else None
        self.layer_counts = [counts for counts in (self.routing, self.depths) if counts]
        mixed = shape.experts is not None or layout.ep > 1
        shards = build_optimizer_shards(
            self.parameters, self.sync_mesh, config.optimizer, self.policy.storage, mixed=mixed
        )
        self.optimizer = self.build_optimizer(shards)
        self.observe: Callable[[], object] | None = None
        self.estimating = False
        self.loss_scale = LossScale(config.loss_scale) if self.policy.formats.scaled else None
        self.source_losses = SourceLosses(samples, self.stages, mesh)
        self.runtime = self.build_runtime(self.program)
        self.runtime.on_loss = self.source_losses.add if self.source_losses.names else None
        self.replica_offset = 0
        self.failed = torch.zeros((), device=mesh.device)
        self.skip(Skips())

    def build_optimizer(self, shards: Shards) -> Rule:
        train = self.config.train
        return build_for(self.policy, self.config.optimizer, shards, train.seed, compile=train.compile)

    def read_weights(self, folder: Path) -> HFWeights:
        weights = super().read_weights(folder)
        if self.config.optimizer.from_weights:
            states = self.optimizer.states()
            for kind, named in states.items():
                for name, pieces in named.items():
                    for piece in pieces:
                        weights.fill(name, piece, kind)
            self.optimizer.resume_at(weights.updates(states[MOMENTS[0]]))
        return weights

    def complete_gradients(self) -> None:
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

        prefetch = self.prefetches()
        self.get_batches: Callable[[int], list[Batch]] = Prefetcher(make, self.config.train.steps) if prefetch else make

    def prefetches(self) -> bool:
        """Return whether the batches of the next step can be made during a step."""
        return self.config.data.sampler != "pool"  # "pool" knows its next samples only when they are drawn

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
