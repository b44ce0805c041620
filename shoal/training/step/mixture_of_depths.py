"""What the layers that only some tokens pass through did in a step, over all ranks: counted together, and told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce, in_host_memory
from shoal.engine.models.mixture_of_depths import COUNTS, begin, depths_of
from shoal.engine.parallel.apply import LocalStage
from shoal.planning.cost.optional_parts import depths_of as depths_part
from shoal.spec.catalog import ModelShape


@dataclass(frozen=True)
class Foreseen:
    """How well the predictors of a step foresaw which tokens would be chosen.

    Attributes:
        accuracy: part of the tokens, of all layers that choose, of which they were right.
        recall: part of the chosen tokens that they expected to be.
        expected: part of the tokens that they expected to be chosen.
        loss: their mean cross-entropy [nats].
    """

    accuracy: float
    recall: float
    expected: float
    loss: float

    def metrics(self) -> dict[str, Any]:
        """By the names of `StepMetrics`."""
        return {
            "depth_accuracy": self.accuracy, "depth_recall": self.recall, "depth_expected": self.expected,
            "depth_loss": self.loss,
        }


class DepthsRouting:
    """The layers of this rank's stages that only some tokens pass through.

    Args:
        mesh: over all of which they are counted.

    Attributes:
        totals: [such layers, `COUNTS` + 1] of the last step, over all ranks and micro-batches.
    """

    def __init__(self, stages: Sequence[LocalStage], mesh: Mesh, shape: ModelShape):
        self.mesh, self.shape = mesh, shape
        self.layers = depths_part(shape).layers(shape.layers)
        self.here = [depth for stage in stages for depth in depths_of(stage.module)]
        self.totals = torch.zeros(len(self.layers), COUNTS + 1, dtype=torch.float64)

    def begin(self) -> None:
        """A step begins."""
        for depth in self.here:
            begin(depth)

    def count(self) -> None:
        """All backwards of the step are done on all ranks: count."""
        totals = torch.zeros_like(self.totals, device=self.mesh.device)
        for depth in self.here:
            assert depth.tally is not None, "begin() comes first"
            totals[self.layers.index(depth.layer)] += depth.tally
        self.totals = in_host_memory(all_reduce(totals, self.mesh.group("world")))

    def foreseen(self, sequences: int, length: int) -> Foreseen:
        """Of the last step.

        Args:
            sequences, length: of the batch.
        """
        right, found, expected, loss = self.totals.mean(0).tolist()
        tokens = sequences * length
        chosen = sequences * depths_part(self.shape).taken(length)
        return Foreseen(right / tokens, found / chosen, expected / tokens, loss / sequences)
