"""A run that was killed or stopped goes on as if it had not: bit for bit on its layout, to rounding on others."""

import os
import re
import shutil
import signal
import time
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from shoal.base.section import plain
from shoal.cli.main import main
from shoal.engine.checkpoint.save import Checkpointer
from shoal.training.check import check
from shoal.training.run_folder import check_resume, new_run
from shoal.training.stop import PREEMPTED, StopRequests
from tests.trainings.fixtures import BASE_STEPS
from tests.trainings.runs import (
    FOUR_RANKS,
    checkpoints,
    copy_until,
    curve,
    interrupt,
    records,
    same_bits,
    send,
    shoal,
    small_config,
    start,
    train_here,
    train_in,
)

STEPS, HALF = BASE_STEPS, BASE_STEPS // 2


# ---- killed and stopped, on the same layout --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def survivor(base_config, tmp_path_factory):
    """A run that is killed and stopped, each time resumed: its folder, and how each part of it ended."""
    folder = tmp_path_factory.mktemp("survivor") / "run"
    parts = {}

    def part(name, step, act, *words):
        parts[name] = interrupt(start("train", *words), folder, step, act)

    part("rank killed", 6, send(3, signal.SIGKILL), base_config, "--run-folder", folder)
    part("SIGTERM", HALF, send(0, signal.SIGTERM), "--resume", folder)
    parts["after SIGTERM"] = max(checkpoints(folder))
    parts["end"] = shoal("train", "--resume", folder)
    return folder, parts


def test_a_killed_rank_ends_the_run_and_names_the_rank(survivor):
    code, output, _ = survivor[1]["rank killed"]
    assert code == 128 + signal.SIGKILL
    assert re.search(r"rank 2 was killed by SIGKILL .*step \d+.*; the other ranks were stopped", output)
    assert "Traceback" not in output


def test_a_stop_is_clean_quick_and_saved(survivor):
    folder, parts = survivor
    code, output, seconds = parts["SIGTERM"]
    assert code == PREEMPTED, output
    step = parts["after SIGTERM"]
    assert f"stopped after step {step}, which is saved; resume with: shoal train --resume {folder}" in output
    assert "Traceback" not in output
    assert "sample of generated text" not in output
    assert seconds < 40  # and not the ten minutes after which a collective gives up


def test_the_end_is_that_of_a_run_without_interruptions_bit_for_bit(survivor, base_run):
    folder, parts = survivor
    code, output = parts["end"]
    assert code == 0, output
    assert f"resumed after step {parts['after SIGTERM']}" in output
    assert curve(folder) == curve(base_run[0])
    assert [step for step, _, _ in curve(folder)] == list(range(1, STEPS + 1))
    assert same_bits(checkpoints(folder)[STEPS], checkpoints(base_run[0])[STEPS])


def stopped_while_saving(values: dict[str, Any], folder: Path, step: int) -> None:
    """A run that is asked to stop in ``step``, while rank 0 has not written its part of the checkpoint before it."""
    write, asked = Checkpointer._write, iter(range(1, 100))

    def slow_write(self: Checkpointer, *arguments: Any) -> Any:
        time.sleep(0.5 * (dist.get_rank() == 0))
        return write(self, *arguments)

    with mock.patch.object(Checkpointer, "_write", slow_write), \
            mock.patch.object(StopRequests, "asked", mock.PropertyMock(side_effect=lambda: next(asked) >= step)), \
            mock.patch.object(StopRequests, "ends", True):
        train_here(values, folder, resume=False)


def test_a_stop_waits_for_the_save_in_flight(corpus, pool, tmp_path):
    """The save exchanges messages in a thread of its own; other messages in its group would take their places."""
    config = small_config(corpus, {"dp": 2, "zero": 1, "micro_batch": 4}, train={"steps": 12})
    new_run(config, tmp_path / "run")
    pool.run(stopped_while_saving, 2, plain(config), tmp_path / "run", 5, timeout=30)
    assert sorted(checkpoints(tmp_path / "run")) == [4, 5]


# ---- on other layouts ------------------------------------------------------------------------------------------------

LAYOUTS = {
    "dp 2, ZeRO-3": {"dp": 2, "zero": 3, "micro_batch": 2},
    "tp 2 + sequence parallel": {"tp": 2, "sequence_parallel": True, "micro_batch": 4},
    "cp 4, ring and exchange": {"cp": 4, "ulysses": 2, "zero": 1, "micro_batch": 4},
    "pp 2": {"pp": 2, "micro_batch": 2},
    "one device": {"micro_batch": 4},
}
BOUNDS = {"fp32": 2e-5, "fp64": 1e-9}


@pytest.fixture(scope="module")
def uninterrupted(corpus, pool, tmp_path_factory):
    """By precision, the config and folder of 8 steps on 4 ranks."""
    runs = {}
    for precision in BOUNDS:
        train = {"precision": precision, "steps": 8, "validate_every": 0}
        layout = FOUR_RANKS | {"micro_batch": 4}
        config = small_config(corpus, layout, train=train, model={"layers": 4}, checkpoint={"every": 2})
        runs[precision] = config, train_in(pool, config, tmp_path_factory.mktemp(precision) / "run")
    return runs


@pytest.mark.parametrize(
    ("layout", "precision"), [*((layout, "fp64") for layout in LAYOUTS), ("dp 2, ZeRO-3", "fp32"), ("pp 2", "fp32")]
)
def test_another_layout_continues_the_same_curve(layout, precision, uninterrupted, pool, tmp_path):
    config, whole = uninterrupted[precision]
    folder = copy_until(whole, tmp_path / "run", 4)
    changed = config.model_copy(update={"parallel": type(config.parallel)(**LAYOUTS[layout])})
    train_in(pool, changed, folder, resume=True)
    assert curve(folder)[:4] == curve(whole)[:4]
    again = zip(records(folder)[4:], records(whole)[4:], strict=True)
    assert all(a.tokens_per_second != b.tokens_per_second for a, b in again)  # it did compute the rest
    for (step, loss, norm), (same_step, same_loss, same_norm) in zip(curve(folder), curve(whole), strict=True):
        assert step == same_step
        assert loss == pytest.approx(same_loss, rel=BOUNDS[precision], abs=0)
        assert norm == pytest.approx(same_norm, rel=20 * BOUNDS[precision], abs=0)


RELAY = {
    2: {"pp": 2, "schedule": "interleaved-1f1b", "virtual_stages": 2, "micro_batch": 2},
    4: {"pp": 2, "schedule": "dualpipe", "dp": 2, "zero": 1, "micro_batch": 1},
    6: {"dp": 2, "micro_batch": 2},
}


def test_schedules_hand_a_run_on_to_each_other(uninterrupted, pool, tmp_path):
    config, whole = uninterrupted["fp64"]
    folder = whole
    for step, parallel in RELAY.items():
        folder = copy_until(folder, tmp_path / f"from-{step}", step)
        layout = type(config.parallel)(**parallel)
        train_in(pool, config.model_copy(update={"parallel": layout}), folder, resume=True)
    for (step, loss, norm), (same_step, same_loss, same_norm) in zip(curve(folder), curve(whole), strict=True):
        assert step == same_step
        assert loss == pytest.approx(same_loss, rel=BOUNDS["fp64"], abs=0)
        assert norm == pytest.approx(same_norm, rel=20 * BOUNDS["fp64"], abs=0)


# ---- what is kept, and what is refused -------------------------------------------------------------------------------


def test_the_newest_k_are_kept(corpus, pool, tmp_path):
    config = small_config(corpus, train={"steps": 10, "validate_every": 0}, checkpoint={"every": 3, "keep": 2})
    assert sorted(checkpoints(train_in(pool, config, tmp_path / "run"))) == [9, 10]


@pytest.fixture
def half(base_run, tmp_path):
    """A copy of the run on 4 ranks as it was in its middle."""
    return copy_until(base_run[0], tmp_path / "run", HALF)


def contents(folder) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(("name", "value", "was"), [
    ("train.global_batch", "16", "8"),
    ("train.seed", "1", "0"),
    ("data.sequence_length", "16", "32"),
    ("data.validation_fraction", "0.02", "0.1"),
    ("optimizer.name", "sgd", "adamw"),
    ("model.weights", "elsewhere", ""),
])
def test_what_would_not_continue_the_run_is_refused_by_name(half, name, value, was, capfd):
    before = contents(half)
    assert main(["train", "--resume", str(half), f"--{name}", value]) == 2
    said = capfd.readouterr().err
    assert f"--resume {half}: this run was started with another config:" in said
    assert f"\n  {name} = {value}, was {was}: " in said.replace("'", "")
    assert "Leave it out, or start a new run. What may change: the layout, train.steps, " in said
    assert contents(half) == before


def test_two_folders_are_refused(half, tmp_path, capfd):
    assert main(["train", "--resume", str(half), "--run-folder", str(tmp_path / "other")]) == 2
    assert "name two folders" in capfd.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_folder_without_a_run_is_refused(tmp_path, capfd):
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert "not a run folder" in capfd.readouterr().err


ONE_RANK = ("--parallel.dp", "1", "--parallel.tp", "1", "--parallel.zero", "0")


def test_a_finished_run_is_refused_and_says_how_to_go_on(base_run, capfd):
    folder = base_run[0]
    before = contents(folder)
    assert main(["train", "--resume", str(folder)]) == 2
    said = capfd.readouterr().err
    assert f"step {STEPS} is done, and train.steps = {STEPS}" in said
    assert "Raise train.steps to continue." in said
    assert contents(folder) == before


def test_another_model_is_refused_by_the_field_that_differs(half, capfd):
    before = contents(half)
    assert main(["train", "--resume", str(half), "--model.layers", "3"]) == 2
    assert "model.layers = 3, was 2: its checkpoint holds another model" in capfd.readouterr().err
    assert contents(half) == before


def test_all_that_differs_is_told_at_once(half, capfd):
    words = ["--model.layers", "3", "--train.seed", "1", "--optimizer.name", "sgd", "--model.ffn", "32"]
    assert main(["train", "--resume", str(half), *words]) == 2
    said = capfd.readouterr().err
    assert all(f"\n  {name} = " in said for name in ("train.seed", "optimizer.name", "model.layers", "model.ffn"))
    assert "Leave them out" in said


def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_is_used(half):
    damaged = next(checkpoints(half)[HALF].glob("*.safetensors"))
    with open(damaged, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    code, output = shoal("train", "--resume", half, *ONE_RANK, "--train.steps", str(HALF))  # the damaged one had all
    assert code == 0, output
    assert "checkpoint refused:" in output and damaged.name in output
    assert f"resumed after step {HALF - 4}" in output
    assert [step for step, _, _ in curve(half)] == list(range(1, HALF + 1))
    assert HALF in checkpoints(half)
    assert any(path.name.startswith(f"set-aside-step-{HALF:08}") for path in (half / "checkpoints").iterdir())


def test_without_its_checkpoints_it_says_so(half, capfd):
    for path in checkpoints(half).values():
        shutil.rmtree(path)
    before = contents(half)
    assert main(["train", "--resume", str(half)]) == 2
    assert f"holds no good checkpoint, though step {STEPS} was done" in capfd.readouterr().err
    assert contents(half) == before


def test_one_that_was_killed_while_it_saved_a_step_again_can_resume(half):
    *older, path = checkpoints(half).values()
    shutil.copytree(path, path.with_name(f"set-aside-{path.name}-01234567"))
    path.rename(path.with_name(f".staging-{path.name}-01234567"))
    for each in older:
        shutil.rmtree(each)
    code, output = shoal("train", "--resume", half, *ONE_RANK)
    assert code == 0, output
    assert f"{path.name} was complete when its save was killed" in output
    assert f"resumed after step {HALF}" in output


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(corpus, pool, tmp_path, capfd):
    config = small_config(corpus, {"micro_batch": 2}, train={"steps": 3, "validate_every": 0})
    folder = new_run(config, tmp_path / "run")
    right = train_in(pool, config, tmp_path / "right")
    (folder / "metrics.jsonl").write_text((right / "metrics.jsonl").read_text().splitlines(keepends=True)[0] + "{torn")
    check_resume(config, check(config), folder)
    train_in(pool, config, folder, resume=True)
    assert curve(folder) == curve(right)


def test_the_run_keeps_the_config_that_it_was_started_with(survivor, base_config):
    folder, _ = survivor
    assert tomllib.loads((folder / "run.toml").read_text()) == tomllib.loads(base_config.read_text())
