"""Statistics of expert and mixture-of-depths routers in a step, summed over all ranks; updates of router biases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.base.boxes import Piece
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce
from shoal.engine.models.experts.router import SUMS, Router, find_modules
from shoal.engine.models.mixture_of_depths import COUNTS, MixtureOfDepths
from shoal.engine.parallel.apply import LocalStage
from shoal.pipeline.program import Program
from shoal.spec.catalog import ModelShape


class LayerCounts:
    """Per-layer counts of one step.

    Attributes:
        modules: local routers or predictors, whose tallies are counted.
        totals: [layers, numbers] of the last step, over all ranks and micro-batches, on the device.
    """

    modules: Sequence[Any]

    def __init__(self, mesh: Mesh, layers: Sequence[int], numbers: int):
        self.mesh, self.layers = mesh, layers
        self.totals = torch.zeros(len(layers), numbers, dtype=torch.float64, device=mesh.device)

    def begin(self) -> None:
        for module in self.modules:
            module.reset_tally()

    def count(self) -> None:
        """Sum the counts of the step after all backwards; also needed for a step that will be skipped. Collective."""
        self.totals = self.sum((module.layer, module.tally) for module in self.modules)

    def sum(self, counted: Iterable[tuple[int, Tensor | None]]) -> Tensor:
        """Sum pairs of (layer, numbers) over all ranks; returns [layers, numbers]. Collective."""
        totals = torch.zeros_like(self.totals)
        for layer, numbers in counted:
            assert numbers is not None, "counting was begun"
            totals[self.layers.index(layer)] += numbers
        return all_reduce(totals, self.mesh.group("world"))


class ExpertRouting(LayerCounts):
    """Statistics and biases of the expert routers in this rank's stages."""

    def __init__(self, stages: Sequence[LocalStage], program: Program, mesh: Mesh, shape: ModelShape):
        experts = shape.moe
        super().__init__(mesh, experts.layers(shape.blocks), SUMS + experts.count)
        self.shape = shape
        routers = [(r, stage.index < program.depth) for stage in stages for r in find_modules(stage.module, Router)]
        self.modules: list[Router] = [router for router, _ in routers]
        self.originals = [original for _, original in routers]  # not the second copy of a bidirectional pipeline

    def rebalance(self, skip: Tensor | None = None) -> None:
        """Update the biases from the counts of a step, unless its update was skipped (``skip`` of `Rule.step`)."""
        for router in self.modules:
            router.rebalance(self.totals[self.layers.index(router.layer), SUMS:], skip)

    def begin_validation(self) -> None:
        """Start counting forward passes without backward."""
        for router in self.modules:
            router.begin_validation()

    def end_validation(self, sequences: int, length: int) -> dict[str, Any]:
        """Return the metrics of the validation passes. See `expert_metrics`."""
        totals = self.sum((router.layer, router.validated) for router in self.modules)
        for router in self.modules:
            router.validated = None
        return expert_metrics(totals.cpu(), self.shape, sequences, length)

    def metrics(self, sequences: int, length: int) -> dict[str, Any]:
        """Return the metrics of the last step. See `expert_metrics`."""
        return expert_metrics(self.totals.cpu(), self.shape, sequences, length)

    def state(self) -> dict[str, list[Piece]]:
        """Return the biases by their names in the full model."""
        first = self.mesh.index("stage") == 0
        found: dict[str, list[Piece]] = {}
        for router, original in zip(self.modules, self.originals, strict=True):
            if router.bias is not None:
                piece = Piece.full(router.bias, first and original)
                found.setdefault(f"layers.{router.layer}.mlp.router.bias", []).append(piece)
        return found


def expert_metrics(totals: Tensor, shape: ModelShape, sequences: int, length: int) -> dict[str, Any]:
    """Compute the fields of `StepMetrics` that describe expert routing.

    Args:
        totals: [layers, `SUMS` + E], sums of `Router.tally`.
        sequences, length: number and length of the sequences in the batch.
    """
    sums, loads = totals[:, :SUMS].sum(0), totals[:, SUMS:]
    shares = loads / loads.sum(1, keepdim=True).clamp(min=1)
    experts = shape.moe
    tokens = sequences * sum(shape.taken(layer, length) for layer in experts.layers(shape.blocks))
    wanted = tokens if experts.gate == "expert-choice" else float(loads.sum() + sums[0])
    dropped, balance_loss, z_loss = sums.tolist()
    per_layer = sequences * len(totals)
    return {
        "dropped": dropped / max(1, wanted),
        "idle_experts": float((loads == 0).double().mean()),
        "busiest_expert": float(shares.max() * experts.count),
        "balance_loss": balance_loss / per_layer,
        "z_loss": z_loss / per_layer,
        "expert_load": shares.tolist(),
    }


class DepthsRouting(LayerCounts):
    """Statistics of the mixture-of-depths layers in this rank's stages."""

    def __init__(self, stages: Sequence[LocalStage], mesh: Mesh, shape: ModelShape):
        self.depths = shape.mod
        super().__init__(mesh, self.depths.layers(shape.layers), COUNTS + 1)
        self.modules = [depth for stage in stages for depth in find_modules(stage.module, MixtureOfDepths)]

    def metrics(self, sequences: int, length: int) -> dict[str, float]:
        """Return how well the last step's token selection was predicted, as fields of `StepMetrics`."""
        right, found, expected, loss = self.totals.cpu().mean(0).tolist()
        tokens, chosen = sequences * length, sequences * self.depths.taken(length)
        return {
            "depth_accuracy": right / tokens, "depth_recall": found / chosen, "depth_expected": expected / tokens,
            "depth_loss": loss / sequences,
        }
