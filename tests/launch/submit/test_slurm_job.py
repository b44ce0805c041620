"""A job of `shoal launch --on slurm`, run to its end by stand-ins for SLURM's programs that do as it does."""

import os
import signal
from pathlib import Path

from shoal.spec.config import save_config
from tests.trainings.forked import command
from tests.trainings.runs import DEADLINE, checkpoints, curve, logged, same_bits, shoal, wait_for
from tests.trainings.supervised import STEPS, config_of

SBATCH = """#!/bin/bash
# Runs the job, and runs it again as often as it has been requeued.
cp "$1" "$STATE/job"
export SLURM_JOB_ID=$$ SLURM_CPUS_PER_TASK=1 SLURM_RESTART_COUNT=0
(
    while :; do
        bash "$STATE/job" >> "$STATE/log" 2>&1
        code=$?
        echo $code >> "$STATE/codes"
        [ -e "$STATE/requeued" ] || break
        rm "$STATE/requeued"
        SLURM_RESTART_COUNT=$((SLURM_RESTART_COUNT + 1))
    done
    touch "$STATE/done"
) > /dev/null 2>&1 &
"""

SCONTROL = """#!/bin/bash
[ "$*" = "requeue $SLURM_JOB_ID" ] && touch "$STATE/requeued"
"""

SRUN = """#!/bin/bash
# A step, which the test starts: its tasks are forks, and pay for no imports.
shift # --kill-on-bad-exit=1
[ "$SRUN_CPUS_PER_TASK" = 1 ] || exit 98
printf '%s\\0' "$@" > "$STATE/words"
env -0 > "$STATE/asking"
mv "$STATE/asking" "$STATE/asked"
while [ ! -e "$STATE/answered" ]; do sleep 0.1; done
code=$(cat "$STATE/answered")
rm "$STATE/answered"
exit $code
"""


def run_step(state: Path, number: int, folder: Path) -> None:
    """A step of two nodes with one task each, as srun runs it. Those of the first all get SIGUSR1 in their third step,
    as if the time limit were near."""
    wait_for(lambda: (state / "asked").exists() or (state / "done").exists())
    assert (state / "asked").exists(), (state / "log").read_text()
    variables = dict(pair.split("=", 1) for pair in (state / "asked").read_text().split("\0") if pair)
    program, *words = (state / "words").read_text().split("\0")[:-1]
    assert program == "shoal"
    (state / "asked").unlink()
    step = {"STEP_ID": number, "STEP_NODELIST": "localhost", "NTASKS": 2, "STEP_TASKS_PER_NODE": "1(x2)", "LOCALID": 0}
    tasks = []
    for node in range(2):
        place = {f"SLURM_{name}": str(value) for name, value in {**step, "PROCID": node, "NODEID": node}.items()}
        tasks.append(command(words, {**variables, **place}, Path(variables["PWD"])))
    if number == 1:
        wait_for(lambda: logged(folder) >= 3 or tasks[0].poll() is not None)
        for task in tasks:
            task.send_signal(signal.SIGUSR1)
    said = [task.communicate(DEADLINE)[0] for task in tasks]
    (state / f"said-{number}").write_text("\n".join(said))
    (state / "answering").write_text(str(max(task.returncode % 256 for task in tasks)))
    (state / "answering").rename(state / "answered")


def test_a_job_is_warned_saved_requeued_and_resumed_with_the_same_bits(corpus, tmp_path, undisturbed, monkeypatch):
    state, folder = tmp_path / "state", tmp_path / "runs" / "one"
    state.mkdir()
    for name, text in {"sbatch": SBATCH, "scontrol": SCONTROL, "srun": SRUN}.items():
        (state / name).write_text(text)
        (state / name).chmod(0o755)
    for name, value in {"PATH": f"{state}:{os.environ['PATH']}", "STATE": state, "TMPDIR": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    save_config(config_of(corpus, failover={"restarts": 0}, train={"device": "cpu"}), tmp_path / "run.toml")
    code, said = shoal(
        "launch", tmp_path / "run.toml", "--on", "slurm", "--run-folder", folder, "--ranks-per-node", "1",
        "--testing.min_step_seconds", "0.3",
    )
    assert (code, said.splitlines()[-1]) == (0, "submitted by: sbatch one.sbatch"), said
    for number in (1, 2):
        run_step(state, number, folder)
    wait_for((state / "done").exists)
    assert (state / "codes").read_text().split() == ["75", "0"], (state / "log").read_text()
    assert "stopped after step" in (state / "said-1").read_text()
    assert "resumed after step" in (state / "said-2").read_text()
    assert curve(folder) == curve(undisturbed)
    assert same_bits(checkpoints(folder)[STEPS], checkpoints(undisturbed)[STEPS])
