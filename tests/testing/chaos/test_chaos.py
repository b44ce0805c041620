"""`shoal chaos`: moments are drawn fairly, trials pass where nothing is lost, and a trial that should fail does."""

import os
import random
import re
import signal
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.base.polling import wait_until
from shoal.cli.main import main
from shoal.launch.worker_pool import Pool
from shoal.spec.config import RunConfig, save_config
from shoal.testing.chaos.chaos import Chaos, Trial
from shoal.testing.chaos.fault_injection import COMMITTING, STAGING, START, damage
from shoal.testing.chaos.fault_types import KINDS, NEED_MOUNTS
from shoal.testing.chaos.outcome import ROUGH, compare_checkpoints, last_checkpoint, steps_done
from shoal.testing.chaos.run import chaos as chaos_in
from shoal.testing.chaos.run import count_by_fault
from tests.trainings.runs import shoal
from tests.trainings.supervised import STEPS, config_of


@pytest.fixture(scope="module")
def chaos(corpus, rank_server, tmp_path_factory) -> Chaos:
    """Ten steps on two replicas, with the output in a file."""
    folder = tmp_path_factory.mktemp("chaos")
    config = config_of(corpus, failover={"stragglers_every": 2})
    log = folder / "output.log"
    log.touch()
    return Chaos(config, folder, rank_server, log)


@given(
    name=st.sampled_from(sorted(set(KINDS) - NEED_MOUNTS - {"kill-supervisor", "preempt"})),
    seed=st.integers(0, 10**6),
)
def test_every_moment_that_is_drawn_comes(chaos, name, seed):
    """A rank, a step and an action that the run has; what needs a checkpoint comes when there is one."""
    kind = KINDS[name]
    for planted in chaos.draw(name, random.Random(seed)):
        assert 0 <= planted.rank < chaos.ranks and 0 <= planted.step < STEPS and 0 <= planted.fraction <= 1
        if planted.op in (STAGING, COMMITTING):
            assert planted.step < STEPS - chaos.config.checkpoint.every  # another save follows
        elif planted.op != START:
            assert planted.nth < chaos.actions[0].count(planted.op)
        if kind.late:
            assert planted.step >= 2 * chaos.config.checkpoint.every


@pytest.mark.parametrize("name", ["kill-staging", "kill-committing", "nan", "bit-checkpoint", "missing-file",
                                  "bit-shard", "returned-node", "slow", "preempt"])
def test_a_trial_passes(name, chaos, capfd):
    """Faults that a rank inflicts on itself or its files; `test_supervisor` has the others. A truncated checkpoint is
    found as one with a wrong bit is, and a returned node was lost before."""
    try:
        trial = chaos.trial(name, random.Random(3), 0)
    finally:
        out, err = capfd.readouterr()
        chaos.log.write_text(chaos.log.read_text() + out + err)
    judged_without = {f"no message matches {KINDS[name].message!r}"}  # the log was filled only now
    assert set(trial.problems) <= judged_without, trial.problems
    if KINDS[name].effect not in ("flip", "truncate", "remove", "slow"):  # which rank 0 says, where the server began
        assert _says(KINDS[name].message, err)


def _says(pattern: str, said: str) -> bool:
    return any(re.search(pattern.replace("RANK", rank), said) for rank in ("0", "1"))


def test_another_last_state_is_found(chaos, tmp_path):
    good = last_checkpoint(chaos.reference)
    assert compare_checkpoints(good, good, None) == compare_checkpoints(good, good, ROUGH) == []
    assert compare_checkpoints(good, None, None) == [f"the last checkpoint is None, not {good.name}"]
    other = chaos.folder / "other"
    changed = chaos.config.model_copy(update={"train": chaos.config.train.model_copy(update={"seed": 1})})
    same, chaos.config = chaos.config, changed
    try:
        assert chaos._supervise(other) == 0
    finally:
        chaos.config = same
    for rounding in (None, ROUGH):
        assert "differ" in compare_checkpoints(good, last_checkpoint(other), rounding)[0]


def test_a_request_to_stop_ends_the_trials_and_not_only_one(chaos):
    folder = chaos.folder / "asked"

    def ask() -> None:
        wait_until(lambda: steps_done(folder) >= 1, 300)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=ask)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        chaos._supervise(folder)
    thread.join()


def test_a_process_that_outlives_its_run_is_found(chaos):
    with Pool(1, server=chaos.server) as pool:
        pool.map(abs, [-1])
        trial = Trial("exit-0", "")
        chaos._judge(trial, KINDS["exit-0"], chaos.reference, "", 0)
        assert "1 ranks still run" in trial.problems
    trial = Trial("exit-0", "")
    chaos._judge(trial, KINDS["exit-0"], chaos.reference, "", 0)
    assert not any("still run" in problem for problem in trial.problems)


@pytest.mark.parametrize("how", ["flip", "truncate", "remove"])
def test_damage_is_done_once(how, tmp_path):
    file, content = tmp_path / "file", bytes(range(256))
    file.write_bytes(content)
    assert damage([file], how, random.Random(1)) == file
    if how == "remove":
        assert not file.exists()
    elif how == "truncate":
        assert content.startswith(file.read_bytes()) and file.stat().st_size < 256
    else:
        assert sum((a ^ b).bit_count() for a, b in zip(content, file.read_bytes(), strict=True)) == 1


def test_the_table_counts():
    trials = [
        Trial("stop", "", [], [1, 2], [3.0, 5.0]), Trial("stop", "", ["bad"], [6], [4.0], in_process=1),
        Trial("slow", ""),
    ]
    assert count_by_fault(trials) == [
        ("stop", "2", "1", "3.0", "6", "1 of 3", "3.0", "4.0", "5.0", "5.0"),
        ("slow", "1", "1", "-", "-", "-", "-", "-", "-", "-"),
        ("all", "3", "2", "3.0", "6", "1 of 3", "3.0", "4.0", "5.0", "5.0"),
    ]


@pytest.mark.parametrize(("words", "says"), [
    (["--faults", "kil-forward"], "--faults kil-forward: no such fault; did you mean 'kill-forward'?"),
    (["--out", "page.pdf"], "page.pdf"),
    (["--trials", "0"], "trials"),
    (["--parallel.tp", "3"], "parallel.tp = 3 does not divide"),
    (["--parallel.sync", "hogwild", "--parallel.zero", "0"], "parallel.sync = 'hogwild': a stop or a lost rank"),
])
def test_what_cannot_be_is_refused(words, says, corpus, tmp_path, capfd):
    save_config(config_of(corpus), tmp_path / "run.toml")
    assert main(["chaos", str(tmp_path / "run.toml"), *words]) == 2
    assert says in capfd.readouterr().err


def test_a_folder_that_cannot_be_made_is_one_error_in_python_too(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="not a directory"):
        chaos_in(RunConfig(), faults="exit-0", folder=tmp_path / "file" / "x")


@pytest.fixture(scope="module")
def commanded(corpus, tmp_path_factory) -> tuple[int, str, str, str]:
    """`shoal chaos` of four faults, or four times of one if no disk can be mounted: exit code, output, page and log."""
    folder = tmp_path_factory.mktemp("command")
    save_config(config_of(corpus, train={"steps": 6}, checkpoint={"every": 2}), folder / "run.toml")
    faults = ",".join(["exit-0", *sorted(NEED_MOUNTS)])
    words = ["--trials", "4", "--faults", faults, "--folder", folder / "all", "--out", folder / "page.html"]
    code, said = shoal("chaos", folder / "run.toml", *words)
    log = folder / "all" / "output.log"
    assert (folder / "page.html").exists(), f"it ended with code {code}: {said}\n{log.exists() and log.read_text()}"
    return code, said, (folder / "page.html").read_text(), log.read_text()


def test_the_command(commanded):
    """Four trials, the table, the page, and a log without warnings, such as runpy's of modules imported before."""
    code, said, page, log = commanded
    assert code == 0, said
    assert said.count("passed") == 4 and "exit-0" in said
    assert "4 of 4 faults survived" in page
    assert "restart" in log and "Warning" not in log


def test_a_disk_that_is_full_and_a_folder_that_cannot_be_written(commanded):
    """Real ones, while it trains: it ends and says so, and goes on when there is room."""
    code, said, *_ = commanded
    if "no permission to mount file systems" in said:
        pytest.skip("no file system can be mounted here, not even in a namespace of its own")
    assert code == 0, said
    assert all(re.search(rf"{name}.*passed", said) for name in NEED_MOUNTS), said
