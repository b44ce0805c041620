"""The updates of one step: one for the whole step, or in an asynchronous pipeline several of each stage."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.engine.collectives.json_collectives import all_gather, world
from shoal.engine.collectives.ops import all_reduce, read

if TYPE_CHECKING:
    from shoal.pipeline.program import Action
    from shoal.training.step.engine_state import EngineState


class NonFinite(RuntimeError):
    """The loss or the gradient norm of a step is not a number.

    Attributes:
        untouched: whether the weights are those before the step.
    """

    def __init__(self, message: str, *, untouched: bool = True):
        super().__init__(message)
        self.untouched = untouched


class OneUpdate:
    """The whole model's, by gradients clipped by their norm over all stages.

    Args:
        tokens: unmasked targets in the global batch.
        stop: whether this rank was asked to stop.
        rate: the learning rate; None computes everything but leaves the weights alone.
    """

    def __init__(self, engine: EngineState, step: int, tokens: int, *, stop: bool, rate: float | None):
        self.engine, self.number, self.stop, self.rate = engine, step, stop, rate
        self.tokens = max(1, tokens)  # so that a batch without targets is a step without gradient
        self.loss = self.norm = math.nan
        self.stopped = self.skipped = False

    def __call__(self, action: Action, loss: Tensor) -> None:
        """Update the weights; or, where a scaled gradient has overflowed, back off. Every rank does the same, since all
        have the norm of the whole model's gradient, which is not finite where any element of it is not.

        Raises:
            NonFinite: before any weight is changed, on every rank alike.
        """
        engine = self.engine
        engine.parameters.sum_ends()
        if engine.observe:
            engine.observe()
        if self.rate is None:
            return
        loss = loss * (engine.mesh.index("tp") == 0)  # tensor-parallel ranks all have the same
        mine = torch.stack((loss, engine.parameters.square_norm(), torch.full_like(loss, self.stop)))
        totals = read(all_reduce(mine, engine.mesh.group("world")))
        self.loss, self.norm = totals[0] / self.tokens, math.sqrt(totals[1]) if totals[1] >= 0 else math.nan
        self.stopped = totals[2] > 0
        scale = engine.loss_scale
        if not math.isfinite(self.loss) or not (math.isfinite(self.norm) or (scale and not scale.exhausted)):
            smallest = f" with the smallest loss scale, {scale.value:g}" if scale else ""
            raise NonFinite(f"step {self.number}: loss {self.loss:g}, gradient norm {self.norm:g}{smallest}")
        if engine.routing:
            engine.routing.count()
        if engine.depths:
            engine.depths.count()
        if not math.isfinite(self.norm):
            assert scale is not None, "without a scale a norm that is not finite was raised above"
            self.skipped = True
            scale.overflowed()
            return
        factor = 1 / scale.value if scale else 1.0
        self.norm *= factor
        clip = engine.config.optimizer.clip_norm
        if clip and self.norm > clip:
            factor *= clip / self.norm
        if factor != 1:
            engine.parameters.scale(factor)
        self.update()
        if engine.routing:
            engine.routing.rebalance()
        if scale:
            scale.made()

    def update(self) -> None:
        """Step the optimizer."""
        assert self.rate is not None, "a dry step updates nothing"
        self.engine.optimizer.step(self.rate)
        if self.engine.mesh.layout.zero in (0, 3):
            # There is no GATHER, but what is computed with may be a copy, in another number format or on the device.
            self.engine.parameters.gather()

    def finish(self, loss: Tensor) -> None:
        """The step is over on this rank."""


class ManyUpdates(OneUpdate):
    """Each stage's own, as soon as its gradients are there.

    No stage waits to learn whether another's gradients are finite: one whose own are not makes no further update, and
    all learn of it at the end of the step. The gradient norm of the step is the mean of its updates'.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        # Of this rank, for each update: its share of the squared gradient norm.
        updates = self.engine.program.updates
        self.square_norms = torch.zeros(updates, dtype=torch.float64, device=self.engine.mesh.device)
        self.spoilt = 0

    def __call__(self, action: Action, loss: Tensor) -> None:
        """Make one update of this rank's stage, unless a gradient of it or an earlier one was not finite."""
        engine = self.engine
        engine.parameters.sum_ends()
        if self.rate is None:
            return
        share = engine.parameters.square_norm()
        self.square_norms[action.version - 1] = share
        stage = share.clone()
        for axis in ("tp", "replicas"):  # so that all ranks of the stage do the same
            all_reduce(stage, engine.mesh.group(axis))
        if not self.spoilt and math.isfinite(read(stage)):
            self.update()
        elif not self.spoilt:
            self.spoilt = action.version

    def finish(self, loss: Tensor) -> None:
        """Learn the loss and the norms.

        Raises:
            NonFinite: on every rank alike, naming the first update that was not made, and where.
        """
        if self.rate is None:
            return
        engine, mesh = self.engine, self.engine.mesh
        mine = torch.cat((torch.stack((loss * (mesh.index("tp") == 0), torch.full_like(loss, self.stop))),
                          self.square_norms))
        loss_sum, stop, *norms = read(all_reduce(mine, mesh.group("world")))
        self.loss, self.stopped = loss_sum / self.tokens, stop > 0
        if not all(map(math.isfinite, (loss_sum, *norms))):
            first_spoilt = (self.spoilt, -mesh.index("pp"), mesh.describe())
            found = all_gather(first_spoilt, world() if mesh.layout.world_size > 1 else None)
            first = min(((v, s, where) for v, s, where in found if v), default=(0, 0, "no rank"))
            raise NonFinite(
                f"step {self.number}: loss {self.loss:g}; the gradient of update {first[0]} of "
                f"{engine.program.updates} is not finite on {first[2]}, which made neither it nor the later ones",
                untouched=False,
            )
        self.norm = sum(map(math.sqrt, norms)) / len(norms)
