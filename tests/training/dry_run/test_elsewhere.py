"""A device's tensors and the host's do not mix in a step, of any layout: seen without such a device."""

import subprocess
import sys
from pathlib import Path

from tests.training.dry_run.elsewhere import CASES, PLANTED


def test_no_step_mixes_a_devices_tensors_with_the_hosts():
    """In a process of its own: a backend is registered for good."""
    command = [sys.executable, "-m", "tests.training.dry_run.elsewhere"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    said = dict(line.split(": ", 1) for line in ran.stdout.splitlines())
    assert set(said) == set(CASES), ran.stdout + ran.stderr
    assert "of the device's tensors and the host's" in said.pop(PLANTED)
    assert set(said.values()) == {"ok"}, ran.stdout
