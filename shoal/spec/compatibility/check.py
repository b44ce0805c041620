"""Queries of the compatibility table: is a run allowed, and may it also use a feature."""

from __future__ import annotations

from shoal.base.errors import UsageError
from shoal.spec.compatibility.features import Feature, Run
from shoal.spec.compatibility.table import CONFLICTS, Conflict


def find_conflict(run: Run) -> Conflict | None:
    """Return the first row of the table that a run violates, or None."""
    used: dict[object, bool] = {}
    for conflict in CONFLICTS:
        for feature in (conflict.first, conflict.second):
            if feature not in used:
                used[feature] = feature.used(run)
            if not used[feature]:
                break
        else:
            return conflict
    return None


def check_compatibility(run: Run) -> None:
    """Reject a run with two features that exclude each other.

    Raises:
        UsageError: naming both settings, the reason and a remedy.
    """
    if conflict := find_conflict(run):
        settings = f"{conflict.first.setting(run)} with {conflict.second.setting(run)}"
        raise UsageError(f"{settings}: {conflict.reason}.\n  {conflict.remedy}.")


def is_excluded(feature: Feature, run: Run) -> bool:
    """Return whether the other features of a run exclude a feature, for code that draws or proposes runs."""
    return any(
        (conflict.first is feature and conflict.second.used(run))
        or (conflict.second is feature and conflict.first.used(run))
        for conflict in CONFLICTS
    )
