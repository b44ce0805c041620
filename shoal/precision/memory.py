"""Bytes of state per parameter: of every precision, and of the recipes that papers and courses count with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.precision.formats import FORMATS, Formats

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
        source: who counts so.
    """

    weights: int
    gradients: int
    accumulated: int
    master: int
    moments: int
    source: str = ""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.accumulated + self.master + self.moments


def per_parameter(formats: Formats, moments: int = MOMENTS) -> PerParameter:
    """What shoal keeps in a precision: gradients go straight into their sum.

    Args:
        moments: numbers that the optimizer keeps for each parameter.
    """
    return PerParameter(
        weights=formats.compute.itemsize,
        gradients=formats.reduce.itemsize,
        accumulated=0,
        master=formats.storage.itemsize if formats.master else 0,
        moments=moments * formats.state.itemsize,
        source=formats.what,
    )


_SUMS = per_parameter(FORMATS["bf16"])
RECIPES = {
    "bf16, fp32 Adam": replace(per_parameter(FORMATS["bf16-sums"]), source="Rajbhandari et al. 2020, section 3.1"),
    "bf16, fp32 Adam, gradients summed in fp32": replace(
        _SUMS, gradients=FORMATS["bf16"].compute.itemsize, accumulated=_SUMS.gradients,
        source="Hugging Face, The Ultra-Scale Playbook; both gradients are kept",
    ),
    "all bf16": replace(per_parameter(FORMATS["bf16-all"]), source="no format wider than bf16 anywhere"),
    "bf16 weights, fp32 moments": replace(
        per_parameter(FORMATS["bf16-weights"]), gradients=0,
        source="jax-ml/scaling-book, training; gradients are not counted",
    ),
}
"""By name: 16, 20, 8 and 10 bytes."""
