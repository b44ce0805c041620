"""What a run of a trial has left in its folder, or has done so far."""

from __future__ import annotations

from pathlib import Path

from shoal.base.errors import UsageError
from shoal.base.files import read_json
from shoal.engine.checkpoint import CheckpointError
from shoal.engine.checkpoint.load import load_checkpoint
from shoal.engine.checkpoint.manifest import newest, read_manifest
from shoal.launch.supervisor import PROCESSES_FILE
from shoal.training.resilience.events import read_events
from shoal.training.resilience.heartbeat import read, record_path

# Allowed difference of a parameter after a run on another layout, relative to its tensor's largest element. In 32 bits
# and fewer, Adam amplifies rounding: an element whose gradients are all rounding is updated as much as any other.
ROUNDING = {"fp64": 1e-8}
ROUGH = 2e-3


def last_checkpoint(run: Path) -> Path | None:
    found = newest(run / "checkpoints")
    return Path(str(found.path)) if found else None


def compare_checkpoints(one: Path | None, other: Path | None, rounding: float | None) -> list[str]:
    """Describe the first difference of two checkpoints, if any.

    Args:
        rounding: allowed difference of a parameter, relative to its largest element; other tensors are not compared.
            None compares every bit of every tensor.
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
        a, b = (load_checkpoint(path, prefix="model.") for path in (one, other))
        for name in (name for name, value in a.items() if value.is_floating_point()):
            error = float((a[name] - b[name]).abs().max()) / (float(a[name].abs().max()) or 1.0)
            if error > rounding:
                return [f"{name} differs by {error:.1e} of its largest element"]
        return []
    except (CheckpointError, KeyError) as error:
        return [str(error)]


def steps_done(run: Path) -> int:
    """Return the steps that a live run has completed; -1 before it began."""
    try:
        scratch = Path(read_json(run / PROCESSES_FILE)["scratch"])
    except (UsageError, LookupError, TypeError):
        return -1
    record = read(record_path(scratch, 0))
    return -1 if record is None or record.begun < 0 else record.steps


def step_of_failure(run: Path) -> int:
    """Return the highest step at which a run recorded a failure; 0 if it failed before its first step."""
    return max((event.get("step", 0) for event in read_events(run) if event["event"] == "failure"), default=0)
