"""Bytes of state per parameter: of shoal's own policies, and of the recipes that papers and courses count with."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.precision.formats import FORMATS, Formats

MOMENTS = 2  # of Adam


@dataclass(frozen=True)
class PerParameter:
    """Bytes of each kind of state for one parameter, with Adam.

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


def per_parameter(policy: Formats) -> PerParameter:
    """What shoal keeps with a policy, without sharding: gradients straight in their sum's format."""
    return PerParameter(
        weights=policy.compute.itemsize,
        gradients=policy.reduce.itemsize,
        accumulated=0,
        master=0 if policy.storage == policy.compute else policy.storage.itemsize,
        moments=MOMENTS * policy.state.itemsize,
        source="shoal",
    )


RECIPES = {
    "bf16, fp32 Adam": PerParameter(2, 2, 0, 4, 8, "Rajbhandari et al. 2020, section 3.1"),
    "bf16, fp32 Adam, gradients summed in fp32": PerParameter(2, 2, 4, 4, 8, "Hugging Face, The Ultra-Scale Playbook"),
    "all bf16": PerParameter(2, 2, 0, 0, 4, "no format wider than bf16 anywhere"),
    "bf16 weights, fp32 moments": PerParameter(2, 0, 0, 0, 8, "jax-ml/scaling-book, training; gradients not counted"),
    **{f"shoal {name}": per_parameter(formats) for name, formats in FORMATS.items()},
}
"""By name: 16, 20, 8 and 10 bytes, and shoal's own."""
