"""The experiment of the number formats: its arithmetic, its plot, and one run of it."""

import math
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import get_args

import psutil
import pytest

from shoal.labs.bench.learning import numerics
from shoal.labs.bench.learning.numerics import (
    FAILS,
    FAMILIES,
    LOST,
    REFERENCE,
    RUNS,
    Curve,
    config_of,
    draw,
    rows,
    write_csv,
    wrong,
)
from shoal.spec.config import Precision
from shoal.training.check import check

ROOT = Path(__file__).parents[3]


def curve(name, seed, losses, validation=None):
    return Curve(name, seed, tuple(losses), losses[-1] if validation is None else validation, 0)


BASE = [5.0 - 0.01 * i for i in range(100)]
CURVES = [
    *(curve(REFERENCE, seed, [x + seed for x in BASE]) for seed in range(2)),
    *(curve("bf16", seed, [x + seed + 0.02 for x in BASE]) for seed in range(2)),
    *(curve(LOST, seed, [5.0 + seed] * 100) for seed in range(2)),
]


def test_rows_compare_the_same_seeds():
    found = {row.name: row for row in rows(CURVES)}
    assert found[REFERENCE].difference == found[REFERENCE].apart == 0
    assert found["bf16"].difference == pytest.approx(0.02) and found["bf16"].apart == pytest.approx(0.02)
    assert found[LOST].difference == pytest.approx(0.99)
    assert found[LOST].apart == pytest.approx(5.0 - (sum(BASE[-10:]) / 10))
    assert wrong(list(found.values()), 0.1) == []
    assert wrong(list(found.values()), 0.01) == ["bf16"]
    assert wrong(list(found.values()), 1.0) == [LOST], "what should fail is inside the band"


def test_a_run_that_ended_is_beyond_any_band():
    ended = [curve("fp8", seed, [x + seed for x in BASE[:7]], math.nan) for seed in range(2)]
    found = rows([*CURVES, *ended])
    assert found[-1].apart == math.inf and not found[-1].within(1e9)


def test_every_run_is_drawn_and_can_be_made(tmp_path):
    assert {name for names in FAMILIES.values() for name in names} == set(RUNS) - {REFERENCE}
    for name in RUNS:
        check(config_of(name, 0, 10))
    used = {config_of(name, 0, 10).train.precision for name in RUNS}
    assert {"bf16", "fp16", "fp8", "mxfp8", "bf16-weights", "bf16-all"} <= used <= set(get_args(Precision))
    assert set(FAILS) <= set(RUNS)
    svg = ET.fromstring(draw(CURVES, "title"))
    text = [element.text for element in svg.iter() if element.text]
    assert "16 bits" in text and "float16 without a loss scale" in text and "bf16" in text
    write_csv(CURVES, tmp_path / "numerics.csv")
    assert len((tmp_path / "numerics.csv").read_text().splitlines()) == 1 + 6 * 100


@pytest.mark.parametrize("end, code", [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)])
def test_no_training_outlives_its_command(end, code):
    words = ["-m", "shoal", "bench", "numerics", "--only", REFERENCE, "--seeds", "1", "--steps", "1000000"]
    with subprocess.Popen([sys.executable, *words], cwd=ROOT, stderr=subprocess.DEVNULL) as command:
        while not (workers := workers_of(command.pid)) and command.poll() is None:
            time.sleep(0.05)
        time.sleep(0.5)  # into the training
        begin = time.monotonic()
        command.send_signal(end)
    took = time.monotonic() - begin
    _, alive = psutil.wait_procs(workers, timeout=5)
    for worker in alive:
        worker.kill()
    assert workers and not alive
    assert command.returncode == code and took < 10, "no training is waited for"


def workers_of(pid: int) -> list[psutil.Process]:
    """What the process that forks its workers has forked."""
    return [worker for forks in psutil.Process(pid).children() for worker in forks.children()]


def test_a_short_run():
    """All of a run, in this process."""
    values = config_of(LOST, 0, 8)
    small = values.model_copy(update={"train": values.train.model_copy(update={"validation_sequences": 8})})
    numerics.prepare(small.data)
    losses, validation, skipped = numerics._train(numerics.plain(small))
    assert len(losses) == 8 and skipped == 0 and math.isfinite(validation)
