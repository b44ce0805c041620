"""State bytes per parameter, for every precision and for the recipes of papers and courses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.spec.number_formats import FORMATS, Formats

MOMENTS = 2  # Adam


@dataclass(frozen=True)
class PerParameter:
    """Bytes of each kind of state per parameter, without sharding.

    Attributes:
        weights: weights in the compute format.
        gradients: gradients from the backward.
        accumulated: sums of gradients in a wider format, if separate.
        master: master weights, if separate.
        moments: optimizer moments.
    """

    weights: int
    gradients: int
    accumulated: int
    master: int
    moments: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.accumulated + self.master + self.moments


def per_parameter(
    formats: Formats, moments: int = MOMENTS, *, gradients: Literal["summed", "both", "none"] = "summed"
) -> PerParameter:
    """Return the state bytes per parameter in a precision.

    Args:
        moments: values that the optimizer keeps for each parameter.
        gradients: which gradients count: "summed" (shoal accumulates directly into the sums), "both" (also a
            micro-batch's own in the compute format, as in other software), or "none".
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
    # Hugging Face, The Ultra-Scale Playbook; shoal never keeps both
    "bf16, fp32 Adam, gradients in bf16 and fp32": per_parameter(FORMATS["bf16"], gradients="both"),
    "all bf16": per_parameter(FORMATS["bf16-all"]),
    # jax-ml/scaling-book, training
    "bf16 weights, fp32 moments, no gradients": per_parameter(FORMATS["bf16-weights"], gradients="none"),
}
"""Accounting of papers and courses, by name: 16, 20, 8 and 10 bytes."""
