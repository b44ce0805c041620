"""The tables of a validation, as lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from shoal.labs.validate.by_estimate import EstimatedSteps
from shoal.labs.validate.fit import at_bounds
from shoal.labs.validate.rows import Left
from shoal.labs.validate.score import Errors, Scored, by, totals
from shoal.labs.validate.validation import Validation

HEADS = (
    "times", "median", "90 %", "bias", "in 80 %", "memory", "median", "90 %", "bias", "in 80 %", "did not fit",
    "precision", "recall",
)  # fmt: skip


def fit_lines(found: Validation) -> list[str]:
    """What a fit found: the constants at a bound, and the scores of models that it had not seen."""
    if found.unseen is None:
        return []
    return [
        *(f"  {line}" for line in at_bounds(found.constants, found.points)),
        "\nModels that a fit had not seen:\n",
        *table(totals(found.unseen) | by(found.unseen, lambda p: p.file)),
        "\nAll of them, by constants from all:\n",
    ]


def score_lines(found: Validation, worst: int = 0) -> list[str]:
    """The scores.

    Args:
        worst: how many rows of the largest errors of each file.
    """
    return [*_score(found.scored, found.left), *_steps(found.steps), *(_worst(found.scored, worst) if worst else ())]


def _score(scored: Scored, left: Left) -> list[str]:
    sources = by(scored, lambda p: f"{p.file}, {p.quality}")
    sizes = by(scored, lambda p: f"{_size(p.gpus)} accelerators, {p.quality}")
    good, families = scored.where(lambda p: p.quality == "A").best
    lines = [
        *table(totals(scored) | sources | sizes),
        f"\nPredicted best layout within 5 % of the measured best: {good} of {families} families of quality A.",
        f"{len(scored.points):,} rows scored, {sum(left.values()):,} not.",
    ]
    assumed = Counter(name for p in scored.points for name in p.assumed)
    if assumed:
        names = ", ".join(f"{name} ({count:,} rows)" for name, count in assumed.most_common())
        lines.append(f"Assumed where not published: {names}")
    lines += [f"  {file}: {count:,} not scored, {reason}" for (file, reason), count in sorted(left.items())]
    return lines


def _steps(steps: EstimatedSteps) -> list[str]:
    """How far `shoal estimate` is from the same measurements, and from the closed forms."""
    if not steps.points:
        return []
    errors = Errors.of(steps.seconds, np.array([p.seconds for p in steps.points]), np.zeros(len(steps.points)))
    return [
        f"By `shoal estimate`, {errors.rows:,} rows of quality A that it can express: median "
        f"{100 * errors.median:.1f} %, 90 % within {100 * errors.ninetieth:.1f} %, bias "
        f"{100 * errors.bias:+.1f} %; from these closed forms, told what shoal's engine does, it differs by "
        f"{100 * steps.apart:.1f} %."
    ]


def _worst(scored: Scored, count: int) -> list[str]:
    """The rows with the largest errors of each file."""
    lines = []
    for file, part in by(scored.where(lambda p: p.seconds is not None), lambda p: p.file).items():
        lines.append(f"\n{file}: the largest errors of its times")
        errors = part.seconds / part.measured_seconds
        order = sorted(
            range(len(errors)), key=lambda i: -abs(errors[i] - 1) if errors[i] > 1 else 1 - 1 / errors[i]
        )
        for i in order[:count]:
            p, run = part.points[i], part.points[i].run
            layout = ", ".join(
                f"{name} {run[name]:g}" for name in ("dp", "tp", "pp", "cp", "zero", "b", "microbatches", "s")
            )
            lines.append(f"  {p.row} {p.model}: {layout}: {part.seconds[i]:.3g} s, measured {p.seconds:.3g}")
    return lines


def _size(gpus: int) -> str:
    """A range of numbers of accelerators, as a label that sorts."""
    low = next((n for n in (1025, 257, 129, 33, 9) if gpus >= n), 1)
    return {1: "   1 to    8", 9: "   9 to   32", 33: "  33 to  128", 129: " 129 to  256", 257: " 257 to 1024"}.get(
        low, "1025 and more"
    )


def table(rows: Mapping[str, Scored]) -> list[str]:
    """Lines of one width, a head first."""
    cells = [["", *HEADS]]
    for name, scored in rows.items():
        count, precision, recall = scored.out_of_memory
        oom = [f"{count:,}", f"{precision:.3f}", f"{recall:.3f}"] if count else [""] * 3
        cells.append([name, *_errors(scored.time), *_errors(scored.memory), *oom])
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(f"{cell:>{w}}" if i else f"{cell:<{w}}" for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    ]


def _errors(errors: Errors) -> list[str]:
    if not errors.rows:
        return [""] * 5
    return [
        f"{errors.rows:,}",
        *(f"{100 * e:.1f} %" for e in (errors.median, errors.ninetieth)),
        f"{100 * errors.bias:+.1f} %",
        f"{100 * errors.inside:.0f} %",
    ]
