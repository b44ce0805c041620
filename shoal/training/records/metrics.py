"""Metrics of a run: one record per logged step, written to JSONL and to trackers.

JSONL is always written, one line per logged step. A resumed run continues the same file, truncated to the step that it
resumes from, so that no step occurs twice.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal.base.errors import UsageError
from shoal.base.files import json_lines, make_folder, open_to_append, open_to_read, read_json_lines
from shoal.base.journal import Journal, best_effort
from shoal.base.terminal import warn
from shoal.spec.config.sections import MetricsConfig

FILE_NAME = "metrics.jsonl"


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one logged step, over all ranks. Values that do not apply to a run are None.

    Attributes:
        step: optimizer steps done, from 1.
        steps: total steps of the run.
        loss: training loss [nats per unmasked token]; None for a batch without targets.
        learning_rate: learning rate of this step.
        tokens_per_second: over all ranks, since the last logged step; per rank, divided by the world size.
        memory_bytes: peak memory of a rank, maximum over ranks.
        seconds_left: estimated time to the end of the run, at the current speed.
        gradient_norm: global L2 norm before clipping; None if a gradient overflowed and the step was skipped.
        loss_scale: factor on the loss in this step.
        skipped_steps: steps of the run skipped so far because a gradient overflowed.
        saving: fraction of the time since the last logged step in which saving stalled the training.
        mfu: model FLOPs utilisation, 0 to 1 (`ModelShape.flops_per_token`); None if the device's peak is unknown.
        validation_loss: validation loss [nats per unmasked token], in steps that validated.
        validation_dropped: fraction of expert choices dropped for lack of capacity, in steps that validated.
        named_validation: validation losses of the texts in `data.validation`, by name.
        staleness: mean staleness of the updates since the last logged step (docs/relaxed.md).
        stalest: maximum staleness in this attempt so far.
        dropped: fraction of expert choices dropped for lack of capacity in this step (expert-choice: fraction of
            tokens that no expert chose).
        idle_experts: fraction of the experts of all layers that received no token.
        busiest_expert: tokens of the busiest expert divided by the mean of its layer.
        balance_loss, z_loss: router losses, mean over sequences and layers, without their weights.
        expert_load: for each layer with experts, the fraction of its tokens that each expert received.
        source_loss, source_validation_loss: losses of each source of a mixture, by name: training, over the steps since
            the last logged one, and validation.
        source_tokens: tokens of each source read so far.
        depth_accuracy: fraction of tokens for which selection by a mixture-of-depths layer was predicted correctly.
        depth_recall: fraction of the selected tokens that were predicted to be selected.
        depth_expected: fraction of all tokens that were predicted to be selected.
        depth_loss: cross-entropy of the predictor [nats per token].
        memory_by_rank: peak memory of each rank; None on one rank and with relaxed data parallelism.
        metrics, validation_metrics: metrics of a model of one's own in this step, and in its validation, by name.
    """

    step: int
    steps: int
    loss: float | None
    learning_rate: float
    tokens_per_second: float
    tokens_per_second_per_rank: float
    memory_bytes: int
    seconds_left: float
    gradient_norm: float | None = None
    loss_scale: float | None = None
    skipped_steps: int | None = None
    saving: float | None = None
    mfu: float | None = None
    validation_loss: float | None = None
    validation_dropped: float | None = None
    named_validation: dict[str, float] | None = None
    staleness: float | None = None
    stalest: int | None = None
    dropped: float | None = None
    idle_experts: float | None = None
    busiest_expert: float | None = None
    balance_loss: float | None = None
    z_loss: float | None = None
    expert_load: list[list[float]] | None = None
    source_loss: dict[str, float] | None = None
    source_validation_loss: dict[str, float] | None = None
    source_tokens: dict[str, int] | None = None
    depth_accuracy: float | None = None
    depth_recall: float | None = None
    depth_expected: float | None = None
    depth_loss: float | None = None
    memory_by_rank: list[int] | None = None
    metrics: dict[str, float] | None = None
    validation_metrics: dict[str, float] | None = None

    def __repr__(self) -> str:
        return f"StepMetrics({', '.join(f'{name}={value!r}' for name, value in self.known().items())})"

    def known(self) -> dict[str, Any]:
        """Return all values that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def values(self) -> dict[str, float]:
        """Return all known numbers except the step, by the tag that trackers call them, ``GROUP/NAME``."""
        known = self.known()
        return {tag: known[name] for name, tag in TAGS.items() if name in known} | {
            f"{group}/{name}": value for field, group in BY_NAME.items() for name, value in known.get(field, {}).items()
        }


TAGS = {
    "loss": "loss/train", "validation_loss": "loss/validation", "balance_loss": "loss/balance", "z_loss": "loss/z",
    "depth_loss": "loss/depth_predictor", "learning_rate": "optimizer/learning_rate",
    "gradient_norm": "optimizer/gradient_norm", "loss_scale": "optimizer/loss_scale",
    "skipped_steps": "optimizer/skipped_steps", "staleness": "optimizer/staleness", "stalest": "optimizer/stalest",
    "tokens_per_second": "speed/tokens_per_second", "tokens_per_second_per_rank": "speed/tokens_per_second_per_rank",
    "mfu": "speed/mfu", "saving": "speed/saving", "seconds_left": "speed/seconds_left",
    "memory_bytes": "memory/peak_bytes", "dropped": "experts/dropped",
    "validation_dropped": "experts/validation_dropped", "idle_experts": "experts/idle",
    "busiest_expert": "experts/busiest", "depth_accuracy": "depths/accuracy", "depth_recall": "depths/recall",
    "depth_expected": "depths/expected",
}  # fmt: skip
"""Numbers by field, and how trackers call them: TensorBoard and Weights & Biases show a section for each group."""

BY_NAME = {
    "source_loss": "loss_by_source", "source_validation_loss": "validation_loss_by_source",
    "source_tokens": "tokens_by_source", "named_validation": "validation", "metrics": "metrics",
    "validation_metrics": "validation_metrics",
}  # fmt: skip
"""Fields with a value for each of several names, and their groups."""


class MetricsWriter:
    """Writer of `StepMetrics` to JSONL in the run folder and to trackers, on rank 0.

    Args:
        resume_step: records of later steps are dropped; 0 drops all.
        run: settings of the run, for trackers that store them.
        report: called with a note for the user when a record cannot be written; it is written with a later one.

    Raises:
        UsageError: a tracker is not installed.
    """

    def __init__(
        self, folder: Path, resume_step: int, config: MetricsConfig, run: dict[str, Any],
        report: Callable[[str], None] = warn,
    ):
        check_trackers(config)
        openers: list[Callable[[int], _TrackerSession]] = []
        if config.tensorboard:
            openers.append(partial(_tensorboard, folder))
        if config.wandb:
            openers.append(partial(_wandb, config.wandb, folder, run))
        if config.mlflow:
            openers.append(partial(_mlflow, config.mlflow, folder, run))
        path = folder / FILE_NAME
        with best_effort(path, report):
            make_folder(folder.resolve())  # the user may have linked the run folder itself
            if path.exists():
                _drop_later(path, resume_step)
        self._trackers = [_RetriedTracker(opener, resume_step, report) for opener in openers]
        self._journal = Journal(path, report)

    def write(self, metrics: StepMetrics) -> None:
        """Append one record. It is handed to the kernel before the return, so a killed process loses none."""
        self._journal.append(json_lines([metrics.known()]))
        for tracker in self._trackers:
            tracker.write(metrics.step, metrics.values())

    def close(self) -> None:
        self._journal.append()
        for tracker in self._trackers:
            tracker.close()


def _drop_later(path: Path, resume_step: int) -> None:
    """Cut a file at the first record of a later step, or at a truncated line; this needs no space on the disk."""
    end = 0
    with open_to_read(path) as file:
        for line in file if resume_step else ():
            try:
                later = _parse(json.loads(line)).step > resume_step
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
                later = not line.endswith(b"\n")  # a damaged line stays where it is
            if later:
                break
            end += len(line)
    with open_to_append(path) as file:
        file.truncate(end)


def check_trackers(config: MetricsConfig) -> None:
    """Raise `UsageError` for the first tracker whose package is not installed, without importing it."""
    for package, value in (("wandb", config.wandb), ("mlflow", config.mlflow)):
        if value and find_spec(package) is None:
            raise UsageError(
                f"metrics.{package} = {value!r} needs the package {package}, which is not installed."
                f"\n  Install shoal[{package}], or leave metrics.{package} out."
            )


def read_metrics(folder: Path) -> list[StepMetrics]:
    """Read the records of a run in order, without damaged lines.

    Raises:
        UsageError: the file cannot be read, or no line is a record.
    """
    return read_json_lines(folder / FILE_NAME, _parse, "record of a step")


def _parse(record: dict[str, Any]) -> StepMetrics:
    known = {field.name: record[field.name] for field in fields(StepMetrics) if record.get(field.name) is not None}
    for name, value in known.items():
        wanted = (int,) if name in COUNTS else (int, float)
        rows = (
            value if name == "expert_load" else [value] if name == "memory_by_rank"
            else [[*value.values()]] if name in BY_NAME else [[value]]
        )  # fmt: skip
        numbers = [number for row in rows for number in row]
        if any(type(number) not in wanted or LARGEST < abs(number) < math.inf for number in numbers):
            raise ValueError(f"{name} is no number, or too large")
    if not known["step"] >= 1:
        raise ValueError("steps begin at 1")
    return StepMetrics(**{"loss": None} | known)


COUNTS = ("step", "steps")
LARGEST = 1e30  # larger numbers are damage; infinity and NaN are not, which a diverging run may log


_TrackerSession = tuple[Callable[[int, dict[str, float]], None], Callable[[], None]]
"""Functions that write the values of a step and close the tracker."""


class _RetriedTracker:
    """One tracker. If it fails, its records wait for the next one, with which it is opened again.

    Args:
        opener: function of the number of steps before the first record.
    """

    def __init__(self, opener: Callable[[int], _TrackerSession], resume_step: int, report: Callable[[str], None]):
        self._open, self._report, self._failed = opener, report, False
        self._pending: deque[tuple[int, dict[str, float]]] = deque(maxlen=10_000)
        self._session: _TrackerSession | None = None
        try:
            self._session = opener(resume_step)
        except OSError as error:
            self._fail(error)

    def write(self, step: int, values: dict[str, float]) -> None:
        self._pending.append((step, values))
        try:
            if self._session is None:
                self._session = self._open(step - 1)
            while self._pending:
                self._session[0](*self._pending[0])
                self._pending.popleft()
        except Exception as error:  # each library has its own exceptions
            self._session = None
            self._fail(error)

    def close(self) -> None:
        try:
            if self._session is not None:
                self._session[1]()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            self._report(f"a tracker of metrics failed: {error}. The run continues and tries again.")


def _tensorboard(folder: Path, resume_step: int) -> _TrackerSession:
    from torch.utils.tensorboard import SummaryWriter

    # TensorBoard then hides records that an earlier process wrote from this step on.
    writer = SummaryWriter(make_folder(folder / "tensorboard"), purge_step=resume_step + 1 if resume_step else None)

    def write(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return write, writer.close


def _wandb(project: str, folder: Path, run: dict[str, Any], resume_step: int) -> _TrackerSession:
    import wandb

    make_folder(folder / "wandb")
    session = wandb.init(project=project, name=folder.name, dir=folder, config=run, id=folder.name, resume="allow")
    return (lambda step, values: session.log(values, step=step)), session.finish


def _mlflow(experiment: str, folder: Path, run: dict[str, Any], resume_step: int) -> _TrackerSession:
    import mlflow

    mlflow.set_experiment(experiment)
    mlflow.start_run(run_name=folder.name)
    for section, values in run.items():
        mlflow.log_params({f"{section}.{key}": value for key, value in values.items()})
    return (lambda step, values: mlflow.log_metrics(values, step=step)), mlflow.end_run
