"""Peak speed and memory of accelerators, from their makers' data sheets.

The cores of a CPU have no entry: their peak is no fact of a data sheet, it is measured where they are.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, PositiveFloat

from shoal.base.errors import UsageError
from shoal.base.section import Section
from shoal.spec.catalog.tables import entries, find


class Accelerator(Section):
    """One device as torch sees it."""

    name: str
    """The name in the catalog."""

    peak_flops: dict[str, PositiveFloat]
    """Dense matrix products, FLOP/s, by number format: bf16, fp16, tf32, fp32, fp64, fp8, int8. A format it lacks is
    not there."""

    sparse_flops: dict[str, PositiveFloat] = Field(default={})
    """What data sheets print besides: the same with half of one matrix zero (2:4). Nothing here computes with it."""

    memory_bytes: PositiveFloat
    """Size of its memory, bytes."""

    memory_bandwidth: PositiveFloat
    """Of its memory, bytes/s."""

    devices: tuple[str, ...] = ()
    """The names that its driver reports."""

    matmul_efficiency: float = Field(default=0.8, gt=0, le=1)
    """Part of the dense peak that the best-shaped matrix product attains."""

    generation: str = "other"
    """What constants of the calibrated cost model it shares with others
    (`shoal.spec.catalog.calibration.GENERATIONS`)."""

    watts: PositiveFloat | None = None
    """The most that the board draws; None where its maker does not say."""

    dollars_per_hour: PositiveFloat | None = None
    """A list price on demand; None where it is not rented by the piece."""

    price_source: str = ""
    """Whose price."""

    source: str
    """Where the numbers are from."""

    def dense_flops(self, kind: str) -> float:
        """The dense peak for a number format, FLOP/s.

        Raises:
            UsageError: it has no such matrix products.
        """
        if kind not in self.peak_flops:
            raise UsageError(f"accelerator {self.name} has no {kind} peak; allowed: {', '.join(self.peak_flops)}")
        return self.peak_flops[kind]

    @property
    def half(self) -> str:
        """Its number format of 16 bits: bf16, or fp16 where that is not there; the first that it has, if neither is."""
        return next(kind for kind in ("bf16", "fp16", *self.peak_flops) if kind in self.peak_flops)

    @property
    def printed(self) -> tuple[str, float]:
        """What data sheets and courses print first, and how much of it, FLOP/s: products of sparse matrices, of 8-bit
        integers, or dense ones in 16 bits.
        """
        if self.half in self.sparse_flops:
            return "sparse", self.sparse_flops[self.half]
        kind = "int8" if "int8" in self.peak_flops else self.half
        return kind, self.dense_flops(kind)


def accelerators() -> Mapping[str, Accelerator]:
    """Every accelerator, by name."""
    return entries("accelerators", Accelerator)


def accelerator(name: str) -> Accelerator:
    """An accelerator by its name in the catalog.

    Raises:
        UsageError: the name is not in the catalog.
    """
    return find(name, accelerators(), "accelerator")


def match(device_name: str) -> Accelerator | None:
    """The accelerator that a driver's device name means, or None: a wrong peak is worse than no MFU.

    >>> match("NVIDIA H200").name
    'h200-sxm'
    >>> match("NVIDIA H100 80GB HBM3 MIG 3g.40gb") is None
    True
    """
    return next((a for a in accelerators().values() if device_name in a.devices), None)
