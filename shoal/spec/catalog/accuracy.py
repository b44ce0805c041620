"""How far estimates were off on published measurements that a fit had not seen, from `accuracy.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveInt

from shoal.base.section import Section, validate
from shoal.spec.catalog.tables import shipped

Kind = Literal["time", "memory"]
LeftOut = Literal["model", "cluster", "software"]
Class = tuple[str, str, bool | None]
"""Class of runs: software, size and whether they are special; empty and None for all."""
SIZES = ("node", "small", "large")
"""One node, up to 128 accelerators, and more."""
SMALL = 128


class Accuracy(Section):
    """Errors of estimates of one class of runs, relative to the measurement."""

    left_out: LeftOut  # What the fit had not seen of each run: its model, its cluster too, or its software too
    software: str = ""  # Software, or empty for all
    size: Literal["", "node", "small", "large"] = ""  # One of `SIZES`; empty for all
    special: bool | None = None  # Whether the runs have experts, context parallelism or 8-bit products; None for all
    rows: PositiveInt  # Number of measurements
    groups: PositiveInt  # Number of models, clusters or software that they are of
    median: NonNegativeFloat  # Median of the absolute error
    ninetieth: NonNegativeFloat  # Error within which 90 % are
    bias: float  # Median of the error
    width: NonNegativeFloat  # Half of the 80 % interval of the logarithm

    def describe(self) -> str:
        """Return the errors in words."""
        sizes = {"node": " on one node", "small": f" on up to {SMALL} devices", "large": f" on more than {SMALL}"}
        kind = {None: "", True: " with experts, context parallelism, 8 or 4 bits", False: ""}[self.special]
        errors = f"median {100 * self.median:.0f} %, 90 % within {100 * self.ninetieth:.0f} %"
        of = f"{self.rows:,} measurements of {self.software or 'other software'}{sizes.get(self.size, '')}{kind}"
        which = {"model": "whose models", "cluster": "whose clusters", "software": "which"}[self.left_out]
        return f"{errors}: {of}, {which} the fit had not seen"


@cache
def _entries() -> Mapping[tuple[str, str, Class], Accuracy]:
    found: dict[tuple[str, str, Class], Accuracy] = {}
    tables: Mapping[str, Any] = shipped("accuracy")
    for kind in ("time", "memory"):
        for values in tables[kind]:
            entry = validate(Accuracy, values, source="accuracy.toml", prefix=kind)
            found[kind, entry.left_out, (entry.software, entry.size, entry.special)] = entry
    return found


def size_name(nodes: int, accelerators: int) -> str:
    """Return one of `SIZES`."""
    return "node" if nodes == 1 else "small" if accelerators <= SMALL else "large"


def broader_classes(software: str, size: str, *, special: bool) -> tuple[Class, ...]:
    """Return the classes that a run belongs to, the narrowest first."""
    return (software, size, special), (software, "", special), (software, "", None), ("", "", special), ("", "", None)


def find_accuracy(kind: Kind, software: str, size: str, cluster: str, *, special: bool) -> Accuracy:
    """Return the errors of the narrowest class of runs that was measured often enough.

    They are larger where the fit has seen no such cluster with this software, and no run of this software.

    Args:
        cluster: accelerator and network, as in the table ``clusters`` of ``accuracy.toml``.

    >>> find_accuracy("time", "shoal", "node", "h100-sxm", special=False).left_out
    'software'
    """
    known, clusters = _entries(), shipped("accuracy")["clusters"][kind]
    left_out = "software" if software not in clusters else "model" if cluster in clusters[software] else "cluster"
    every = broader_classes("" if left_out == "software" else software, size, special=special)
    return next(known[kind, left_out, each] for each in every if (kind, left_out, each) in known)
