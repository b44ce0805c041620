"""The results of races: the table that people read, and its file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.table import Table

from shoal.base.files import write_whole
from shoal.labs.bench.machine import machine
from shoal.labs.bench.race import ContenderResult


def table(rows: Sequence[ContenderResult]) -> Table:
    """The result as people read it; 80 columns are enough."""
    view = Table(title="one training step: shoal beside torch", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    view.add_column("contender", overflow="fold")
    for column in ("ms", "CPU ms", "tokens/s", "MB", "ratio", "quartiles", "target"):
        view.add_column(column, justify="right", no_wrap=True)
    view.add_column("met", no_wrap=True)
    for i, row in enumerate(rows):
        if i == 0 or rows[i - 1].race != row.race:
            view.add_row(f"[bold]{row.race}")
        target = "" if row.target is None else f"{row.target:.2f}"
        met = {None: "", True: "[green]yes", False: "[red]no"}[row.met]
        view.add_row(
            f"  {row.contender}", f"{row.seconds * 1e3:.1f}", f"{row.cpu_seconds * 1e3:.1f}",
            f"{row.tokens_per_second:,.0f}", f"{row.memory / 1e6:.0f}", f"{row.ratio:.2f}",
            f"{row.spread[0]:.2f}-{row.spread[1]:.2f}", target, met,
            end_section=i + 1 == len(rows) or rows[i + 1].race != row.race,
        )
    return view


def write(rows: Sequence[ContenderResult], out: Path) -> None:
    """The table as CSV or JSON, by the file's ending."""
    records = [asdict(row) | {"met": row.met} for row in rows]
    if out.suffix == ".json":
        write_whole(out, json.dumps({"machine": machine(), "rows": records}, indent=1) + "\n")
        return
    for record in records:
        record["spread_low"], record["spread_high"] = record.pop("spread")
    text = io.StringIO()
    writer = csv.DictWriter(text, records[0])
    writer.writeheader()
    writer.writerows(records)
    write_whole(out, text.getvalue())
