"""Peak speed and memory of accelerators, from their makers' data sheets.

A CPU has no entry: its peak is no fact of a data sheet, it depends on the machine and is measured there.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files

from pydantic import BaseModel, ConfigDict, PositiveFloat

from shoal.errors import UsageError, did_you_mean


class Accelerator(BaseModel):
    """One device as torch sees it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    """The name in the catalog."""

    peak_flops: dict[str, PositiveFloat]
    """Dense matrix products, FLOP/s, by number format: bf16, fp16, tf32, fp32, fp8. A format it lacks is not there."""

    memory_bytes: PositiveFloat
    """Size of its memory, bytes."""

    memory_bandwidth: PositiveFloat
    """Of its memory, bytes/s."""

    devices: tuple[str, ...]
    """The names that its driver reports."""

    source: str
    """Where the numbers are from."""


@cache
def _catalog() -> dict[str, Accelerator]:
    entries = tomllib.loads(files("shoal.catalog").joinpath("accelerators.toml").read_text())
    return {name: Accelerator(name=name, **entry) for name, entry in entries.items()}


def accelerator_names() -> list[str]:
    """All names in the catalog."""
    return list(_catalog())


def accelerator(name: str) -> Accelerator:
    """An accelerator by its name in the catalog.

    Raises:
        UsageError: the name is not in the catalog.
    """
    if name not in _catalog():
        raise UsageError(f"accelerator '{name}' is not in the catalog; {did_you_mean(name, _catalog())}")
    return _catalog()[name]


def match(device_name: str) -> Accelerator | None:
    """The accelerator that a driver's device name means, or None: a wrong peak is worse than no MFU.

    >>> match("NVIDIA H200").name
    'h200-sxm'
    >>> match("NVIDIA H100 80GB HBM3 MIG 3g.40gb") is None
    True
    """
    return next((a for a in _catalog().values() if device_name in a.devices), None)
