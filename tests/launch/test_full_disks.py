"""Disks fill up in the middle of a run: it restarts, goes on and ends as if they had not."""

import os
import subprocess

import pytest

from shoal.engine.data.prepare import prepare
from shoal.spec.config import save_config
from shoal.training.resilience.events import read_events
from tests.trainings.forked import command
from tests.trainings.runs import ROOT, checkpoints, curve, same_bits
from tests.trainings.supervised import STEPS, config_of

IN_A_NAMESPACE = """
import ctypes, os, shutil, subprocess, sys
from pathlib import Path
from shoal.launch.local_launcher import start_rank_server
from shoal.launch.supervisor import Supervisor
from shoal.spec.config import load_config
from shoal.training.run_folder import new_run

place, copy, user, group = Path(os.environ["PLACE"]), Path(os.environ["COPY"]), os.getuid(), os.getgid()
NEW_MOUNTS, NEW_USER = 0x20000, 0x10000000
assert ctypes.CDLL(None).unshare(NEW_MOUNTS | (NEW_USER if user else 0)) == 0
if user:
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(text)
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
for disk in ("memory", "run"):
    (place / disk).mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", place / disk], check=True)
config = load_config(place / "config.toml")
folder = new_run(config, place / "run" / "run")
with start_rank_server(config, "cpu") as server:
    code = Supervisor(
        config, folder, "cpu", survivable=False, module="tests.trainings.faulty", server=server
    ).run()
shutil.copytree(folder, copy)
sys.exit(code)
"""


def test_full_disks_cost_nothing_but_the_saves_meanwhile(corpus, undisturbed, tmp_path):
    """The run folder's and the memory's fill up in step 8 with the loss of a rank, and have space again in step 10."""
    config = config_of(corpus, failover={"memory_every": 3, "memory_folder": str(tmp_path / "memory")})
    prepare(config.data)
    save_config(config, tmp_path / "config.toml")
    unshare = ("unshare", "--mount", *(() if os.getuid() == 0 else ("--map-root-user",)))
    if subprocess.run([*unshare, "mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here, not even in a namespace of its own")
    run, job = tmp_path / "copy", tmp_path / "job.py"
    job.write_text(IN_A_NAMESPACE)
    environment = {
        **os.environ, "PLACE": str(tmp_path), "COPY": str(run), "FULL": f"{tmp_path}/memory:{tmp_path}/run",
        "FAULT": "fill@8:1:B,free@10:0:B",
    }  # fmt: skip
    done = command([], environment, ROOT, script=str(job))
    said = done.communicate(timeout=120)[0]
    assert done.returncode == 0, said
    assert curve(run) == curve(undisturbed)
    assert same_bits(checkpoints(run)[STEPS], checkpoints(undisturbed)[STEPS]) and 8 not in checkpoints(run)
    assert "saving step 8 failed" in said and said.count("processes.json cannot be written: No space") == 1
    assert [event["event"] for event in read_events(run)] == ["failure", "restart", "recovered", "end"]
    assert read_events(run)[2]["step"] == 6 and "resumed after step 6, from memory" in said
    assert "Traceback" not in said, said
