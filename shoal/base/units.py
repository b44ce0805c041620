"""Parse and format quantities with units: ``16MB``, ``450GB/s``, ``3.4us``."""

from __future__ import annotations

import math
import re

from shoal.base.errors import UsageError

BYTES = {
    "": 1, "B": 1,
    "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
BANDWIDTH = {f"{unit or 'B'}/s": factor for unit, factor in BYTES.items()}
HOUR, DAY = 3600.0, 86400.0  # seconds
TIME = {"s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def parse(text: str, units: dict[str, float], *, where: str) -> float:
    """Parse a quantity into its base unit (bytes, bytes/s, s).

    Args:
        units: `BYTES`, `BANDWIDTH` or `TIME`.
        where: name for the error message, such as an option.

    Raises:
        UsageError: not a number with one of the units, or a number that is not finite or negative.

    >>> parse("16MB", BYTES, where="--size"), parse("50 GB/s", BANDWIDTH, where="--bandwidth")
    (16000000.0, 50000000000.0)
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*(?:[eE][+-]?\d+)?)\s*(\S*)\s*", text)
    if match is None or match[2] not in units or float(match[1]) == float("inf"):
        known = ", ".join(unit for unit in units if unit)
        raise UsageError(f"{where} {text}: give a number and a unit, such as 16{list(units)[-1]}; units: {known}")
    return float(match[1]) * units[match[2]]


def parse_counts(text: str, *, where: str) -> list[int]:
    """Parse comma-separated integers, each at least 1.

    Raises:
        UsageError: a part is not a number, or below 1.

    >>> parse_counts("1, 8,64", where="--nodes")
    [1, 8, 64]
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[1-9][0-9]{0,15}", part) for part in parts):
        raise UsageError(f"{where} {text}: give numbers of at least 1, with commas, as 1,8,64")
    return [int(part) for part in parts]


def parse_numbers(text: str, *, where: str) -> list[float]:
    """Parse comma-separated numbers.

    Raises:
        UsageError: a part is not a finite number.

    >>> parse_numbers("0.5, -2,1e-3", where="--values")
    [0.5, -2.0, 0.001]
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [math.nan]
    if not all(map(math.isfinite, found)):
        raise UsageError(f"{where} {text}: give numbers with commas, as 0.5,-2,1e-3")
    return found


def show_bytes(size: float) -> str:
    """Format bytes with a decimal prefix and three digits.

    >>> show_bytes(16e6), show_bytes(1234), show_bytes(0.5)
    ('16 MB', '1.23 kB', '0.5 B')
    """
    return _show(size, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)))


def show_number(value: float) -> str:
    """Format a number with three digits and separated thousands.

    >>> show_number(1263.4), show_number(0.16667), show_number(73.0)
    ('1,260', '0.167', '73')
    """
    return f"{float(f'{value:.3g}'):,.12g}"


def show_seconds(seconds: float) -> str:
    """Format seconds with a prefix and three digits.

    >>> show_seconds(35), show_seconds(0.00125), show_seconds(3.4e-6)
    ('35 s', '1.25 ms', '3.4 µs')
    """
    return _show(seconds, (("s", 1), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)))


def show_metric(value: float, unit: str) -> str:
    """Format a quantity with a decimal prefix and three digits.

    >>> show_metric(12_340, "W"), show_metric(691.4e6, "Wh"), show_metric(989e12, "FLOP/s")
    ('12.3 kW', '691 MWh', '989 TFLOP/s')
    """
    return _show(value, tuple((f"{prefix}{unit}", 1000.0**n) for n, prefix in enumerate(("", *"kMGTP")))[::-1])


def _show(value: float, units: tuple[tuple[str, float], ...]) -> str:
    unit, factor = next((u for u in units if abs(value) >= 0.9995 * u[1]), units[-1])
    if value == 0:
        unit, factor = next(u for u in units if u[1] == 1)
    scaled = value / factor
    return f"{scaled:.0f} {unit}" if abs(scaled) >= 1000 else f"{scaled:.3g} {unit}"
