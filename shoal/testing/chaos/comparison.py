"""What a run's folder says of how far the run is, and of how it ended beside another."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from shoal.base.boxes import Box, Piece
from shoal.engine.checkpoint import CheckpointError, list_checkpoints, load
from shoal.engine.checkpoint.manifest import DTYPES, read_manifest
from shoal.launch.supervisor import PROCESSES_FILE
from shoal.training.resilience.events import read_events
from shoal.training.resilience.heartbeat import read, record_path


def last(run: Path) -> Path | None:
    """The checkpoint at the end of a run."""
    found = list_checkpoints(run / "checkpoints")
    return Path(str(found[-1].path)) if found else None


def differences(one: Path | None, other: Path | None, rounding: float | None) -> list[str]:
    """What differs between two last states: any bit, or by more than so much of a tensor's largest element."""
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
        a, b = tensors(one), tensors(other)
        for name, value in a.items():
            if value.is_floating_point() and name.startswith("model."):
                scale = float(value.abs().max()) or 1.0
                if (apart := float((value - b[name]).abs().max()) / scale) > rounding:
                    found.append(f"{name} differs by {apart:.1e} of its largest")
        return found[:1]
    except (CheckpointError, KeyError) as error:
        return [str(error)]


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """All of a checkpoint, whole."""
    held = {
        name: torch.zeros(tensor.shape, dtype=DTYPES[tensor.dtype])
        for name, tensor in read_manifest(path).tensors.items()
    }
    load(path, {n: [Piece(tuple(t.shape), Box.whole(tuple(t.shape)), t)] for n, t in held.items()})
    return held


def done(run: Path) -> int:
    """Steps that a run that is alive has done; -1 before it began."""
    try:
        scratch = Path(json.loads((run / PROCESSES_FILE).read_text())["scratch"])
    except (OSError, ValueError):
        return -1
    record = read(record_path(scratch, 0))
    return -1 if record is None or record.begun < 0 else record.steps


def reached(run: Path) -> int:
    """The step that a run came to, by its failures; one before the first step has none."""
    steps = [event.get("step", 0) for event in read_events(run) if event["event"] == "failure"]
    return max(steps, default=0)
