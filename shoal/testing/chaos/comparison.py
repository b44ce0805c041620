"""Read from run folders how far a run came, and how its last state differs from another run's."""

from __future__ import annotations

import json
from pathlib import Path

from shoal.engine.checkpoint import CheckpointError
from shoal.engine.checkpoint.manifest import newest, read_manifest
from shoal.engine.checkpoint.whole import load_checkpoint
from shoal.launch.supervisor import PROCESSES_FILE
from shoal.training.resilience.events import read_events
from shoal.training.resilience.heartbeat import read, record_path


def last(run: Path) -> Path | None:
    """The last checkpoint of a run, if it has any."""
    found = newest(run / "checkpoints")
    return Path(str(found.path)) if found else None


def differences(one: Path | None, other: Path | None, rounding: float | None) -> list[str]:
    """Differences of two checkpoints, in words.

    Args:
        rounding: compare only parameters, each to this part of its largest element; None compares every bit.
    """
    if one is None or other is None or one.name != other.name:
        return [f"the last checkpoint is {other and other.name}, not {one and one.name}"]
    try:
        manifests = [read_manifest(path) for path in (one, other)]
        if manifests[0].extra.get("data") != manifests[1].extra.get("data"):
            return ["the corpus has changed since the undisturbed run"]
        first, second = (manifest.tensors for manifest in manifests)
        if rounding is None:
            differ = [name for name in first if first[name] != second.get(name)]
            return [f"{len(differ)} tensors of {len(first)} differ, the first is {differ[0]}"] if differ else []
        found = []
        a, b = (load_checkpoint(path, prefix="model.") for path in (one, other))
        for name, value in a.items():
            if value.is_floating_point():
                scale = float(value.abs().max()) or 1.0
                if (apart := float((value - b[name]).abs().max()) / scale) > rounding:
                    found.append(f"{name} differs by {apart:.1e} of its largest")
        return found[:1]
    except (CheckpointError, KeyError) as error:
        return [str(error)]


def done(run: Path) -> int:
    """Steps that a live run has completed; -1 before it began."""
    try:
        scratch = Path(json.loads((run / PROCESSES_FILE).read_text())["scratch"])
    except (OSError, ValueError):
        return -1
    record = read(record_path(scratch, 0))
    return -1 if record is None or record.begun < 0 else record.steps


def reached(run: Path) -> int:
    """The highest step at which a run recorded a failure; 0 if it failed before its first step."""
    steps = [event.get("step", 0) for event in read_events(run) if event["event"] == "failure"]
    return max(steps, default=0)
