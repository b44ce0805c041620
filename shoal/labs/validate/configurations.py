"""Complete published rows by the configurations of their runs, which say what a publication leaves out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from shoal.base.files import read_toml
from shoal.labs.validate.columns import Row


@cache
def configurations() -> list[Mapping[str, Any]]:
    """Return the entries of `configurations.toml`, which describes them."""
    return list(read_toml(Path(__file__).parent / "configurations.toml").values())


def complete(row: Row) -> Row:
    """Return the row with what its run's configuration says: in empty columns, and instead of what cannot be.

    >>> complete({"framework": "Primus", "model": "mixtral-8x22b", "pp": "4"})["global_batch"]
    '128'
    """
    for entry in configurations():
        if all(re.search(pattern, row.get(column) or "") for column, pattern in entry["where"].items()):
            empty = {column: str(value) for column, value in entry.get("set", {}).items() if not row.get(column)}
            row = {**row, **empty, **{column: str(value) for column, value in entry.get("instead", {}).items()}}
    return row
