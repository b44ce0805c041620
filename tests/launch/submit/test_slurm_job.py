"""A job of `shoal launch --on slurm`, run to its end by stand-ins for SLURM's programs that do as it does."""

import os
import sys
from pathlib import Path

from shoal.spec.config import save_config
from tests.trainings.runs import checkpoints, curve, logged, same_bits, shoal, wait_for
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
# A step of two nodes with one task each, which all get SIGUSR1 when the time limit is near.
shift # --kill-on-bad-exit=1
[ "$SRUN_CPUS_PER_TASK" = 1 ] || exit 98
echo >> "$STATE/steps"
export SLURM_STEP_ID=$(wc -l < "$STATE/steps") SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2
export SLURM_STEP_TASKS_PER_NODE='1(x2)' SLURM_LOCALID=0
for node in 0 1; do
    SLURM_PROCID=$node SLURM_NODEID=$node "$@" &
    tasks+=($!)
done
while kill -0 "${tasks[@]}" 2> /dev/null; do
    if [ -e "$STATE/near" ]; then
        rm "$STATE/near"
        kill -USR1 "${tasks[@]}"
    fi
    sleep 0.1
done
most=0
for task in "${tasks[@]}"; do
    wait "$task"
    code=$?
    [ $code -gt $most ] && most=$code
done
exit $most
"""


def test_a_job_is_warned_saved_requeued_and_resumed_with_the_same_bits(corpus, tmp_path, undisturbed, monkeypatch):
    state, folder = tmp_path / "state", tmp_path / "runs" / "one"
    state.mkdir()
    programs = {"sbatch": SBATCH, "scontrol": SCONTROL, "srun": SRUN,
                "shoal": f'#!/bin/sh\nexec {sys.executable} -m shoal "$@"\n'}
    for name, text in programs.items():
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
    done: Path = state / "done"
    wait_for(lambda: done.exists() or logged(folder) >= 3)
    (state / "near").touch()
    wait_for(done.exists)
    assert (state / "codes").read_text().split() == ["75", "0"], (state / "log").read_text()
    assert "resumed after step" in (state / "log").read_text()
    assert curve(folder) == curve(undisturbed)
    assert same_bits(checkpoints(folder)[STEPS], checkpoints(undisturbed)[STEPS])
