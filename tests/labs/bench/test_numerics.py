"""The experiment of the number formats: its arithmetic, its plot, and one run of it."""

import math
import signal
import time
import xml.etree.ElementTree as ET
from typing import get_args

import psutil
import pytest

from shoal.base.section import plain
from shoal.engine.data.prepare import prepare
from shoal.labs.bench.learning.experiment import TrainedRun, compare, draw, list_losses, train
from shoal.labs.bench.learning.numerics import (
    FAILS,
    FAMILIES,
    LOST,
    REFERENCE,
    RUNS,
    configure,
    find_unexpected,
    is_within,
    max_distances,
    smooth,
)
from shoal.spec.config.sections import Precision
from shoal.training.check import check
from tests.trainings.runs import start


def curve(name, seed, losses):
    points = list(enumerate(losses, 1))
    return TrainedRun(name, seed, points, points[-1:] if len(points) == len(BASE) else [], {"skipped": 0})


BASE = [5.0 - 0.01 * i for i in range(100)]
CURVES = [
    *(curve(REFERENCE, seed, [x + seed for x in BASE]) for seed in range(2)),
    *(curve("bf16", seed, [x + seed + 0.02 for x in BASE]) for seed in range(2)),
    *(curve(LOST, seed, [5.0 + seed] * 100) for seed in range(2)),
]


def test_the_same_seeds_are_compared():
    summaries, distances = compare(CURVES, REFERENCE), max_distances(CURVES)
    difference = {each.name: each.difference for each in summaries}
    assert difference[REFERENCE] == distances[REFERENCE] == 0
    assert difference["bf16"] == pytest.approx(0.02) and distances["bf16"] == pytest.approx(0.02)
    assert difference[LOST] == pytest.approx(0.99)
    assert distances[LOST] == pytest.approx(5.0 - (sum(BASE[-10:]) / 10))
    assert find_unexpected(summaries, distances, 0.1) == []
    assert find_unexpected(summaries, distances, 0.01) == ["bf16"]
    assert find_unexpected(summaries, distances, 1.0) == [LOST], "what should fail is inside the band"


def test_a_run_that_ended_is_beyond_any_band():
    runs = [*CURVES, *(curve("fp8", seed, [x + seed for x in BASE[:7]]) for seed in range(2))]
    ended, distances = compare(runs, REFERENCE)[-1], max_distances(runs)
    assert distances["fp8"] == math.inf and math.isnan(ended.loss) and not is_within(ended, distances, 1e9)


def test_every_run_is_drawn_and_can_be_made():
    assert {name for names in FAMILIES.values() for name in names} == set(RUNS) - {REFERENCE}
    for name in RUNS:
        check(configure(name, 0, 10))
    used = {configure(name, 0, 10).train.precision for name in RUNS}
    assert {"bf16", "fp16", "fp8", "mxfp8", "bf16-weights", "bf16-all"} <= used <= set(get_args(Precision))
    assert set(FAILS) <= set(RUNS)
    svg = ET.fromstring(draw("title", CURVES, FAMILIES, REFERENCE, smooth, x="steps", y="loss"))
    text = [element.text for element in svg.iter() if element.text]
    assert "16 bits" in text and "float16 without a loss scale" in text and "bf16" in text
    lines = list_losses(CURVES)
    assert len(lines) == 6 * 100 and [bool(line["validation_loss"]) for line in lines[98:101]] == [False, True, False]


@pytest.mark.parametrize("end, code", [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)])
def test_no_training_outlives_its_command(end, code):
    command = start("bench", "numerics", "--only", REFERENCE, "--seeds", "1", "--steps", "1000000")
    while not (workers := workers_of(command.pid)) and command.poll() is None:
        time.sleep(0.05)
    time.sleep(0.5)  # into the training
    begin = time.monotonic()
    command.send_signal(end)
    command.wait(timeout=60)
    took = time.monotonic() - begin
    _, alive = psutil.wait_procs(workers, timeout=5)
    for worker in alive:
        worker.kill()
    assert workers and not alive
    assert command.returncode == code and took < 10, "no training is waited for"


def workers_of(pid: int) -> list[psutil.Process]:
    """Return the processes forked by the command's prefork server."""
    return [worker for server in psutil.Process(pid).children() for worker in server.children()]


def test_a_short_run():
    """All of a run, in this process, with a smaller model."""
    values = configure(LOST, 0, 4)
    small = values.model_copy(update={
        "train": values.train.model_copy(update={"validation_sequences": 8}),
        "model": values.model.model_copy(update={"layers": 1, "hidden": 32, "ffn": 64}),
    })
    prepare(small.data)
    losses, validations, facts = train(plain(small), 2)
    assert [step for step, _ in losses] == list(range(1, 5)) and facts["skipped"] == 0
    assert [step for step, _ in validations] == [2, 4] and math.isfinite(validations[-1][1])
