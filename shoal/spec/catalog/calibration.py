"""Constants of the calibrated cost model, each with its meaning and source, from `calibration.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.files import read_toml
from shoal.base.section import Section, validate
from shoal.spec.catalog.accelerators import Generation
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.catalog.software import find_software, software_table
from shoal.spec.catalog.tables import shipped

if TYPE_CHECKING:
    import numpy as np

GENERATIONS = get_args(Generation)
NETWORKS = ("infiniband", "roce", "efa", "omni-path", "tcp")
"""Kinds of networks between nodes; tcp is any whose messages pass through the hosts' CPUs."""

Value = float | tuple[float, ...]


class Constant(Section):
    """One constant: a single number, or one per generation, network or software."""

    meaning: str  # Description of the constant
    unit: str = "1"  # Unit of the values
    # Key of a table of values, empty for a single number. Keys without a value use `expected`.
    by: Literal["", "generation", "network", "software"] = ""
    # Value without any measurement: the prior of the fit. A table has values for some keys, and `rest` for the others.
    expected: NonNegativeFloat | dict[str, NonNegativeFloat]
    source: str = ""  # Publication of the expected value
    sure: PositiveFloat = 0.6  # Prior standard deviation of the logarithm
    least: PositiveFloat | None = None  # Lower bound
    most: PositiveFloat | None = None  # Upper bound
    fitted: Literal["time", "memory", ""] = ""  # Kind of measurements that it is fitted to; empty if it is not fitted
    # Fitted value: a number, or a table with some of the keys
    value: NonNegativeFloat | dict[str, NonNegativeFloat] = Field(default={})

    @model_validator(mode="after")
    def _complete(self) -> Constant:
        names = constant_names(self.by)
        if isinstance(self.expected, dict) and not {"rest"} <= self.expected.keys() <= {"rest", *names}:
            raise ValueError(f"expected: a table has `rest` and some of {', '.join(names)}")
        if self.by and not isinstance(self.value, dict):
            raise ValueError(f"value: it is a table, with some of {', '.join(names)}")
        if isinstance(self.value, dict) and (wrong := self.value.keys() - set(names)):
            what = f"there is no {self.by} '{min(wrong)}'; {did_you_mean(min(wrong), names)}"
            raise ValueError(f"value: {what if self.by else 'it is one number'}")
        return self

    def prior(self, name: str = "") -> float:
        """Return the expected value for one key."""
        return self.expected.get(name, self.expected["rest"]) if isinstance(self.expected, dict) else self.expected

    def values(self) -> Value:
        """Return the number, or a tuple with one number for each of `constant_names` its key."""
        given = self.value if isinstance(self.value, dict) else {"": self.value}
        values = tuple(float(given.get(name, self.prior(name))) for name in constant_names(self.by))
        return values if self.by else values[0]


def constant_names(by: str) -> tuple[str, ...]:
    """Return the names of the values of a constant."""
    return {
        "": ("",),
        "generation": GENERATIONS,
        "network": NETWORKS,
        "software": tuple(software_table()),
    }[by]


class Calibration:
    """The constants as arrays: `calibration["hbm"]` is a number, or one for each of `constant_names` its key.

    Attributes:
        constants: descriptions by name.
        values: numbers or tuples by name (default: the constants' own values).
    """

    def __init__(self, constants: Mapping[str, Constant], values: Mapping[str, Value] | None = None):
        self.constants = dict(constants)
        self.values = dict(values) if values else {name: of.values() for name, of in constants.items()}

    @cached_property
    def numbers(self) -> dict[str, float]:
        """Constants with a single value."""
        return {name: value for name, value in self.values.items() if not isinstance(value, tuple)}

    @cached_property
    def tables(self) -> dict[str, tuple[float, ...]]:
        """Constants with several values, in the order of `constant_names` their key."""
        return {name: value for name, value in self.values.items() if isinstance(value, tuple)}

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        import numpy as np

        return {name: np.asarray(values, float)[()] for name, values in self.values.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def at(self, name: str, *, generation: str = "other", network: str = "infiniband") -> float:
        """Return a constant's value for a generation of accelerators, a network, or shoal itself."""
        by, value = self.constants[name].by, self.values[name]
        if not isinstance(value, tuple):
            return value
        return value[constant_names(by).index({"generation": generation, "network": network}.get(by, "shoal"))]

    def measured(self, values: Mapping[str, float]) -> Calibration:
        """Return a copy with measured values, each for all keys of its constant.

        Raises:
            UsageError: unknown constant.
        """
        for name in values:
            if name not in self.values:
                more = "Or measure again with this version: shoal calibrate."
                raise UsageError(f"catalog: there is no constant '{name}'; {did_you_mean(name, self.values)}\n  {more}")
        of = {name: len(found) if isinstance(found, tuple) else 0 for name, found in self.values.items()}
        return self._with({name: (value,) * of[name] if of[name] else value for name, value in values.items()})

    def expected(self) -> Calibration:
        """Return a copy with the expected value of every fitted constant, as without measurements."""
        fitted = [name for name, of in self.constants.items() if of.fitted]
        return self._with({name: self.constants[name].model_copy(update={"value": {}}).values() for name in fitted})

    def with_values(self, values: Mapping[str, np.ndarray]) -> Calibration:
        """Return a copy with other values for some constants, and the same descriptions."""
        return self._with({name: tuple(v.tolist()) if v.ndim else float(v) for name, v in values.items()})

    def _with(self, values: Mapping[str, Value]) -> Calibration:
        return Calibration(self.constants, {**self.values, **values})


def read_calibration(path: Path | None = None) -> Calibration:
    """Read constants from a TOML file (default: those shipped with shoal).

    Raises:
        UsageError: no such file, not TOML, a constant that is missing, unknown or with another key than shoal's own,
            or a value that is unknown, negative or not finite.
    """
    own = _constants(shipped("calibration"), "calibration.toml")
    if path is None:
        return Calibration(own)
    given = _constants(read_toml(path), str(path))
    if wrong := sorted(given.keys() ^ own.keys()):
        raise UsageError(f"{path}: constants must have the names in shoal's calibration.toml; these differ: {wrong}")
    for name, constant in given.items():
        if constant.by != own[name].by:
            raise UsageError(f"{path}: [{name}] by = '{constant.by}', but in shoal's own it is '{own[name].by}'")
    return Calibration(given)


def _constants(tables: dict[str, Any], source: str) -> dict[str, Constant]:
    return {name: validate(Constant, values, source=source, prefix=name) for name, values in tables.items()}


def calibration() -> Calibration:
    """Return shoal's own calibration, with values for each software of the catalog."""
    return _read_own(constant_names("software"))


@cache
def _read_own(software: tuple[str, ...]) -> Calibration:
    return read_calibration()


def cluster_calibration(cluster: Cluster, software: str = "other") -> Calibration:
    """Return the calibration of a software on a cluster.

    It has the values measured with the software on this generation of accelerators (`Software.constants`), and over
    them those measured on the cluster's nodes (`shoal calibrate`).
    """
    found = {**find_software(software).constants.get(cluster.accelerator.generation, {}), **cluster.constants}
    return calibration().measured(found) if found else calibration()
