"""Engine of a replica that does not wait for all others: parameter server, Hogwild!, gossip, group averaging."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from shoal.base.boxes import Piece
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce, to_host
from shoal.engine.collectives.shm.window import Window
from shoal.engine.data.batches import Dataset
from shoal.engine.optim.build import build as build_optimizer
from shoal.pipeline.from_layout import build_forwards
from shoal.pipeline.program import Action
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig
from shoal.training.async_dp.engines import Diverged, ReplicaEngine
from shoal.training.async_dp.methods.gossip import Push
from shoal.training.async_dp.methods.hogwild import Hogwild
from shoal.training.async_dp.methods.method import Method
from shoal.training.async_dp.methods.queue import Queue
from shoal.training.async_dp.methods.server import Server, staleness_bound
from shoal.training.async_dp.methods.wagma import GroupAverage
from shoal.training.step.engine import flat_names
from shoal.training.step.optimizer_step import StepResult, clip_factor

COLUMNS = ("steps", "loss", "tokens", "norm", "computing", "total", "updates", "stale", "stalest")
"""Columns of the board: each replica's sums since the process started (stalest: the maximum)."""

COPIES = 24  # space of the window in copies of the weights per replica; an upper bound over the methods


class FreeEngine(ReplicaEngine):
    """Engine of one replica that shares a memory window with the others.

    Attributes:
        window: shared memory of all replicas.
        queue: tickets of steps.
        board: reports of the replicas, [replicas, `COLUMNS`], float64.
        arrived: index of the first meeting counter; one counter per replica, followed by two for the first rank's
            decisions.
        living: group of the living replicas; None for one.
    """

    method: Method

    def __init__(self, config: RunConfig, shape: ModelShape, mesh: Mesh, samples: Dataset):
        super().__init__(config, shape, mesh, samples)
        n, self.living = self.replicas, mesh.group("dp")
        size = n * COPIES * self.flat.numel * self.flat.weights[0].element_size()
        self.window = Window(self.living, 64 + 64 * n, size + 2**20)
        self.queue = Queue(self.window, common=config.data.sampler == "pool")
        self.arrived = self.window.counters(n + 2)
        self.board = self.window.tensor(n * len(COLUMNS), torch.float64).view(n, len(COLUMNS))
        self.method = self._method()
        self.optimizer = self.method.optimizer

    def _method(self) -> Method:
        config, relaxed = self.config, self.config.relaxed
        here = (self.window, self.flat, self.optimizer)
        build = partial(build_optimizer, config.optimizer, compile=config.train.compile)
        match config.parallel.sync:
            case "hogwild":
                return Hogwild(*here, build)
            case "sgp":
                return Push(*here, staleness=relaxed.staleness)
            case "wagma":
                return GroupAverage(
                    *here, size=relaxed.group, staleness=relaxed.staleness, global_every=relaxed.global_every
                )
            case _:
                aware, clip = relaxed.staleness_aware, config.optimizer.clip_norm
                return Server(*here, build, bound=staleness_bound(config), aware=aware, clip=clip)

    def step(self, step: int, *, stop: bool = False, dry: bool = False) -> StepResult:
        """Run one step of this replica, after waiting as the method requires. See `Engine.step`."""
        if self.method.before(step):
            self.parameters.gather()
        return super().step(step, stop=stop, dry=dry)

    def update(self, step: int, tokens: int, rate: float, stop: bool, action: Action, loss: Tensor) -> StepResult:
        """Clip the gradients and pass them to the method.

        Raises:
            Diverged: before any weight changes.
        """
        self.complete_gradients()
        mean, norm = float(loss) / max(1, tokens), math.sqrt(float(self.parameters.square_norm()))
        if not (math.isfinite(mean) and math.isfinite(norm)):
            raise Diverged(f"step {step}: replica {self.replica} has loss {mean:g}, gradient norm {norm:g}")
        if self.method.clips and (factor := clip_factor(self, norm)) != 1:
            self.parameters.scale(factor)
        self.method.update(step, rate, tokens)
        self.refresh_parameters()
        return StepResult(mean, norm, rate, tokens, stop, met=False)

    def evaluate(self, samples: Dataset) -> float:
        """Return the validation loss, computed by the living replicas. See `Engine.evaluate`."""
        index, size = (0, 1) if self.living is None else (self.living.rank(), self.living.size())
        n = self.config.parallel.micro_batch
        passes = range(index, -(-self.config.train.validation_sequences // n), size)
        batches = [samples.batch(range(m * n, (m + 1) * n)).to(self.mesh.device) for m in passes]
        sums = torch.zeros(2, dtype=torch.float64)
        if batches:
            sums[0] = self.runtime_of(build_forwards(self.program, len(batches))).evaluate(batches)
            sums[1] = sum(batch.unmasked() for batch in batches)
        loss, tokens = to_host(all_reduce(sums, self.living))
        return loss / max(1.0, tokens)

    def common_state(self) -> dict[str, list[Piece]]:
        """Return the weights and a server's states; valid only after the replicas have met."""
        return self.model_state() | flat_names("optimizer", self.method.served_states())

    def restored(self, updates: int) -> None:
        self.method.restored()
        self.parameters.gather()
