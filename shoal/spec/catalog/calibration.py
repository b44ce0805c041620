"""The constants of the calibrated cost model, each with what it means and how it was found, from `calibration.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.files import read_toml
from shoal.base.section import Section, validate
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.catalog.software import software_table
from shoal.spec.catalog.tables import shipped

if TYPE_CHECKING:
    import numpy as np

GENERATIONS = ("volta", "ampere", "hopper", "blackwell", "cdna", "tpu", "other")
NETWORKS = ("infiniband", "roce", "efa", "omni-path", "efa-slow")
"""What leads out of nodes; efa-slow is one of jobs whose own measured collectives slowed down with every node."""
SPREADS = ("node", "small", "large")
"""One node, up to 128 accelerators, and more: what the errors of an estimate are known by."""


Value = float | tuple[float, ...]


class Constant(Section):
    """One constant: a number, or one for each generation, network, software or scale."""

    meaning: str
    """What it is."""

    unit: str = "1"
    """Of its values."""

    by: Literal["", "generation", "network", "software", "scale"] = ""
    """What there is one value for each of; of those that are not listed, `expected` counts."""

    expected: NonNegativeFloat | dict[str, NonNegativeFloat]
    """What one expects without any measurement; a fit is drawn to it as far as the data leave it open. A table has one
    for some of what it is known by, and `rest` for the others."""

    source: str = ""
    """Where that is published."""

    sure: PositiveFloat = 0.6
    """How far a fit may go from there: one standard deviation of its logarithm."""

    least: PositiveFloat | None = None
    """What it cannot be below."""

    most: PositiveFloat | None = None
    """What it cannot exceed."""

    fitted: Literal["time", "memory", ""] = ""
    """The measurements that it is fitted to; not at all if empty."""

    value: NonNegativeFloat | dict[str, NonNegativeFloat] = Field(default={})
    """What the fit found: a number, or a table of some of what there is one for each of."""

    @model_validator(mode="after")
    def _complete(self) -> Constant:
        names = names_of(self.by)
        if isinstance(self.expected, dict) and not {"rest"} <= self.expected.keys() <= {"rest", *names}:
            raise ValueError(f"expected: a table has `rest` and some of {', '.join(names)}")
        if self.by and not isinstance(self.value, dict):
            raise ValueError(f"value: it is a table, with some of {', '.join(names)}")
        if isinstance(self.value, dict) and (wrong := self.value.keys() - set(names)):
            what = f"there is no {self.by} '{min(wrong)}'; {did_you_mean(min(wrong), names)}"
            raise ValueError(f"value: {what if self.by else 'it is one number'}")
        return self

    def prior(self, name: str = "") -> float:
        """What one expects, for one of what it is known by."""
        return self.expected.get(name, self.expected["rest"]) if isinstance(self.expected, dict) else self.expected

    def values(self) -> Value:
        """Its number, or one for each of `names_of` what it is known by."""
        given = self.value if isinstance(self.value, dict) else {"": self.value}
        values = tuple(float(given.get(name, self.prior(name))) for name in names_of(self.by))
        return values if self.by else values[0]


def names_of(by: str) -> tuple[str, ...]:
    """What a constant has a value for each of."""
    return {
        "": ("",),
        "generation": GENERATIONS,
        "network": NETWORKS,
        "software": tuple(software_table()),
        "scale": SPREADS,
    }[by]


class Calibration:
    """The constants as arrays: `calibration["hbm"]` is a number, or one for each of `names_of` what it is known by.

    Attributes:
        constants: with what they mean.
        values: the same numbers, in tuples (default: those of the constants).
    """

    def __init__(self, constants: Mapping[str, Constant], values: Mapping[str, Value] | None = None):
        self.constants = dict(constants)
        self.values = dict(values) if values else {name: of.values() for name, of in constants.items()}

    @cached_property
    def numbers(self) -> dict[str, float]:
        """Of `values` those that are one number."""
        return {name: value for name, value in self.values.items() if not isinstance(value, tuple)}

    @cached_property
    def tables(self) -> dict[str, tuple[float, ...]]:
        """Of `values` those that are several, one for each of `names_of` what they are known by."""
        return {name: value for name, value in self.values.items() if isinstance(value, tuple)}

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        import numpy as np

        return {name: np.asarray(values, float)[()] for name, values in self.values.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def measured(self, values: Mapping[str, float]) -> Calibration:
        """The same with other values, each for whatever its constant is known by.

        Raises:
            UsageError: there is no such constant.
        """
        for name in values:
            if name not in self.values:
                raise UsageError(f"catalog: there is no constant '{name}'; {did_you_mean(name, self.values)}")
        of = {name: len(found) if isinstance(found, tuple) else 0 for name, found in self.values.items()}
        return self._with({name: (value,) * of[name] if of[name] else value for name, value in values.items()})

    def expected(self) -> Calibration:
        """The same as if nothing had been measured: all that a fit finds has what is expected of it."""
        fitted = [name for name, of in self.constants.items() if of.fitted]
        return self._with({name: self.constants[name].model_copy(update={"value": {}}).values() for name in fitted})

    def with_values(self, values: Mapping[str, np.ndarray]) -> Calibration:
        """The same with other values for some constants; what they mean is kept."""
        return self._with({name: tuple(v.tolist()) if v.ndim else float(v) for name, v in values.items()})

    def _with(self, values: Mapping[str, Value]) -> Calibration:
        return Calibration(self.constants, {**self.values, **values})


def read_calibration(path: Path | None = None) -> Calibration:
    """Constants from a TOML file, or shoal's own.

    Raises:
        UsageError: no such file, not TOML, a constant that is missing, unknown or by something else than shoal's own,
            or a value that is unknown, negative or not finite.
    """
    own = _constants(shipped("calibration"), "calibration.toml")
    if path is None:
        return Calibration(own)
    given = _constants(read_toml(path), str(path))
    if wrong := sorted(given.keys() ^ own.keys()):
        raise UsageError(f"{path}: constants must be those of shoal's own calibration.toml; these differ: {wrong}")
    for name, constant in given.items():
        if constant.by != own[name].by:
            raise UsageError(f"{path}: [{name}] by = '{constant.by}', but in shoal's own it is '{own[name].by}'")
    return Calibration(given)


def _constants(tables: dict[str, Any], source: str) -> dict[str, Constant]:
    return {name: validate(Constant, values, source=source, prefix=name) for name, values in tables.items()}


@cache
def calibration() -> Calibration:
    """Shoal's own."""
    return read_calibration()


def calibration_of(cluster: Cluster) -> Calibration:
    """Shoal's own, but for what was measured on the nodes of a cluster (`shoal calibrate`)."""
    return calibration().measured(cluster.constants) if cluster.constants else calibration()
