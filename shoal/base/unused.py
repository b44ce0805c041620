"""Options that an answer would not read are refused, not ignored."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.base.errors import UsageError
from shoal.base.section import Section


def check_unused(options: Section, names: Sequence[str], why: str) -> None:
    """Refuse those of some options that are given.

    Args:
        why: they are not read.

    Raises:
        UsageError: naming the first.
    """
    for name in names:
        given = getattr(options, name)
        if given != type(options).model_fields[name].default:
            option = f"--{name.replace('_', '-')}" + ("" if given is True else f" {given}")
            raise UsageError(f"{option}: {why}.\n  Leave it out.")
