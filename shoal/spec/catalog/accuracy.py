"""How far estimates were off on published measurements that a fit had not seen, from `accuracy.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveInt

from shoal.base.section import Section, validate
from shoal.spec.catalog.tables import shipped

Kind = Literal["time", "memory"]
SIZES = ("node", "small", "large")
"""One node, up to 128 accelerators, and more."""
SMALL = 128


class Accuracy(Section):
    """Errors of estimates of one kind of run, relative to the measurement."""

    software: str = ""
    """Software, or empty for software whose measurements the fit had not seen."""

    size: Literal["", "node", "small", "large"] = ""
    """One of `SIZES`; empty for all."""

    special: bool | None = None
    """Whether the runs have experts, context parallelism or 8-bit products; None for all."""

    rows: PositiveInt
    """Number of measurements."""

    median: NonNegativeFloat
    """Median of the absolute error."""

    ninetieth: NonNegativeFloat
    """Error within which 90 % are."""

    bias: float
    """Median of the error."""

    width: NonNegativeFloat
    """Half of the 80 % interval of the logarithm."""

    def describe(self) -> str:
        """Return the errors in words."""
        sizes = {"node": " on one node", "small": f" on up to {SMALL} devices", "large": f" on more than {SMALL}"}
        kind = {None: "", True: " with experts, context parallelism or 8 bits", False: ""}[self.special]
        of = self.software or "other software that the fit had not seen"
        errors = f"median {100 * self.median:.0f} %, 90 % within {100 * self.ninetieth:.0f} %"
        size = sizes.get(self.size, "")
        return f"{errors}: {self.rows:,} held-out measurements of {of}{size}{kind}"


@cache
def _entries() -> Mapping[tuple[str, str, str, bool | None], Accuracy]:
    found: dict[tuple[str, str, str, bool | None], Accuracy] = {}
    tables: Mapping[str, Any] = shipped("accuracy")
    for kind, rows in tables.items():
        for values in rows:
            entry = validate(Accuracy, values, source="accuracy.toml", prefix=kind)
            found[kind, entry.software, entry.size, entry.special] = entry
    return found


def size_name(nodes: int, accelerators: int) -> str:
    """Return one of `SIZES`."""
    return "node" if nodes == 1 else "small" if accelerators <= SMALL else "large"


def find_accuracy(kind: Kind, software: str, size: str, *, special: bool) -> Accuracy:
    """Return the errors of the nearest kind of run that was measured.

    >>> find_accuracy("time", "shoal", "node", special=False).software
    ''
    """
    known = _entries()
    keys = ((software, size, special), (software, "", special), (software, "", None))
    return next((known[kind, *key] for key in keys if (kind, *key) in known), known[kind, "", "", None])
