"""Engines of one data-parallel replica that is synchronised by a relaxed method."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from shoal.base.boxes import Piece
from shoal.base.errors import DivergenceError
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce, to_host
from shoal.engine.collectives.shm.window import Window
from shoal.engine.data.batches import Dataset
from shoal.engine.optim.build import build as build_optimizer
from shoal.pipeline.from_layout import build_forwards
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig
from shoal.spec.sync_methods import LOCAL, UNSYNCHRONISED
from shoal.training.async_dp.methods.average import LocalSteps
from shoal.training.async_dp.methods.compress import Compressed
from shoal.training.async_dp.methods.flat import Flat
from shoal.training.async_dp.methods.gossip import Push
from shoal.training.async_dp.methods.hogwild import Hogwild
from shoal.training.async_dp.methods.method import Method, MethodStates
from shoal.training.async_dp.methods.powersgd import PowerSGD
from shoal.training.async_dp.methods.quantised import Int8, OneBit, Quantised
from shoal.training.async_dp.methods.queue import Queue
from shoal.training.async_dp.methods.server import Server, staleness_bound
from shoal.training.async_dp.methods.topk import TopK
from shoal.training.async_dp.methods.wagma import GroupAverage
from shoal.training.step.engine import Engine, flat_names
from shoal.training.step.optimizer_step import NonFinite, StepResult, clip_factor, sum_totals
from shoal.training.step.own_engine import OwnEngine

COLUMNS = ("steps", "loss", "tokens", "norm", "computing", "total", "updates", "stale", "stalest")
"""Columns of the board: each replica's sums since the process started (stalest: the maximum)."""

COPIES = 24  # space of the window in copies of the weights per replica; an upper bound over the methods


class Diverged(DivergenceError):
    """Error for a NaN or infinite loss or gradient norm of one replica, unknown to the other replicas."""


class ReplicaEngine(Engine):
    """Base class of engines that compute only their own replica's step, up to `update`.

    Attributes:
        represented: dead replicas whose states in a checkpoint are copies of this one's.
        flat: weights and gradients as flat tensors.
    """

    method: Compressed | LocalSteps | Method

    def __init__(self, config: RunConfig, shape: ModelShape, mesh: Mesh, samples: Dataset):
        super().__init__(config, shape, mesh, samples)
        self.replica, self.replicas = mesh.index("dp"), mesh.size("dp")
        self.represented: list[int] = []
        self.flat = Flat(self.parameters)

    @abstractmethod
    def update(self, step: int, tokens: float, rate: float, stop: bool, loss: Tensor) -> StepResult:
        """Update the weights by the method. See `Engine.update`."""

    def divide_gradients(self) -> None:
        """Divide the gradients of this replica by the terms of their loss, if the loss was not."""
        if self.gradient_terms != 1:
            self.parameters.scale(1 / self.gradient_terms)

    def clip_and_step(self, norm: float, rate: float) -> None:
        """Clip by a gradient norm and step this replica's optimizer."""
        if (factor := clip_factor(self, norm)) != 1:
            self.parameters.scale(factor)
        self.optimizer.step(rate)

    def common_state(self) -> dict[str, list[Piece]]:
        """Return the weights, by their names in a checkpoint; valid only when the replicas have synchronised."""
        return {f"model.{name}": pieces for name, pieces in self.weights().items()}

    def method_states(self) -> MethodStates:
        """Return everything that the replicas keep besides the common state."""
        return self.method.states()

    def state(self) -> dict[str, list[Piece]]:
        """Return all tensors that a checkpoint stores.

        These are states equal on all replicas (saved by the first), states spread over the replicas, and states of each
        replica, named by its index.
        """
        states = self.method_states()
        state = self.common_state() | flat_names("optimizer", states.served) | flat_names("relaxed", states.common)
        for pieces in state.values():
            for piece in pieces:
                piece.primary &= self.replica == 0
        state |= flat_names("relaxed", states.spread)
        for replica in (self.replica, *self.represented):
            state |= flat_names(f"replica.{replica}", states.own)
        return state


class CompressedEngine(ReplicaEngine):
    """Engine that sums the gradients of the replicas in compressed form; the replicas stay bitwise equal."""

    method: Compressed

    def __init__(self, config: RunConfig, shape: ModelShape, mesh: Mesh, samples: Dataset):
        super().__init__(config, shape, mesh, samples)
        relaxed, common = config.relaxed, (self.flat, mesh.group("dp"))
        match config.parallel.sync:
            case "powersgd":
                self.method = PowerSGD(*common, relaxed.rank, config.train.seed)
            case "topk":
                self.method = TopK(*common, relaxed.density)
            case sync:
                self.method = Quantised(*common, OneBit(relaxed.block) if sync == "onebit" else Int8(relaxed.block))

    def update(self, step: int, tokens: float, rate: float, stop: bool, loss: Tensor) -> StepResult:
        """Update the weights with the compressed sum of the gradients. See `Engine.update`.

        Raises:
            NonFinite: on every rank, before any weight changes. The error-feedback buffers are then also unchanged,
                unless a sum of finite gradients overflowed.
        """
        self.complete_gradients()
        self.divide_gradients()
        loss_sum, stops, square = to_host(sum_totals(self, loss, stop, self.parameters.square_norm()))
        mean = loss_sum / (tokens or 1)
        if not (math.isfinite(mean) and math.isfinite(square)):  # NaNs would persist in the error-feedback buffers
            raise NonFinite(f"step {step}: loss {mean:g}, sum of the replicas' squared gradient norms {square:g}")
        self.method.sum()
        *_, square = to_host(sum_totals(self, loss, stop, self.parameters.square_norm()))
        norm = math.sqrt(square / self.replicas) if square >= 0 else math.nan  # every replica has the unsharded sum
        if not math.isfinite(norm):
            raise NonFinite(f"step {step}: loss {mean:g}, gradient norm {norm:g}", untouched=False)
        self.clip_and_step(norm, rate)
        self.refresh_parameters()
        return StepResult(mean, norm, rate, tokens, stops > 0)

    def common_state(self) -> dict[str, list[Piece]]:
        return Engine.state(self)


class LocalEngine(ReplicaEngine):
    """Engine that trains independently and averages the weights with the other replicas every few steps."""

    method: LocalSteps

    def __init__(self, config: RunConfig, shape: ModelShape, mesh: Mesh, samples: Dataset):
        super().__init__(config, shape, mesh, samples)
        relaxed, diloco = config.relaxed, config.parallel.sync == "diloco"
        self.method = LocalSteps(
            self.flat, mesh.group("dp"),
            every=relaxed.local_steps,
            rate=relaxed.outer_learning_rate if diloco else 1.0,
            momentum=relaxed.outer_momentum if diloco else 0.0,
            int8=Int8(relaxed.block) if relaxed.outer_int8 else None,
        )
        self._since = torch.zeros(5, dtype=torch.float64, device=mesh.device)

    def update(self, step: int, tokens: float, rate: float, stop: bool, loss: Tensor) -> StepResult:
        """Step the replica's own optimizer; average if due.

        Raises:
            Diverged: before any weight changes, on the ranks of one replica.
        """
        self.complete_gradients()
        self.divide_gradients()
        mine = torch.stack((loss * (self.mesh.index("tp") == 0), self.parameters.square_norm()))
        total, square = to_host(all_reduce(mine, self.sync_mesh.group("world")))
        if not (math.isfinite(total) and math.isfinite(square)):
            loss_text = f"loss {total / (tokens or 1):g}"
            raise Diverged(f"step {step}: replica {self.replica} has {loss_text}; the others continue")
        norm = math.sqrt(square)
        self.clip_and_step(norm, rate)
        self._since += torch.tensor((total, tokens, norm, 1, stop), dtype=torch.float64, device=loss.device)
        result = StepResult(total / (tokens or 1), norm, rate, tokens, met=False)
        if self.method.due(step + 1, self.config.train.steps):
            self.method.average()
            loss_sum, count, norms, steps, stops = to_host(all_reduce(self._since, self.mesh.group("world")))
            self._since.zero_()
            result = StepResult(loss_sum / (count or 1), norms / steps, rate, round(count), stop=stops > 0)
        self.refresh_parameters()
        return result

    def method_states(self) -> MethodStates:
        states = super().method_states()
        return replace(states, own=self.optimizer.states() | states.own)

    def restored(self, updates: int) -> None:
        super().restored(updates)
        self.method.restored()


class OwnCompressedEngine(OwnEngine, CompressedEngine):
    """`CompressedEngine` of a model of one's own."""


class OwnLocalEngine(OwnEngine, LocalEngine):
    """`LocalEngine` of a model of one's own, whose buffers are averaged with its weights."""

    def update(self, step: int, tokens: float, rate: float, stop: bool, loss: Tensor) -> StepResult:
        """Step this replica; average if due. See `LocalEngine.update`."""
        result = super().update(step, tokens, rate, stop, loss)
        if self.method.due(step + 1, self.config.train.steps):
            for stage in self.stages:
                stage.statistics.average(self.mesh.group("dp"))
        return result


class AsyncEngine(ReplicaEngine):
    """Engine of one replica that shares a memory window with the others.

    Attributes:
        board: reports of the replicas, [replicas, `COLUMNS`], float64.
        arrived: index of the first meeting counter; one counter per replica, followed by two for the first rank's
            decisions.
        living: group of the living replicas; None for a single one.
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
        self.method = self._build_method()
        self.optimizer = self.method.optimizer

    def _build_method(self) -> Method:
        config, relaxed = self.config, self.config.relaxed
        common = (self.window, self.flat, self.optimizer)
        build = partial(build_optimizer, config.optimizer, compile=config.train.compile)
        match config.parallel.sync:
            case "hogwild":
                return Hogwild(*common, build)
            case "sgp":
                return Push(*common, staleness=relaxed.staleness)
            case "wagma":
                return GroupAverage(
                    *common, size=relaxed.group, staleness=relaxed.staleness, global_every=relaxed.global_every
                )
            case _:
                aware, clip = relaxed.staleness_aware, config.optimizer.clip_norm
                return Server(*common, build, bound=staleness_bound(config), aware=aware, clip=clip)

    def step(self, step: int, *, stop: bool = False, dry: bool = False) -> StepResult:
        if self.method.before(step):
            self.parameters.gather()
        return super().step(step, stop=stop, dry=dry)

    def update(self, step: int, tokens: float, rate: float, stop: bool, loss: Tensor) -> StepResult:
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
        self.method.loss = float(loss)
        self.method.update(step, rate, tokens)
        self.refresh_parameters()
        return StepResult(mean, norm, rate, tokens, stop, met=False)

    @property
    def per_pass(self) -> int:
        """Number of samples in one forward pass, which a replica makes without the others."""
        return self.config.parallel.micro_batch

    def evaluate(self, samples: Dataset) -> float:
        """Return the validation loss, computed by the living replicas. See `Engine.evaluate`."""
        index, size = (0, 1) if self.living is None else (self.living.rank(), self.living.size())
        n = self.per_pass
        passes = range(index, self.validation_sequences // n, size)
        batches = [samples.batch(range(m * n, (m + 1) * n)).to(self.mesh.device) for m in passes]
        sums = torch.zeros(2, dtype=torch.float64)
        if batches:
            sums[0] = self.build_runtime(build_forwards(self.program, len(batches))).evaluate(batches)
            sums[1] = sum(batch.unmasked() for batch in batches)
        loss, tokens = to_host(all_reduce(sums, self.living))
        return loss / max(1.0, tokens)

    def restored(self, updates: int) -> None:
        self.method.restored()
        self.parameters.gather()


def engine_class(config: RunConfig) -> type[Engine]:
    """Return the engine class for a run's model and ``parallel.sync``."""
    sync = config.parallel.sync
    if sync == "all-reduce":
        return OwnEngine if config.model.module else Engine
    if sync in UNSYNCHRONISED:
        return AsyncEngine
    if config.model.module:
        return OwnLocalEngine if sync in LOCAL else OwnCompressedEngine
    return LocalEngine if sync in LOCAL else CompressedEngine


def survives_rank_loss(config: RunConfig) -> bool:
    """Return whether a run continues after the death of a rank other than rank 0, which keeps the log."""
    return config.parallel.sync in UNSYNCHRONISED and staleness_bound(config) != 0
