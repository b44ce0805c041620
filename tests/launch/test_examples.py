"""The files for SLURM and Kubernetes do what they say, as far as that can be seen without a cluster."""

import os
import signal
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from shoal.cli.main import main
from shoal.training.stop import PREEMPTED
from tests.trainings.runs import ROOT

SBATCH, MANIFEST = ROOT / "examples" / "slurm.sbatch", ROOT / "examples" / "kubernetes.yaml"

SRUN = """#!/bin/bash
echo "$@" >> "$SAID"
code=$(sed -n "$(wc -l < "$SAID")p" "$CODES")
exit "${code:-99}"
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> "$SAID"
"""


def run(folder: Path, codes: list[int]) -> tuple[int, list[str]]:
    """The batch script with an srun that ends with these codes in turn; its exit code, and what it called."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "codes").write_text("".join(f"{code}\n" for code in codes))
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}", "SAID": str(folder / "said"), "CODES": str(folder / "codes"),
        "CONFIG": "run.toml", "RUN": "runs/one", "SLURM_JOB_ID": "7", "ATTEMPTS": "3",
    }
    done = subprocess.run(["bash", SBATCH], env=environment, capture_output=True, text=True, timeout=20)
    assert done.stderr == ""
    return done.returncode, (folder / "said").read_text().splitlines()


STEP = "--kill-on-bad-exit=1 shoal train run.toml --run-folder runs/one --auto-resume"


@pytest.mark.parametrize(("codes", "code", "called"), [
    ([0], 0, [STEP]),
    ([2], 2, [STEP]),
    ([PREEMPTED], PREEMPTED, [STEP, "scontrol requeue 7"]),
    ([128 + signal.SIGUSR1], 128 + signal.SIGUSR1, [STEP, "scontrol requeue 7"]),
    ([137, 0], 0, [STEP, STEP]),
    ([137, 1, PREEMPTED], PREEMPTED, [STEP, STEP, STEP, "scontrol requeue 7"]),
    ([137, 137, 137], 137, [STEP, STEP, STEP]),
])
def test_the_batch_script_goes_on_where_that_helps(codes, code, called, tmp_path):
    assert run(tmp_path, codes) == (code, called)


def test_the_batch_script_is_asked_to_stop_in_time():
    lines = SBATCH.read_text().splitlines()
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH "))
    asked, seconds = options["signal"].split("@")
    assert asked == "USR1" and int(seconds) >= 60 and "requeue" in options and options["open-mode"] == "append"


def test_the_manifest_says_what_shoal_says():
    job = yaml.safe_load(MANIFEST.read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    pod = job["spec"]["template"]["spec"]
    [train] = pod["containers"]
    assert pod["restartPolicy"] == "Never"  # which a podFailurePolicy needs
    actions = {
        tuple(rule["onExitCodes"]["values"]): rule["action"]
        for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    }
    assert actions == {(2,): "FailJob", (PREEMPTED,): "Ignore"}
    assert all(rule["onExitCodes"]["containerName"] == train["name"]
               for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule)
    assert {mount["name"] for mount in train["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["terminationGracePeriodSeconds"] >= 60


def test_their_commands_are_commands(tmp_path, capfd):
    """The words of both, with the config's name replaced by one that is not there: that alone is wrong with them."""
    [train] = yaml.safe_load(MANIFEST.read_text())["spec"]["template"]["spec"]["containers"]
    for words in (train["command"], STEP.partition(" ")[2].split()):
        assert words[0] == "shoal"
        assert main([str(tmp_path / "none.toml") if word.endswith(".toml") else word for word in words[1:]]) == 2
        assert "none.toml" in capfd.readouterr().err


def test_the_image_copies_what_an_installation_needs():
    """Without Docker: what is copied is there, and not ignored."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == kept and all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert copied == {"pyproject.toml", "constraints.txt", "shoal", project["readme"], *project["license-files"]}
