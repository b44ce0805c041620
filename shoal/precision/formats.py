"""Which number format holds what: the facts, which need no torch. `shoal.precision.policy` has them as its dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Format(NamedTuple):
    """A number format.

    Attributes:
        name: torch's.
        itemsize: bytes.
    """

    name: str
    itemsize: int


@dataclass(frozen=True)
class Formats:
    """The number formats of one precision.

    Attributes:
        storage: the weights that the optimizer updates.
        compute: weights and activations in forward and backward.
        reduce: gradients, summed over micro-batches and ranks.
        state: the optimizer's moments.
    """

    storage: Format
    compute: Format
    reduce: Format
    state: Format


BF16, FP32, FP64 = Format("bfloat16", 2), Format("float32", 4), Format("float64", 8)

FORMATS = {
    "fp32": Formats(FP32, FP32, FP32, FP32),
    # Micikevicius et al. 2018, section 3.1, with bfloat16, which needs no loss scaling (Kalamkar et al. 2019)
    "bf16": Formats(FP32, BF16, FP32, FP32),
    "fp64": Formats(FP64, FP64, FP64, FP64),
}
