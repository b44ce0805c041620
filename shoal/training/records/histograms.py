"""Histograms of weights, gradients and activations in a step, per tensor over all ranks; one small file per step.

    weights            each parameter, before the update
    gradients          of each parameter, before clipping and without the loss scale
    activations        input of each linear layer
    output gradients   of each linear layer, without the loss scale

Experts and routers are not linear layers: they have only weights and gradients. A step that ends the run with a NaN is
recorded too.

Values that tensor-parallel ranks share are counted on one of them, and partial sums are summed first, so the counts
equal a single device's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.base.errors import UsageError
from shoal.base.files import read_json
from shoal.engine.precision.histogram import BINS

FOLDER = "histograms"
KINDS = ("weights", "gradients", "activations", "output gradients")


@dataclass(frozen=True)
class Histogram:
    """Histogram of one tensor in one step."""

    kind: str  # one of `KINDS`
    name: str  # of the parameter or linear layer
    counts: tuple[int, ...]  # by bin, [BINS]


def read_histograms(folder: Path) -> tuple[int, list[Histogram]] | None:
    """Read the newest recorded step of a run and its histograms; None if none was recorded.

    Raises:
        UsageError: the file is damaged.
    """
    files = sorted((folder / FOLDER).glob("step-*.json"))
    if not files:
        return None
    found = read_json(files[-1])
    try:
        tensors = []
        for tensor in found["tensors"]:
            before, counts = [0] * tensor["first"], [int(count) for count in tensor["counts"]]
            after = [0] * (BINS - len(before) - len(counts))
            tensors.append(Histogram(str(tensor["kind"]), str(tensor["name"]), (*before, *counts, *after)))
        return int(found["step"]), tensors
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise UsageError(
            f"{files[-1]} is not a record of histograms: {type(error).__name__}: {error}"
            "\n  Remove it: the report does not need it."
        ) from None
