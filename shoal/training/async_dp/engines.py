"""Engines of one data-parallel replica that is synchronised by a relaxed method."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from shoal.base.boxes import Piece
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce, to_host
from shoal.engine.data.batches import Dataset
from shoal.pipeline.program import Action
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig
from shoal.training.async_dp.methods.average import LocalSteps
from shoal.training.async_dp.methods.compress import Compressed
from shoal.training.async_dp.methods.flat import Flat
from shoal.training.async_dp.methods.method import ReplicaMethod, States
from shoal.training.async_dp.methods.powersgd import PowerSGD
from shoal.training.async_dp.methods.quantised import Int8, OneBit, Quantised
from shoal.training.async_dp.methods.topk import TopK
from shoal.training.step.engine import Engine, flat_names
from shoal.training.step.optimizer_step import NonFinite, StepResult, clip_factor, sum_totals


class Diverged(RuntimeError):
    """Error for a NaN or infinite loss or gradient norm of one replica, unknown to the other replicas."""


class ReplicaEngine(Engine):
    """Base class of engines that compute only their own replica's step, up to `update`.

    Attributes:
        replica, replicas: index of this replica, and number of replicas.
        stands_for: dead replicas whose states in a checkpoint are copies of this one's.
        flat: weights and gradients as flat tensors.
        method: method that synchronises the replicas.
    """

    method: ReplicaMethod

    def __init__(self, config: RunConfig, shape: ModelShape, mesh: Mesh, samples: Dataset):
        super().__init__(config, shape, mesh, samples)
        self.replica, self.replicas = mesh.index("dp"), mesh.size("dp")
        self.stands_for: list[int] = []
        self.flat = Flat(self.parameters)

    @abstractmethod
    def update(self, step: int, tokens: int, rate: float, stop: bool, action: Action, loss: Tensor) -> StepResult:
        """Update the weights by the method. See `Engine.update`."""

    def clip_and_step(self, norm: float, rate: float) -> None:
        """Clip by a gradient norm and step this replica's optimizer."""
        if (factor := clip_factor(self, norm)) != 1:
            self.parameters.scale(factor)
        self.optimizer.step(rate)

    @abstractmethod
    def common_state(self) -> dict[str, list[Piece]]:
        """Return states that are equal on all replicas, except the method's."""

    def own_states(self) -> States:
        """Return states that each replica keeps separately."""
        return self.method.own_states()

    def state(self) -> dict[str, list[Piece]]:
        """Return all tensors that a checkpoint stores.

        These are states equal on all replicas (saved by the first), states spread over the replicas, and states of each
        replica, named by its index.
        """
        common = self.common_state() | flat_names("relaxed", self.method.common_states())
        for pieces in common.values():
            for piece in pieces:
                piece.primary &= self.replica == 0
        own = self.own_states()
        replicas = (self.replica, *self.stands_for)
        state = common | flat_names("relaxed", self.method.spread_states())
        return state | {k: v for r in replicas for k, v in flat_names(f"replica.{r}", own).items()}

    def model_state(self) -> dict[str, list[Piece]]:
        """Return the weights by their names in a checkpoint."""
        return {f"model.{name}": pieces for name, pieces in self.parameters.weights().items()}


class CompressedEngine(ReplicaEngine):
    """Engine that sums the gradients of the replicas in compressed form; the replicas stay bitwise equal."""

    method: Compressed

    def __init__(self, config: RunConfig, shape: ModelShape, mesh: Mesh, samples: Dataset):
        super().__init__(config, shape, mesh, samples)
        relaxed, here = config.relaxed, (self.flat, mesh.group("dp"))
        match config.parallel.sync:
            case "powersgd":
                self.method = PowerSGD(*here, relaxed.rank, config.train.seed)
            case "topk":
                self.method = TopK(*here, relaxed.density)
            case sync:
                self.method = Quantised(*here, OneBit(relaxed.block) if sync == "onebit" else Int8(relaxed.block))

    def update(self, step: int, tokens: int, rate: float, stop: bool, action: Action, loss: Tensor) -> StepResult:
        """Update the weights with the compressed sum of the gradients. See `Engine.update`.

        Raises:
            NonFinite: on every rank, before any weight changes. The error-feedback buffers are then also unchanged,
                unless a sum of finite gradients overflowed.
        """
        self.complete_gradients()
        tokens = max(1, tokens)
        loss_sum, stopped, (square,) = sum_totals(self, loss, stop, self.parameters.square_norm())
        mean = loss_sum / tokens
        if not (math.isfinite(mean) and math.isfinite(square)):  # NaNs would persist in the error-feedback buffers
            raise NonFinite(f"step {step}: loss {mean:g}, sum of the replicas' squared gradient norms {square:g}")
        self.method.sum()
        *_, (square,) = sum_totals(self, loss, stop, self.parameters.square_norm())
        norm = math.sqrt(square / self.replicas) if square >= 0 else math.nan  # every replica has the unsharded sum
        if not math.isfinite(norm):
            raise NonFinite(f"step {step}: loss {mean:g}, gradient norm {norm:g}", untouched=False)
        self.clip_and_step(norm, rate)
        self.refresh_parameters()
        return StepResult(mean, norm, rate, tokens, stopped)

    def common_state(self) -> dict[str, list[Piece]]:
        """Return the weights and the optimizer states."""
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

    def update(self, step: int, tokens: int, rate: float, stop: bool, action: Action, loss: Tensor) -> StepResult:
        """Step the replica's own optimizer; average if due.

        Raises:
            Diverged: before any weight changes, on the ranks of one replica.
        """
        self.complete_gradients()
        tokens = max(1, tokens)
        mine = torch.stack((loss * (self.mesh.index("tp") == 0), self.parameters.square_norm()))
        total, square = to_host(all_reduce(mine, self.sync_mesh.group("world")))
        if not (math.isfinite(total) and math.isfinite(square)):
            raise Diverged(f"step {step}: replica {self.replica} has loss {total / tokens:g}, the others go on")
        norm = math.sqrt(square)
        self.clip_and_step(norm, rate)
        self._since += torch.tensor((total, tokens, norm, 1, stop), dtype=torch.float64, device=loss.device)
        result = StepResult(total / tokens, norm, rate, tokens, met=False)
        if self.method.due(step + 1, self.config.train.steps):
            self.method.average()
            loss_sum, count, norms, steps, stops = to_host(all_reduce(self._since, self.mesh.group("world")))
            self._since.zero_()
            result = StepResult(loss_sum / count, norms / steps, rate, round(count), stop=stops > 0)
        self.refresh_parameters()
        return result

    def common_state(self) -> dict[str, list[Piece]]:
        """Return the averaged weights; valid only after the replicas have met."""
        return self.model_state()

    def own_states(self) -> States:
        """Return the states of the optimizer and of the method."""
        return self.optimizer.states() | super().own_states()

    def restored(self, updates: int) -> None:
        super().restored(updates)
        self.method.restored()
