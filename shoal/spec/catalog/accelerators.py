"""Peak speed and memory of accelerators, from the manufacturers' data sheets.

CPU cores have no entry: data sheets do not give their peak, so it is measured on the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from shoal.base.errors import UsageError
from shoal.base.section import Section
from shoal.spec.catalog.tables import entries, find

Generation = Literal["volta", "ampere", "hopper", "blackwell", "blackwell-ultra", "cdna", "tpu", "other"]


class MatrixUnits(Section):
    """The units that multiply matrices: tensor cores, or the systolic arrays of a TPU.

    A TPU's array of 128 x 128 multiplies bf16[8, 128] by bf16[128, 128] in 8 cycles: 16,384 multiply-adds in each.
    """

    count: PositiveInt  # Units of the device
    multiply_adds: PositiveInt  # Multiply-adds of one unit in one cycle, of 16-bit numbers
    clock: PositiveFloat  # Cycles per second of the peak that the data sheet prints

    @property
    def flops(self) -> float:
        """Peak in FLOP/s: a multiply-add is two."""
        return 2 * self.count * self.multiply_adds * self.clock


class Accelerator(Section):
    """One accelerator, as torch sees it."""

    name: str  # Name in the catalog
    # Dense peak in FLOP/s of the supported number formats: bf16, fp16, tf32, fp32, fp64, fp8, int8
    peak_flops: dict[str, PositiveFloat]
    # Peaks with 2:4 sparsity (half of one matrix is zero), from data sheets. shoal computes nothing with them.
    sparse_flops: dict[str, PositiveFloat] = Field(default={})
    # Peaks without the matrix units where data sheets print both. shoal computes nothing with them.
    vector_flops: dict[str, PositiveFloat] = Field(default={})
    # The units that the 16-bit peak counts, where their number and clock are published
    matrix_units: MatrixUnits | None = None
    memory_bytes: PositiveFloat  # Memory size in bytes
    memory_bandwidth: PositiveFloat  # Memory bandwidth in bytes/s
    devices: tuple[str, ...] = ()  # Device names that the driver reports
    # Fraction of the dense peak that the best-shaped matrix product attains
    matmul_efficiency: float = Field(default=0.8, gt=0, le=1)
    generation: Generation = "other"  # Key of the generation-specific constants of the calibrated cost model
    watts: PositiveFloat | None = None  # Maximum power of the board in W; None if the manufacturer does not publish it
    dollars_per_hour: PositiveFloat | None = None  # On-demand list price; None if single devices are not for rent
    price_source: str = ""  # Source of the price
    source: str  # Source of the numbers

    def dense_flops(self, kind: str) -> float:
        """Return the dense peak for a number format, in FLOP/s.

        Raises:
            UsageError: the accelerator has no peak for this format.
        """
        if kind not in self.peak_flops:
            raise UsageError(f"accelerator {self.name} has no {kind} peak; allowed: {', '.join(self.peak_flops)}")
        return self.peak_flops[kind]

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU: sold as 80 GB, it has 80 GiB, of which libraries take a part."""
        return bool(self.devices) or self.generation not in ("tpu", "other")

    @property
    def half(self) -> str:
        """Its 16-bit number format: bf16, else fp16, else its first format."""
        return next(kind for kind in ("bf16", "fp16", *self.peak_flops) if kind in self.peak_flops)

    @property
    def printed(self) -> tuple[str, float]:
        """The peak that data sheets print first, as (kind, FLOP/s): sparse, 8-bit integer, or dense 16-bit products."""
        if self.half in self.sparse_flops:
            return "sparse", self.sparse_flops[self.half]
        kind = "int8" if "int8" in self.peak_flops else self.half
        return kind, self.dense_flops(kind)


def accelerators() -> Mapping[str, Accelerator]:
    """Return all accelerators by name."""
    return entries("accelerators", Accelerator)


def accelerator(name: str) -> Accelerator:
    """Return an accelerator by its name in the catalog.

    Raises:
        UsageError: the name is not in the catalog.
    """
    return find(name, accelerators(), "accelerator")


def match(device_name: str) -> Accelerator | None:
    """Return the accelerator with a driver's device name, or None: a wrong peak is worse than no MFU.

    >>> match("NVIDIA H200").name
    'h200-sxm'
    >>> match("NVIDIA H100 80GB HBM3 MIG 3g.40gb") is None
    True
    """
    return next((a for a in accelerators().values() if device_name in a.devices), None)
