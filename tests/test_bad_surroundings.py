"""What the system refuses, a port, a folder, a disk, is one clear message too: commands as processes of their own,
forks where a new interpreter shows nothing more."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.place import Place
from tests.trainings.forked import command

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return Place(tmp_path_factory.mktemp("bad"))


def test_a_port_in_use(place):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        words = ["train", str(place.toml), "--run-folder", str(place.folder / "port")]
        ran = command(words, os.environ | rank, ROOT)
        said, _ = ran.communicate(timeout=120)
    assert ran.returncode == 2, said
    assert f"MASTER_PORT = {port} is in use" in said and "Traceback" not in said
    assert not (place.folder / "port").exists()


AS_NOBODY = """
import os, sys
from shoal.cli.main import main

if os.getuid() == 0:
    os.setgroups([])
    os.setuid(65534)
sys.exit(main(["train", "--data.source", "synthetic", "--run-folder", "{folder}"]))
"""


def test_a_folder_of_somebody_else(tmp_path):
    """Root may write anywhere, so that the command runs as nobody."""
    folder, script = Path("/var/shoal-has-no-business-here"), tmp_path / "as_nobody.py"
    script.write_text(AS_NOBODY.format(folder=folder))
    ran = command([], os.environ, ROOT, script=str(script))
    said, _ = ran.communicate(timeout=120)
    assert ran.returncode == 2, said
    assert f"--run-folder {folder} cannot be written: Permission denied" in said and "Traceback" not in said


FULL = "{ head -c 1M /dev/zero > filler 2> /dev/null || true; }"
READ_ONLY = "mount -o remount,ro ."
DISKS = {
    "small": (
        "true", ("--run-folder", "disk/run"), ("checkpoints: 1 of ", "kB free", "checkpoint.keep")),
    "full for the run": (
        FULL, ("--run-folder", "disk/run", "--checkpoint.folder", "kept"),
        ("--run-folder {}/disk/run cannot be written: No space left on device", "Free space")),
    "full for checkpoints": (
        FULL, ("--run-folder", "run", "--checkpoint.folder", "disk/kept"),
        ("checkpoints cannot be written into {}/disk/kept: No space", "checkpoint.folder")),
    "read-only": (
        READ_ONLY, ("--run-folder", "run", "--checkpoint.folder", "disk/kept"),
        ("checkpoints cannot be written into {}/disk/kept: Read-only file system", "checkpoint.folder")),
    "full memory": (
        FULL, ("--run-folder", "run", "--failover.memory_every", "1", "--failover.memory_folder", "disk"),
        ("failover.memory_folder = '{}/disk' cannot be written: No space", "failover.memory_every = 0")),
    "small memory": (
        "true", ("--run-folder", "run", "--failover.memory_every", "1", "--failover.memory_folder", "disk"),
        ("failover.memory_every: two copies", "need ", "kB in {}/disk", "has 197 kB free", "failover.memory_folder")),
}  # fmt: skip
"""What is done on a disk of 192 kB, the words of a run, and what is said of them."""

ON_DISKS = """
import io, json, subprocess, sys
from contextlib import redirect_stderr
from pathlib import Path
from shoal.cli.main import main

found = {}
for name, (folder, script, words) in json.loads(Path(sys.argv[1]).read_text()).items():
    disk = Path(folder, "disk")
    mount = f"mount -t tmpfs -o size=192k tmpfs . && cd '{disk}' && {script}"
    subprocess.run(["sh", "-c", mount], cwd=disk, check=True)
    with redirect_stderr(io.StringIO()) as said:
        found[name] = main(words), said.getvalue()
    subprocess.run(["umount", disk], check=True)
Path(sys.argv[2]).write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def on_disks(place, tmp_path_factory) -> dict[str, tuple[int, str, Path]]:
    """What each of `DISKS` comes to, in a process with mounts of its own: the code, what is said and the folder."""
    unshare = ("unshare", "--mount", *(() if os.getuid() == 0 else ("--map-root-user",)))
    place_of, cases = {}, {}
    for name, (script, options, _) in DISKS.items():
        place_of[name] = folder = tmp_path_factory.mktemp("disk")
        (folder / "disk").mkdir()
        words = [w if w.startswith("-") or w.isdigit() else str(folder / w) for w in options]
        cases[name] = str(folder), script, ["train", str(place.toml), *words]
    if subprocess.run([*unshare, "mount", "-t", "tmpfs", "tmpfs", folder / "disk"], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here, not even in a namespace of its own")
    told = tmp_path_factory.mktemp("told")
    (told / "cases.json").write_text(json.dumps(cases))
    python = (sys.executable, "-c", ON_DISKS, told / "cases.json", told / "found.json")
    subprocess.run([*unshare, *python], cwd=ROOT, timeout=120, check=True)
    return {name: (*found, place_of[name]) for name, found in json.loads((told / "found.json").read_text()).items()}


@pytest.mark.parametrize("name", DISKS)
def test_a_disk_that_cannot_be_written(name, on_disks):
    """Nothing is left behind, so that the same run folder may be named again."""
    code, said, folder = on_disks[name]
    assert code == 2, said
    assert said.startswith("shoal: error: ")
    assert all(text.format(folder) in said for text in DISKS[name][2]), said
    assert [path.name for path in folder.iterdir()] == ["disk"]


def test_a_typo(place):
    file = place.write("typo.toml", "[optimiser]\nname = 'sgd'")
    ran = subprocess.run([sys.executable, "-m", "shoal", "train", file], cwd=ROOT, timeout=120, text=True,
                         capture_output=True, check=False)  # fmt: skip
    assert ran.returncode == 2
    assert ran.stderr == f"shoal: error: {file}: there is no key 'optimiser'; did you mean 'optimizer'?\n"
