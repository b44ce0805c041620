"""The engine of a replica that does not wait for all others: parameter server, Hogwild!, gossip, group averaging."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal, overload

import torch
from torch import Tensor

from shoal.base.boxes import Piece
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce, read
from shoal.engine.collectives.shm.window import Window
from shoal.engine.data.batches import Batch, Dataset
from shoal.engine.optim.build import build as build_optimizer
from shoal.engine.optim.schedule import learning_rate
from shoal.pipeline.from_layout import build_forwards
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig
from shoal.training.async_dp.engines import Diverged, ReplicaEngine, ReplicaResult
from shoal.training.async_dp.methods.gossip import Push
from shoal.training.async_dp.methods.hogwild import Hogwild
from shoal.training.async_dp.methods.method import Method
from shoal.training.async_dp.methods.queue import COUNTERS, Queue
from shoal.training.async_dp.methods.server import Server
from shoal.training.async_dp.methods.wagma import GroupAverage

COLUMNS = ("steps", "loss", "tokens", "norm", "computing", "total", "updates", "stale", "stalest")
"""What each replica tells of itself, as sums from the beginning of this process (stalest: the most)."""

COPIES = 24  # of the weights, for which a window has room by replica: more than any method takes


class FreeEngine(ReplicaEngine):
    """One replica, the window that it shares with the others, and the method between them.

    Attributes:
        window: of all replicas.
        queue: what is to be done.
        board: what each replica tells of itself, [replicas, `COLUMNS`], float64.
        arrived: the first of its counters of meetings; then one for what the first replica decided.
    """

    def __init__(self, config: RunConfig, shape: ModelShape, mesh: Mesh, samples: Dataset):
        super().__init__(config, shape, mesh, samples)
        n = self.replicas
        room = n * COPIES * self.flat.numel * self.flat.weights[0].element_size()
        self.window = Window(mesh.group("dp"), 64 + 64 * n, room + 2**20)
        self.queue = Queue(self.window, 0, 0, common=config.data.sampler == "pool")
        self.arrived = COUNTERS + n
        self.board = self.window.tensor(n * len(COLUMNS), torch.float64).view(n, len(COLUMNS))
        self.method = self._method(self.arrived + n + 2)
        self.optimizer = self.method.optimizer

    def _method(self, counters: int) -> Method:
        """The method of the run, whose counters in the window begin here; lock 0 is the queue's."""
        config, relaxed, sync = self.config, self.config.relaxed, self.config.parallel.sync
        here = (self.window, self.flat, self.optimizer)
        build = partial(build_optimizer, config.optimizer, compile=config.train.compile)
        match sync:
            case "ps-bsp" | "ps-ssp" | "ps-async":
                bound = {"ps-bsp": 0, "ps-ssp": relaxed.staleness, "ps-async": None}[sync]
                return Server(
                    *here, build, counters=counters, locks=1, bound=bound, aware=relaxed.staleness_aware,
                    clip=config.optimizer.clip_norm,
                )
            case "hogwild":
                return Hogwild(*here, build, counters=counters)
            case "sgp":
                return Push(*here, counters=counters, locks=1, staleness=relaxed.staleness)
            case "wagma":
                return GroupAverage(
                    *here, counters=counters, locks=1, size=relaxed.group, staleness=relaxed.staleness,
                    global_every=relaxed.global_every,
                )
        raise ValueError(sync)

    # ---- one step ----------------------------------------------------------------------------------------------

    @overload
    def step(self, step: int, *, stop: bool = False, dry: Literal[False] = False) -> ReplicaResult: ...

    @overload
    def step(self, step: int, *, stop: bool = False, dry: bool) -> ReplicaResult | None: ...

    def step(self, step: int, *, stop: bool = False, dry: bool = False) -> ReplicaResult | None:
        """This replica's part of a step, with the samples of `sampler`."""
        if self.method.before(step):
            self.parameters.gather()
        result = super().step(step, stop=stop, dry=dry)
        assert result is None or isinstance(result, ReplicaResult), "`update` makes one"
        return result

    def count(self, batches: Sequence[Batch]) -> int:
        """Of this replica."""
        return sum(batch.unmasked() for batch in batches)

    def update(self, step: int, loss: Tensor, tokens: int, stop: bool) -> ReplicaResult:
        """Clip, and let the method use the gradients.

        Raises:
            Diverged: before any weight is changed.
        """
        mean, norm = float(loss) / max(1, tokens), math.sqrt(float(self.parameters.square_norm()))
        if not (math.isfinite(mean) and math.isfinite(norm)):
            raise Diverged(f"step {step}: replica {self.replica} has loss {mean:g}, gradient norm {norm:g}")
        clip = self.config.optimizer.clip_norm
        if self.method.clips and clip and norm > clip:
            self.parameters.scale(clip / norm)
        rate = learning_rate(step, self.config.train.steps, self.config.optimizer)
        self.method.update(step, rate, tokens)
        return ReplicaResult(mean, norm, rate, tokens, stop, met=False)

    def evaluate_among(self, samples: Dataset, group: Group | None) -> float:
        """As `evaluate`, by the ranks of a group."""
        index, size = (0, 1) if group is None else (group.rank(), group.size())
        n = self.config.parallel.micro_batch
        passes = -(-self.config.train.validation_sequences // n)
        mine = range(index, passes, size)
        batches = [samples.batch(range(m * n, (m + 1) * n)).to(self.mesh.device) for m in mine]
        sums = torch.zeros(2, dtype=torch.float64)
        if batches:
            sums[0] = self._runtime(build_forwards(self.program, len(batches))).evaluate(batches)
            sums[1] = sum(batch.unmasked() for batch in batches)
        loss, tokens = read(all_reduce(sums, group))
        return loss / max(1.0, tokens)

    # ---- state -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, list[Piece]]:
        """What the run stands for, and what each replica has for itself; only where the replicas have met."""
        state = {f"model.{name}": pieces for name, pieces in self.parameters.weights().items()}
        for kind, parameters in self.method.common_states().items():
            state |= {f"optimizer.{kind}.{name}": pieces for name, pieces in parameters.items()}
        return self.common(state) | self.own(self.method.own_states())

    def restored(self, step: int) -> None:
        """As `Engine`."""
        self.method.restored()
        self.parameters.gather()
