"""The folder of a run: what is in it, and that no run ever writes into another's.

    run.toml        the config that the run was started with
    metrics.jsonl   one line per logged step; tensorboard/ beside it
    checkpoints/    step-00000100/ ...
    logs/           what each rank printed
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import NoReturn

from shoal.catalog import ModelShape
from shoal.checkpoint import CheckpointError, newest, verify
from shoal.checkpoint.load import check_model
from shoal.checkpoint.manifest import read_manifest
from shoal.config import RUN_FILE, RunConfig, load, save
from shoal.errors import UsageError
from shoal.layout import Layout
from shoal.precision.formats import FORMATS

RUNS = Path("runs")


def new_run(config: RunConfig, folder: Path | None) -> Path:
    """Make the folder of a new run and put its config into it. Of starts at the same time, each gets its own folder.

    Args:
        folder: where; None takes a fresh name under ``runs/``.

    Raises:
        UsageError: the folder is there and is not empty.
    """
    if folder is None:
        folder = _fresh_folder(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise FileExistsError
        save(config, folder / RUN_FILE, new=True)
    except FileExistsError:
        raise UsageError(
            f"--run-folder {folder} exists already, and a run never writes over what it did not make."
            f"\n  Go on with that run by --resume {folder}, or name another folder."
        ) from None
    return folder


def _fresh_folder(config: RunConfig) -> Path:
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.model.name}"
    for number in itertools.count():
        folder = RUNS / (stem + (f"-{number}" if number else ""))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:  # started within the same second
            continue
        return folder
    raise AssertionError("names do not run out")


def check_resume(config: RunConfig, shape: ModelShape, folder: Path) -> None:
    """Refuse to resume what would not continue the same run.

    The order of the samples follows from the step's number, so what that depends on must not change, nor what decides
    which tensors are kept; layout, number of steps, learning rate and the rest may.

    Args:
        shape: the model of ``config``.

    Raises:
        UsageError: naming the field, the run's value and the new one; or the folder holds no run, no checkpoint, or all
            the steps already.
    """
    if not (folder / RUN_FILE).is_file():
        raise UsageError(f"--resume {folder}: there is no run in it ({RUN_FILE} is missing).")
    first = load(folder / RUN_FILE)
    order = {
        "train.global_batch": lambda c: c.train.global_batch,
        "train.seed": lambda c: c.train.seed,
        **{f"data.{name}": (lambda c, name=name: getattr(c.data, name)) for name in _DATA_ORDER},
    }
    for name, value in order.items():
        if value(first) != value(config):
            _refuse(name, value(config), value(first), folder, "its data would not continue where it stopped")
    was, now = first.train.precision, config.train.precision
    for what in ("storage", "state"):
        if getattr(FORMATS[was], what) != getattr(FORMATS[now], what):
            kept = {"storage": "weights", "state": "optimizer's states"}[what]
            _refuse("train.precision", now, was, folder, f"it keeps its {kept} in another dtype")
    was, now = (c.float8 if _delayed(c) else None for c in (first, config))
    if was != now:
        _refuse("float8", now, was, folder, "the history of largest numbers would be another")
    if first.optimizer.name != config.optimizer.name:
        _refuse("optimizer.name", config.optimizer.name, first.optimizer.name, folder, "they keep different states")
    _check_replicas(first.parallel, config.parallel, folder)
    _check_checkpoint(config, shape, folder)


def _delayed(config: RunConfig) -> bool:
    return FORMATS[config.train.precision].products == "float8" and config.float8.amax == "delayed"


def _check_replicas(was: Layout, now: Layout, folder: Path) -> None:
    """A relaxed run goes on with the same method and replicas, each of which has something of its own."""
    if was.sync == now.sync == "all-reduce":
        return
    for name in ("sync", "dp", "tp", "pp"):
        if getattr(was, name) != getattr(now, name):
            what = (getattr(now, name), getattr(was, name))
            _refuse(f"parallel.{name}", *what, folder, "its replicas keep states of their own")


def _check_checkpoint(config: RunConfig, shape: ModelShape, folder: Path) -> None:
    """What the newest checkpoint's manifest tells. A damaged one is left to the ranks, which take the one before."""
    found = newest(folder / "checkpoints")
    if found is None:
        raise CheckpointError(
            f"--resume {folder}: it holds no good checkpoint (the run stopped before its first).\n  Start a new run."
        )
    try:
        extra = read_manifest(found.path).extra
        if found.step >= config.train.steps:
            verify(found.path)  # if it is damaged, steps are left to do
    except CheckpointError:
        return
    check_model(found.path, extra.get("model"), shape.model_dump(mode="json"))
    check_steps_left(folder, found.step, config.train.steps)


def check_steps_left(folder: Path, done: int, steps: int) -> None:
    """Refuse to resume what has all its steps.

    Raises:
        UsageError: ``done`` is not below ``steps``.
    """
    if done >= steps:
        raise UsageError(
            f"--resume {folder}: step {done} is done, and train.steps = {steps}.\n  Raise train.steps to go on."
        )


def _refuse(name: str, now: object, was: object, folder: Path, why: str) -> NoReturn:
    raise UsageError(
        f"{name} = {now!r}, but the run in {folder} was started with {was!r}: {why}."
        f"\n  Leave {name} out, or start a new run."
    )


_DATA_ORDER = ("source", "paths", "field", "dataset", "tokenizer", "sequence_length", "document_mask",
               "validation_fraction")
