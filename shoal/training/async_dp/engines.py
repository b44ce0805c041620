"""The engine of one replica among others: what it does alone, and where a method of the relaxed family comes in."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, overload

import numpy as np
import torch
from torch import Tensor

from shoal.base.boxes import Piece
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce, read
from shoal.engine.data.batches import Batch, Dataset
from shoal.engine.data.order import EvenSplit, OverlappingShards, Sampler
from shoal.engine.optim.schedule import learning_rate
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RelaxedConfig, RunConfig
from shoal.training.async_dp.methods.average import LocalSteps
from shoal.training.async_dp.methods.compress import Compressed
from shoal.training.async_dp.methods.flat import Flat
from shoal.training.async_dp.methods.powersgd import PowerSGD
from shoal.training.async_dp.methods.quantised import Int8, OneBit, Quantised
from shoal.training.async_dp.methods.topk import TopK
from shoal.training.step.engine import Engine, StepResult
from shoal.training.step.optimizer_step import NonFinite


class Diverged(RuntimeError):
    """Loss or gradient norm of one replica is not a number, which the others do not know yet."""


@dataclass(frozen=True)
class ReplicaResult(StepResult):
    """What one step computed. Where the replicas did not meet, it is this replica's own.

    Attributes:
        met: whether the replicas are equal now, and the numbers means over all of them since they last met.
    """

    met: bool = True


class ReplicaEngine(Engine):
    """An engine whose replica is alone, up to what subclasses do in `count` and `update`.

    Attributes:
        replica, replicas: which this is, and how many there are.
        stands_for: replicas that have died, whose states in a checkpoint are copies of this one's.
        flat: its weights and gradients.
        sampler: which samples it takes.
    """

    def __init__(self, config: RunConfig, shape: ModelShape, mesh: Mesh, samples: Dataset):
        super().__init__(config, shape, mesh, samples)
        self.replica, self.replicas = mesh.index("dp"), mesh.size("dp")
        self.stands_for: list[int] = []
        self.flat = Flat(self.parameters)
        self.sampler = self.sampler_of(self.replica)

    def sampler_of(self, index: int) -> Sampler:
        """The samples of one replica."""
        if self.config.data.sampler == "overlap":
            return OverlappingShards(self.replicas, index, self.samples.samples, self.config.data.overlap)
        n = self.config.parallel.micro_batch
        return EvenSplit(self.replicas, index, n, self.microbatches * n)

    @overload
    def step(self, step: int, *, stop: bool = False, dry: Literal[False] = False) -> StepResult: ...

    @overload
    def step(self, step: int, *, stop: bool = False, dry: bool) -> StepResult | None: ...

    def step(self, step: int, *, stop: bool = False, dry: bool = False) -> StepResult | None:
        """As `Engine`."""
        n = self.config.parallel.micro_batch
        batches = []
        for m in range(self.microbatches):
            start = (step * self.microbatches + m) * n
            batches.append(self.samples.batch(self.sampler(np.arange(start, start + n)).tolist()).to(self.mesh.device))
        tokens = self.count(batches)
        result = None

        def update(_: object, loss: Tensor) -> None:
            nonlocal result
            self.parameters.sum_ends()
            if not dry:
                result = self.update(step, loss, tokens, stop)
                self.parameters.gather()  # what is computed with may be a copy, in another number format

        self.runtime.step(batches, np.full(len(batches), 1 / max(1, tokens)), update)
        return result

    @abstractmethod
    def count(self, batches: Sequence[Batch]) -> int:
        """Unmasked targets that the loss is divided by; where there are none, by 1."""

    @abstractmethod
    def update(self, step: int, loss: Tensor, tokens: int, stop: bool) -> StepResult:
        """Change the weights; the gradients of this replica are complete."""

    def apply(self, step: int, norm: float) -> float:
        """Clip by a norm and step the optimizer; returns the learning rate."""
        clip = self.config.optimizer.clip_norm
        if clip and norm > clip:
            self.parameters.scale(clip / norm)
        rate = learning_rate(step, self.config.train.steps, self.config.optimizer)
        self.optimizer.step(rate)
        return rate

    # ---- state -------------------------------------------------------------------------------------------------

    def common(self, state: dict[str, list[Piece]]) -> dict[str, list[Piece]]:
        """What all replicas have alike: the first one saves it."""
        for pieces in state.values():
            for piece in pieces:
                piece.primary &= self.replica == 0
        return state

    def relaxed(self, method: Compressed | LocalSteps) -> dict[str, list[Piece]]:
        """What a method keeps."""
        common, spread = (
            {f"relaxed.{kind}.{name}": pieces for kind, named in kinds.items() for name, pieces in named.items()}
            for kinds in (method.common_states(), method.spread_states())
        )
        return self.common(common) | spread | self.own(method.own_states())

    def own(self, kinds: dict[str, dict[str, list[Piece]]]) -> dict[str, list[Piece]]:
        """What each replica has for itself, under names of its own."""
        return {
            f"replica.{replica}.{kind}.{name}": pieces
            for replica in (self.replica, *self.stands_for)
            for kind, parameters in kinds.items()
            for name, pieces in parameters.items()
        }


class CompressedEngine(ReplicaEngine):
    """Sums the gradients of the replicas in compressed form; all replicas stay equal, bit for bit."""

    def __init__(self, config: RunConfig, shape: ModelShape, mesh: Mesh, samples: Dataset):
        super().__init__(config, shape, mesh, samples)
        self.exchange = self._exchange(config.relaxed)

    def _exchange(self, relaxed: RelaxedConfig) -> Compressed:
        group = self.mesh.group("dp")
        match self.config.parallel.sync:
            case "powersgd":
                return PowerSGD(self.flat, group, relaxed.rank, self.config.train.seed)
            case "topk":
                return TopK(self.flat, group, relaxed.density)
            case "onebit":
                return Quantised(self.flat, group, OneBit(relaxed.block))
            case "int8":
                return Quantised(self.flat, group, Int8(relaxed.block))
        raise ValueError(self.config.parallel.sync)

    def count(self, batches: Sequence[Batch]) -> int:
        """Of all replicas."""
        count = torch.tensor(sum(batch.unmasked() for batch in batches), device=self.mesh.device)
        return max(1, read(all_reduce(count, self.mesh.group("dp"))))

    def update(self, step: int, loss: Tensor, tokens: int, stop: bool) -> StepResult:
        """As `Engine`'s, with the compressed sum.

        Raises:
            NonFinite: on every rank alike, before any weight is changed; and before any error is, unless a sum of
                finite gradients is not finite.
        """
        loss = loss * (self.mesh.index("tp") == 0)
        mean, square, stops = self._totals(loss, torch.full_like(loss, stop))
        mean /= tokens
        if not (math.isfinite(mean) and math.isfinite(square)):  # what is kept for the next step would never be again
            raise NonFinite(f"step {step}: loss {mean:g}, sum of the replicas' squared gradient norms {square:g}")
        self.exchange.sum()
        _, square, _ = self._totals(loss, loss)
        norm = math.sqrt(square / self.replicas) if square >= 0 else math.nan  # every replica has the whole sum
        if not math.isfinite(norm):
            raise NonFinite(f"step {step}: loss {mean:g}, gradient norm {norm:g}", untouched=False)
        rate = self.apply(step, norm)
        return StepResult(mean, norm, rate, tokens, stop=stops > 0)

    def _totals(self, loss: Tensor, stop: Tensor) -> list[float]:
        """Summed over all ranks: the loss, the squared gradient norm, and how many were asked to stop."""
        mine = torch.stack((loss, self.parameters.square_norm(), stop))
        return read(all_reduce(mine, self.mesh.group("world")))

    def state(self) -> dict[str, list[Piece]]:
        """As `Engine`, and the errors of every replica."""
        return self.common(super().state()) | self.relaxed(self.exchange)


class LocalEngine(ReplicaEngine):
    """Trains alone, and averages the weights with the other replicas every few steps."""

    def __init__(self, config: RunConfig, shape: ModelShape, mesh: Mesh, samples: Dataset):
        super().__init__(config, shape, mesh, samples)
        relaxed, diloco = config.relaxed, config.parallel.sync == "diloco"
        self.averages = LocalSteps(
            self.flat, mesh.group("dp"),
            every=relaxed.local_steps,
            rate=relaxed.outer_learning_rate if diloco else 1.0,
            momentum=relaxed.outer_momentum if diloco else 0.0,
            int8=Int8(relaxed.block) if relaxed.outer_int8 else None,
        )
        self._since = torch.zeros(5, dtype=torch.float64, device=mesh.device)

    def count(self, batches: Sequence[Batch]) -> int:
        """Of this replica."""
        return max(1, sum(batch.unmasked() for batch in batches))

    def update(self, step: int, loss: Tensor, tokens: int, stop: bool) -> StepResult:
        """Step the replica's own optimizer; average where that is due.

        Raises:
            Diverged: before any weight is changed, on the ranks of one replica.
        """
        first = self.mesh.index("tp") == 0
        mine = torch.stack((loss * first, self.parameters.square_norm()))
        total, square = read(all_reduce(mine, self.here.group("world")))
        if not (math.isfinite(total) and math.isfinite(square)):
            raise Diverged(f"step {step}: replica {self.replica} has loss {total / tokens:g}, the others go on")
        norm = math.sqrt(square)
        rate = self.apply(step, norm)
        self._since += torch.tensor((total, tokens, norm, 1, stop), dtype=torch.float64, device=loss.device)
        if not self.averages.due(step + 1, self.config.train.steps):
            return ReplicaResult(total / tokens, norm, rate, tokens, False, met=False)
        self.averages.average()
        loss_sum, count, norms, steps, stops = read(all_reduce(self._since, self.mesh.group("world")))
        self._since.zero_()
        return ReplicaResult(loss_sum / count, norms / steps, rate, round(count), stop=stops > 0)

    def state(self) -> dict[str, list[Piece]]:
        """The average, and what each replica's optimizer has for itself; only where the replicas have met."""
        state = self.common({f"model.{name}": pieces for name, pieces in self.parameters.weights().items()})
        return state | self.own(self.optimizer.states()) | self.relaxed(self.averages)

    def restored(self, step: int) -> None:
        """As `Engine`."""
        super().restored(step)
        self.averages.restored()
