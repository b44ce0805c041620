"""Bytes of state per parameter: of every precision, and of the recipes that papers and courses count with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.spec.number_formats import FORMATS, Formats

MOMENTS = 2  # of Adam


@dataclass(frozen=True)
class PerParameter:
    """Bytes of each kind of state for one parameter, without sharding.

    Attributes:
        weights: computed with.
        gradients: as backward makes them.
        accumulated: their sums in a wider format, where these are kept besides.
        master: weights updated, where they are others.
        moments: of the optimizer.
    """

    weights: int
    gradients: int
    accumulated: int
    master: int
    moments: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.accumulated + self.master + self.moments


def per_parameter(
    formats: Formats, moments: int = MOMENTS, *, gradients: Literal["summed", "both", "none"] = "summed"
) -> PerParameter:
    """What is kept in a precision.

    Args:
        moments: numbers that the optimizer keeps for each parameter.
        gradients: which are counted: their sums, which they go straight into here; as others have it, these and beside
            them a micro-batch's own, in the compute format; or none.
    """
    both = gradients == "both"
    summed = formats.reduce.itemsize if gradients != "none" else 0
    return PerParameter(
        weights=formats.compute.itemsize,
        gradients=formats.compute.itemsize if both else summed,
        accumulated=summed if both else 0,
        master=formats.storage.itemsize if formats.master else 0,
        moments=moments * formats.state.itemsize,
    )


RECIPES = {
    # Rajbhandari et al. 2020, section 3.1
    "bf16, fp32 Adam": per_parameter(FORMATS["bf16-sums"]),
    # Hugging Face, The Ultra-Scale Playbook; no run of shoal's keeps both
    "bf16, fp32 Adam, gradients in bf16 and fp32": per_parameter(FORMATS["bf16"], gradients="both"),
    "all bf16": per_parameter(FORMATS["bf16-all"]),
    # jax-ml/scaling-book, training
    "bf16 weights, fp32 moments, no gradients": per_parameter(FORMATS["bf16-weights"], gradients="none"),
}
"""As papers and courses count, by name: 16, 20, 8 and 10 bytes."""
