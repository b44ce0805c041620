"""The fields of a layout that a search is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.base.errors import UsageError
from shoal.base.section import validate
from shoal.planning.search.space import LEVELS, SEARCHED
from shoal.spec.layout import Layout


def check_fixed(fields: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with their types.

    Args:
        fields: names and values, or the same as text: ``tp=8,recompute=full``.

    Raises:
        UsageError: a field that layouts do not have or that is not searched, or a value that it does not take.

    >>> check_fixed("tp=8,sequence-parallel=true,stage_layers=7/9")
    {'tp': 8, 'sequence_parallel': True, 'stage_layers': (7, 9)}
    """
    values = _parse(fields) if isinstance(fields, str) else dict(fields)
    layout = validate(Layout, values, where="--fix")
    if unknown := [name for name in values if name not in LEVELS]:
        raise UsageError(f"--fix {unknown[0]}: it is not searched; allowed: {', '.join(LEVELS)}")
    given = {name: getattr(layout, name) for name in values}
    if given.get("schedule", SEARCHED[0]) not in SEARCHED:
        raise UsageError(f"--fix schedule={given['schedule']}: it is not searched; allowed: {', '.join(SEARCHED)}")
    return given


def _parse(text: str) -> dict[str, Any]:
    """Names and values from text."""
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if bad := [name for name, equals, value in pairs if not equals or not value]:
        raise UsageError(f"--fix {text}: write fields and values, as tp=8; {bad[0]} has none")
    return {name.strip().replace("-", "_"): _parse_value(value.strip()) for name, _, value in pairs}


def _parse_value(text: str) -> int | bool | str | list[int]:
    """A number, numbers between slashes, or a truth value, where it reads like one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    parts = text.split("/")
    if len(parts) > 1:
        if not all(part.isdecimal() for part in parts):
            raise UsageError(f"--fix {text}: write the layers of all stages, as stage_layers=7/9")
        return [int(part) for part in parts]
    return int(text) if text.isdecimal() else text
