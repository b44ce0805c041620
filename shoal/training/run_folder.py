"""Run folder: its content, and checks that no run writes into another run's folder.

    run.toml        config that the run was started with, with absolute paths
    tokenizer.json  copy of its tokenizer
    metrics.jsonl   one line per logged step; tensorboard/ beside it
    events.jsonl    failures, restarts and recoveries, what each resume changed, and the effective training time
    checkpoints/    step-00000100/ ...
    logs/           output of each rank
"""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path

import tomli_w

from shoal.base.addresses import AnyPath, to_path
from shoal.base.errors import UsageError
from shoal.base.files import expanded, write_atomically
from shoal.base.section import plain
from shoal.base.terminal import quote
from shoal.engine.checkpoint import CheckpointError, newest, verify
from shoal.engine.checkpoint.manifest import list_interrupted, read_manifest
from shoal.engine.data.chat import TEMPLATE_FILES
from shoal.engine.optim.schedule import learning_rate
from shoal.engine.own.definition import PICKLED
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RUN_FILE, RUNS, RunConfig, load_config, suggest_run
from shoal.training.records.metrics import read_metrics
from shoal.training.resilience.events import read_events
from shoal.training.resilience.host_memory_dir import run_dir
from shoal.training.resilience.memory_slot import newest_step

MAY_CHANGE = (
    "the layout, train.steps, train.precision, the optimizer's numbers, and settings that do not affect the results"
)

Difference = tuple[str, object, object, str]
"""Field, new value, value of the run, and reason why it may not change."""


def new_run(config: RunConfig, folder: Path | None) -> Path:
    """Create the folder of a new run and write its config into it. Concurrent starts get separate folders.

    Args:
        folder: None creates a new name under ``runs/``.

    Raises:
        UsageError: the folder exists and is not empty.
    """
    folder = folder or _fresh_folder(config)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_free(folder):
            raise FileExistsError
        if config.model.module.endswith(PICKLED):
            shutil.copyfile(config.model.module, folder / f"model{PICKLED}")
            config = config.replace(model={"module": str(folder / f"model{PICKLED}")})
        write_atomically(folder / RUN_FILE, tomli_w.dumps(plain(with_absolute_paths(config))), new=True)
        if config.data.tokenizer != "bytes":
            own = expanded(config.data.tokenizer, "data.tokenizer")
            shutil.copyfile(own, folder / TOKENIZER_FILE)
            for beside in TEMPLATE_FILES:
                if (own.parent / beside).is_file():
                    shutil.copyfile(own.parent / beside, folder / beside)
    except FileExistsError:
        raise taken(folder) from None
    except OSError as error:
        raise UsageError(
            f"--run-folder {folder} cannot be written: {error.strerror}.\n  Name a folder that can."
        ) from None
    return folder


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the config with absolute paths, so that a run continues from any folder."""
    data, kept, weights = config.data, config.checkpoint, config.model.weights
    return config.replace(
        model={"weights": weights and Path(_absolute(str(weights))), "module": _absolute(config.model.module)},
        data={
            "paths": tuple(map(_absolute, data.paths)),
            "mixture": {
                name: source.model_copy(update={"paths": tuple(map(_absolute, source.paths))})
                for name, source in data.mixture.items()
            },
            "validation": {name: _absolute(path) for name, path in data.validation.items()},
            "cache": Path(_absolute(str(data.cache))),
            "tokenizer": data.tokenizer if data.tokenizer == "bytes" else _absolute(data.tokenizer),
        },
        checkpoint={"folder": _absolute(kept.folder)},
        failover={"memory_folder": config.failover.memory_folder.absolute()},
    )


def _absolute(path: str) -> str:
    return path if not path or "://" in path or path.startswith("~") else os.path.abspath(path)


def with_own_tokenizer(config: RunConfig, folder: Path) -> RunConfig:
    """Return the config with the run's copy of the tokenizer, if its file has been moved."""
    name, own = config.data.tokenizer, folder / TOKENIZER_FILE
    if name == "bytes" or expanded(name, "data.tokenizer").is_file() or not own.is_file():
        return config
    return config.replace(data={"tokenizer": str(own)})


def list_changes(folder: Path, config: RunConfig) -> dict[str, object]:
    """Return the fields in which a config differs from the one that the run was started with, with the new values.

    A definition that was written for this start alone has another file each time.
    """
    first, now = (plain(each) for each in (load_config(folder / RUN_FILE), with_absolute_paths(config)))
    return {
        f"{section}.{name}": value for section, values in now.items() for name, value in values.items()
        if first[section].get(name) != value and not (name == "module" and value.endswith(PICKLED))
    }


def describe_changes(folder: Path, changed: Mapping[str, object]) -> Iterator[str]:
    """Yield what a resume changes, and what the one before had changed: that is not remembered.

    Args:
        changed: of `list_changes`; not yet among the events.
    """
    if changed:
        yield f"changed from {folder / RUN_FILE}: {_listed(changed)}"
    resumes = (event.get("changed") for event in reversed(read_events(folder)) if event["event"] == "resumed")
    before = next((each for each in resumes if isinstance(each, dict)), {})
    if forgotten := {name: value for name, value in before.items() if name not in changed}:
        yield f"not given again, so {folder / RUN_FILE} counts; the last start had: {_listed(forgotten)}"


def describe_rate(folder: Path, config: RunConfig, step: int) -> Iterator[str]:
    """Yield a line if the learning rate jumps after a step, as that of a cosine does if the run becomes longer.

    The newest record up to that step is compared with what the config gives for the step of the record.
    """
    last = next((record for record in reversed(read_metrics(folder)) if record.step <= step), None)
    if config.model.module or last is None:
        return
    now, then = (learning_rate(of, config.train.steps, config.optimizer) for of in (step, last.step - 1))
    if then != last.learning_rate and not last.learning_rate / 1.5 < then < last.learning_rate * 1.5:
        yield f"the learning rate is {now:.1e} in step {step + 1}, after {last.learning_rate:.1e} in step {last.step}"


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {value!r}" for name, value in values.items())


def resume_command(folder: Path, config: RunConfig) -> str:
    """Return the command that resumes a run with the same number of steps and settings of the optimizer."""
    words = ["shoal", "train", "--resume", str(folder)]
    for name, value in list_changes(folder, config).items():
        if name.startswith(("train.steps", "optimizer.")) and value != {}:  # no option empties a table
            pairs = [part for pair in value.items() for part in pair] if isinstance(value, dict) else value
            words += [f"--{name.replace('_', '-')}", *map(str, pairs if isinstance(pairs, list) else [value])]
    return shlex.join(words)


def is_free(folder: Path) -> bool:
    """Return whether a new run may use this folder: it does not exist or is empty."""
    return not (any(folder.iterdir()) if folder.is_dir() else os.path.lexists(folder))


def taken(folder: Path) -> UsageError:
    """Return the error about a run folder that another run, or something else, has taken."""
    remedy = f"Continue that run with --resume {quote(folder)}, or name" if (folder / RUN_FILE).is_file() else "Name"
    return UsageError(
        f"--run-folder {folder} exists already, and a run never overwrites files that it did not make."
        f"\n  {remedy} another folder."
    )


def reject_links(folder: Path) -> None:
    """Reject a run folder in which a file or folder that shoal writes is a link, which may lead to files of others.

    Raises:
        UsageError: naming the link.
    """
    for path in (*(folder / name for name in WRITTEN), *(folder / "logs").glob("*")):
        if path.is_symlink():
            mend = "Set checkpoint.folder instead" if path.name == "checkpoints" else "Remove it"
            raise UsageError(
                f"{path} is a symbolic link, and a run writes through none.\n  {mend}, or name another run folder."
            )


WRITTEN = ("metrics.jsonl", "events.jsonl", "processes.json", "checkpoints", "logs", "tensorboard", "profile",
           "histograms", "wandb")  # fmt: skip


def _fresh_folder(config: RunConfig) -> Path:
    stem, number = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.model.title}", 0
    while True:
        folder = RUNS / (stem + (f"-{number}" if number else ""))
        try:
            folder.mkdir(mode=0o700, parents=True)
            return folder
        except FileExistsError:  # another run started within the same second
            number += 1


def check_resume(config: RunConfig, shape: ModelShape, folder: Path, *, again: bool = False) -> None:
    """Reject a config that would not continue the same run.

    Settings that determine the order of samples or the saved tensors must not change; layout, number of steps, learning
    rate and others may.

    Args:
        again: whether the run is restarted rather than resumed on request: it may have saved nothing or have done all
            its steps.

    Raises:
        UsageError: fields differ (the message names each with both values), or the folder has no run, no checkpoint or
            all steps already.
    """
    if not (folder / RUN_FILE).is_file():
        raise UsageError(f"--resume {folder}: not the folder of a run ({RUN_FILE} is missing).{suggest_run(folder)}")
    first = load_config(folder / RUN_FILE)
    found = [*_differences(first, config), *_model_differences(config, folder, shape)]
    if found:
        lines = "".join(f"\n  {name} = {now!r}, was {was!r}: {why}" for name, now, was, why in found)
        it = "it" if len(found) == 1 else "them"
        raise UsageError(
            f"--resume {folder}: this run was started with another config:{lines}"
            f"\n  Leave {it} out, or start a new run. What may change: {MAY_CHANGE}."
            + ("" if config.model.module else "\n  A new run can begin with its weights: "
               f"shoal export hf {quote(folder)} --out MODEL, then --model.weights MODEL")
        )
    if not again:
        _check_checkpoint(config, folder)


def _differences(first: RunConfig, config: RunConfig) -> Iterator[Difference]:
    """Yield forbidden differences between the config of the run and the one to continue with."""
    order: dict[str, Callable[[RunConfig], object]] = {
        "train.global_batch": lambda c: c.train.global_batch,
        "train.seed": lambda c: c.train.seed,
        "data.source": lambda c: c.data.reads,
        "data.mixture": lambda c: {
            name: source.model_dump(exclude={"paths", "source"}, exclude_defaults=True)
            for name, source in c.data.mixture.items()
        },
        **{f"data.{name}": attrgetter(f"data.{name}") for name in _DATA_ORDER},
    }
    for name, value in order.items():
        if value(first) != value(config):
            yield name, value(config), value(first), "its data would not continue where it stopped"
    if _absolute(first.checkpoint.folder) != _absolute(config.checkpoint.folder):
        yield ("checkpoint.folder", config.checkpoint.folder, first.checkpoint.folder,
               f"its checkpoints are in this folder; after moving them, change it in {RUN_FILE} of the run")
    was, now = (str(each.model.weights or "") for each in (first, config))
    if _absolute(was) != _absolute(now):
        yield "model.weights", now, was, "it has the weights of its checkpoint"
    if first.optimizer.name != config.optimizer.name:
        yield "optimizer.name", config.optimizer.name, first.optimizer.name, "they keep different states"
    if not first.parallel.sync == config.parallel.sync == "all-reduce":
        for name in ("sync", "dp", "tp", "pp"):  # method and replicas determine per-replica states
            was, now = getattr(first.parallel, name), getattr(config.parallel, name)
            if was != now:
                yield f"parallel.{name}", now, was, "its replicas keep states of their own"


def get_checkpoint_folder(config: RunConfig, folder: Path) -> AnyPath:
    return to_path(config.checkpoint.folder) if config.checkpoint.folder else folder / "checkpoints"


MOST = 3  # elements of a list that a difference shows


def _model_differences(config: RunConfig, folder: Path, shape: ModelShape) -> Iterator[Difference]:
    """Yield differences between the model of the newest checkpoint and the one to continue with."""
    found = newest(get_checkpoint_folder(config, folder))
    try:
        saved = read_manifest(found.path).extra.get("model") if found else None
    except CheckpointError:  # damaged: the ranks fall back to an earlier one
        return
    current = shape.model_dump(mode="json")
    if isinstance(saved, dict):
        for name in sorted(saved.keys() | current.keys()):
            if (saved.get(name) or None) != (current.get(name) or None):  # an older checkpoint lacks newer parts
                now, was = current.get(name), saved.get(name)
                if isinstance(now, list) and isinstance(was, list):  # of a module's parameters, the first that differ
                    now, was = ([each for each in one if each not in other][:MOST] for one, other in
                                ((now, was), (was, now)))
                yield f"model.{name}", now, was, "its checkpoint holds another model"


def _check_checkpoint(config: RunConfig, folder: Path) -> None:
    """Require remaining steps, and a state to continue from if the run has ever saved one. The ranks handle damage."""
    checkpoints = get_checkpoint_folder(config, folder)
    found, kept = newest(checkpoints), newest_step(run_dir(folder, config.failover))
    every, logged = config.checkpoint.every, read_metrics(folder)
    done = logged[-1].step if logged else 0
    nothing = found is None and kept is None and not list_interrupted(checkpoints)
    if nothing and (done >= 2 * every > 0 or done >= config.train.steps):
        raise CheckpointError(
            f"--resume {folder}: it holds no good checkpoint, though step {done} was done: they were removed or "
            "could not be saved.\n  Put them back, or start a new run."
        )
    if found is None or (kept or 0) >= found.step:  # the ranks decide, as they see the memory of all hosts
        return
    try:
        if found.step >= config.train.steps:
            verify(found.path)  # if it is damaged, an earlier state is used and steps remain
    except CheckpointError:
        return
    check_steps_left(folder, found.step, config.train.steps)


def check_steps_left(folder: Path, done: int, steps: int) -> None:
    """Reject a run that has done all its steps."""
    if done >= steps:
        raise UsageError(
            f"--resume {folder}: step {done} is done, and train.steps = {steps}.\n  Raise train.steps to continue."
        )


TOKENIZER_FILE = "tokenizer.json"
# Paths and tokenizer may move: the fingerprint of their content is compared when a state is loaded.
_DATA_ORDER = ("field", "chat", "dataset", "dataset_split", "unreadable", "sequence_length", "document_mask",
               "validation_fraction", "sampler", "overlap")
