"""File systems that only a command and its children see: a small disk to fill, a folder that is read-only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.launch.prefork import safe_environment

OWN_MOUNTS = "SHOAL_CHAOS_MOUNTS"  # environment variable of the restarted command: whether it may mount file systems


def own_mounts() -> bool:
    """Give this process a mount namespace of its own by restarting the `shoal` command; return whether it has one.

    It has none if that is not permitted, or if the caller is not the `shoal` command.
    """
    if OWN_MOUNTS in os.environ:
        return os.environ[OWN_MOUNTS] == "yes"
    words = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
    trial = [*words, "sh", "-c", 'd=$(mktemp -d) && mount -t tmpfs tmpfs "$d" && umount "$d" && rmdir "$d"']
    if shutil.which("unshare") is None or subprocess.run(trial, capture_output=True).returncode:
        return False
    if Path(sys.argv[0]).name not in ("shoal", "__main__.py"):  # called by other code
        return False
    os.environ[OWN_MOUNTS] = "yes"
    os.execvpe("unshare", [*words, sys.executable, "-m", "shoal", *sys.argv[1:]], safe_environment(os.environ))
    raise AssertionError("replaced by the above")


def mount(command: str) -> None:
    """Run a shell command that changes the file systems visible to this process and its children."""
    subprocess.run(["sh", "-c", command], check=True, capture_output=True)


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """Create a folder with a disk of ``size`` bytes, which only this process and its children see; remove it at the
    end."""
    folder.mkdir()
    mount(f"mount -t tmpfs -o size={size} tmpfs '{folder}'")
    try:
        yield
    finally:
        mount(f"umount -l '{folder}'")
    folder.rmdir()


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Fill the disk of a folder with one file; delete the file at the end."""
    filler = folder / "filler"
    with open(filler, "wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make a folder read-only for this process and its children until the end."""
    aside = folder.with_name(f"{folder.name}-read-only")
    aside.mkdir()
    # Where files are open for writing, no mount becomes read-only: the mount becomes so before its first use.
    mount(f"mount --bind '{folder}' '{aside}' && mount -o remount,bind,ro '{aside}'")
    mount(f"mount --move '{aside}' '{folder}'")
    try:
        yield
    finally:
        mount(f"umount -l '{folder}'")  # lazily: a process may be reading the folder
        aside.rmdir()
