"""`shoal explain compatibility`: which techniques go together, and why the others do not."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.section import Section
from shoal.spec.compatibility.matrix import TECHNIQUES, Cell, build_matrix

WORKS, REFUSED, ONE_OF = ".", "x", "-"


class CompatibilityOptions(Section):
    """Which techniques go together, and why others do not."""

    technique: str = ""
    """Show this technique alone, with the reason and the remedy of each refusal."""


def explain(options: CompatibilityOptions, console: Console) -> None:
    """Print the matrix, or one technique's part of it."""
    if options.technique and options.technique not in TECHNIQUES:
        raise UsageError(
            f"--technique {options.technique!r}: unknown; {did_you_mean(options.technique, TECHNIQUES)}"
        )
    cells = build_matrix()
    if options.technique:
        _print_one(options.technique, cells, console)
        return
    names = list(TECHNIQUES)
    width = max(map(len, names))
    for digit in (10, 1):
        row = "".join(str(i // digit % 10) if digit == 1 or i >= digit else " " for i in range(1, len(names) + 1))
        console.print(Text(" " * (width + 4) + row, style="dim"), no_wrap=True)
    for i, name in enumerate(names):
        line = Text(f"{i + 1:>2} {name:<{width}} ")
        for other in names[:i]:
            mark = _mark(cells[other, name])
            line.append(mark, style={REFUSED: "red", WORKS: "green"}.get(mark, "dim"))
        console.print(line, no_wrap=True)
    console.print(f"\n{WORKS} works   {REFUSED} refused   {ONE_OF} two values of one setting\n")
    reasons: dict[str, list[tuple[str, str]]] = {}
    for pair, cell in cells.items():
        if cell.conflict:
            reasons.setdefault(cell.conflict.reason, []).append(pair)
    for reason, pairs in reasons.items():
        firsts, seconds = (", ".join(dict.fromkeys(side)) for side in zip(*pairs, strict=True))
        console.print(Text.assemble((f"{firsts} x {seconds}", "bold"), f": {reason}."))


def _mark(cell: Cell) -> str:
    return ONE_OF if cell.same_choice else REFUSED if cell.conflict else WORKS


def _print_one(technique: str, cells: dict[tuple[str, str], Cell], console: Console) -> None:
    mine = {(a if b == technique else b): cell for (a, b), cell in cells.items() if technique in (a, b)}
    works = [name for name, cell in mine.items() if _mark(cell) == WORKS]
    console.print(Text(f"{technique} works with {', '.join(works)}.\n"))
    for name, cell in mine.items():
        if cell.conflict:
            console.print(Text(f"not with {name}: {cell.conflict.reason}.\n  {cell.conflict.remedy}."))
