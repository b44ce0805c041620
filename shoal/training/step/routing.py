"""What the routers of all ranks did in a step: counted together, told, and their biases moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.base.boxes import Box, Piece
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce, in_host_memory
from shoal.engine.models.experts.balance import begin, begin_validation, rebalance, routers_of
from shoal.engine.models.experts.router import SUMS, Router
from shoal.engine.parallel.apply import LocalStage
from shoal.pipeline.program import Program
from shoal.planning.cost.optional_parts import experts_of
from shoal.spec.catalog import ModelShape


@dataclass(frozen=True)
class Routed:
    """One step of every layer with experts, over all ranks.

    Attributes:
        dropped: part of the choices that found no room (expert-choice: of the tokens, chosen by no expert).
        idle: part of the experts that got no token.
        busiest: tokens of the expert with most over the mean of its layer, the largest of all layers.
        balance_loss, z_loss: mean over sequences and layers, without their weights.
        loads: for each layer with experts, the part of its tokens that each expert got.
    """

    dropped: float
    idle: float
    busiest: float
    balance_loss: float
    z_loss: float
    loads: list[list[float]]

    def metrics(self) -> dict[str, Any]:
        """By the names of `StepMetrics`."""
        return {
            "dropped": self.dropped, "idle_experts": self.idle, "busiest_expert": self.busiest,
            "balance_loss": self.balance_loss, "z_loss": self.z_loss, "expert_load": self.loads,
        }

    @staticmethod
    def of(totals: Tensor, shape: ModelShape, sequences: int, length: int) -> Routed:
        """From the sums of all routers.

        Args:
            totals: [layers, `SUMS` + E] as of `Router.tally`.
            sequences, length: of the batch.
        """
        sums, loads = totals[:, :SUMS].sum(0), totals[:, SUMS:]
        given = loads.sum(1, keepdim=True).clamp(min=1)
        experts = experts_of(shape)
        tokens = sequences * sum(shape.taken(layer, length) for layer in experts.layers(shape.layers))
        wanted = tokens if experts.gate == "expert-choice" else float(loads.sum() + sums[0])
        busiest = (loads / given).max() * experts.count
        mean = sums[1:] / (sequences * len(totals))
        return Routed(
            float(sums[0]) / max(1, wanted), float((loads == 0).double().mean()), float(busiest),
            float(mean[0]), float(mean[1]), (loads / given).tolist(),
        )


class Routing:
    """The routers of this rank's stages.

    Args:
        program: whose stages these are.
        mesh: over all of which they are counted.

    Attributes:
        totals: [layers with experts, `SUMS` + E] of the last step, over all ranks and micro-batches.
    """

    def __init__(self, stages: Sequence[LocalStage], program: Program, mesh: Mesh, shape: ModelShape):
        self.mesh, self.shape = mesh, shape
        experts = experts_of(shape)
        self.layers = experts.layers(shape.layers)
        self.routers: list[tuple[Router, bool]] = [
            (router, stage.index < program.depth) for stage in stages for router in routers_of(stage.module)
        ]
        self.totals = torch.zeros(len(self.layers), SUMS + experts.count, dtype=torch.float64)

    def begin(self) -> None:
        """A step begins."""
        for router, _ in self.routers:
            begin(router)

    def count(self) -> None:
        """All backwards of the step are done on all ranks: count, of a step that will be skipped too."""
        self.totals = self._summed("tally")

    def rebalance(self) -> None:
        """The step was made: move the biases by what it counted."""
        for router, _ in self.routers:
            rebalance(router, self.totals[self.layers.index(router.layer), SUMS:])

    def begin_validation(self) -> None:
        """Forward passes without a backward begin: count these."""
        for router, _ in self.routers:
            begin_validation(router)

    def end_validation(self, sequences: int, length: int) -> Routed:
        """They are done on all ranks.

        Args:
            sequences, length: of what was passed, by all ranks together.
        """
        totals = self._summed("validated")
        for router, _ in self.routers:
            router.validated = None
        return Routed.of(totals, self.shape, sequences, length)

    def _summed(self, counter: str) -> Tensor:
        """Over all ranks: [layers with experts, `SUMS` + E]."""
        totals = torch.zeros_like(self.totals, device=self.mesh.device)
        for router, _ in self.routers:
            totals[self.layers.index(router.layer)] += getattr(router, counter)
        return in_host_memory(all_reduce(totals, self.mesh.group("world")))

    def state(self) -> dict[str, list[Piece]]:
        """The biases, by the names that they have in the whole model."""
        first = self.mesh.index("stage") == 0
        found: dict[str, list[Piece]] = {}
        for router, original in self.routers:
            if router.bias is not None:
                whole = tuple(router.bias.shape)
                piece = Piece(whole, Box.whole(whole), router.bias, first and original)
                found.setdefault(f"layers.{router.layer}.mlp.router.bias", []).append(piece)
        return found
