"""`shoal explain compatibility`: what is printed is what the table decides."""

import io
import re

import pytest
from rich.console import Console

from shoal.base.errors import UsageError
from shoal.labs.explain.compatibility import CompatibilityOptions, explain
from shoal.spec.catalog import model_shape
from shoal.spec.compatibility.features import BARE, CheckedRun
from shoal.spec.compatibility.matrix import TECHNIQUES, build_matrix, example_run
from shoal.spec.compatibility.table import CONFLICTS, find_conflict

NO_TECHNIQUES = {
    "train.device", "train.transport", "testing.straggler", "testing.min_step_seconds", "testing.kill",
    "testing.link_gbs", "model.weights", "model.qk_norm", "model.latent", "model.window", "model.sinks",
    "model.mtp_depth",
    "failover.restarts", "failover.recovery_timeout_seconds",
}  # fmt: skip


def printed(**options: str) -> str:
    console = Console(file=io.StringIO(), width=200)
    explain(CompatibilityOptions(**options), console)
    return console.file.getvalue()


def test_each_technique_works_by_itself() -> None:
    assert all(find_conflict(run) is None for name in TECHNIQUES if (run := example_run(name)))


def test_every_row_between_two_techniques_is_seen_in_the_matrix() -> None:
    """What has no cell: requirements, as "no tensor parallelism", and settings that are no technique."""
    shown = {cell.conflict for cell in build_matrix().values()}
    plain = CheckedRun(BARE, model_shape("tiny"))
    between = {c for c in CONFLICTS if not c.first.used(plain) and not c.second.used(plain)}
    assert all(NO_TECHNIQUES & {c.first.field, c.second.field} for c in between - shown)


def test_the_matrix_marks_what_is_refused() -> None:
    text = printed()
    row = next(line for line in text.splitlines() if "torch.compile " in line)
    marks = row.split()[-1]
    names = list(TECHNIQUES)
    cells = build_matrix()
    assert [mark == "x" for mark in marks] == [
        cells[other, "torch.compile"].conflict is not None for other in names[: names.index("torch.compile")]
    ]
    assert max(map(len, re.findall(r"^ ?[0-9]+ .*$", text, re.MULTILINE))) <= 80


def test_one_technique_is_told_with_remedies() -> None:
    text = printed(technique="torch.compile")
    assert "works with data parallelism (DDP)" in text and "not with histograms" in text
    assert "Leave train.compile out" in text
    with pytest.raises(UsageError, match="did you mean"):
        explain(CompatibilityOptions(technique="torch.compil"), Console(quiet=True))
