"""Metrics of a run: one record per logged step, written to JSONL and to trackers.

JSONL is always written, one line per logged step. A resumed run continues the same file, truncated to the step that it
resumes from, so that no step occurs twice.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal.base.errors import UsageError
from shoal.base.files import json_lines, read_json_lines
from shoal.base.journal import Journal, best_effort, warn
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
        staleness: mean staleness of the updates since the last logged step (docs/relaxed.md).
        stalest: maximum staleness in this attempt so far.
        dropped: fraction of expert choices dropped for lack of capacity in this step (expert-choice: fraction of
            tokens that no expert chose).
        idle_experts: fraction of the experts of all layers that received no token.
        busiest_expert: tokens of the busiest expert divided by the mean of its layer.
        balance_loss, z_loss: router losses, mean over sequences and layers, without their weights.
        expert_load: for each layer with experts, the fraction of its tokens that each expert received.
        depth_accuracy: fraction of tokens for which selection by a mixture-of-depths layer was predicted correctly.
        depth_recall: fraction of the selected tokens that were predicted to be selected.
        depth_expected: fraction of all tokens that were predicted to be selected.
        depth_loss: cross-entropy of the predictor [nats per token].
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
    staleness: float | None = None
    stalest: int | None = None
    dropped: float | None = None
    idle_experts: float | None = None
    busiest_expert: float | None = None
    balance_loss: float | None = None
    z_loss: float | None = None
    expert_load: list[list[float]] | None = None
    depth_accuracy: float | None = None
    depth_recall: float | None = None
    depth_expected: float | None = None
    depth_loss: float | None = None

    def known(self) -> dict[str, Any]:
        """Return all values that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def values(self) -> dict[str, float]:
        """Return all known numbers except the step, by name."""
        return {name: v for name, v in self.known().items() if name not in ("step", "steps", "expert_load")}


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
            folder.mkdir(parents=True, exist_ok=True)
            if path.exists():  # drop records of later steps and a truncated line; this needs no space on the disk
                kept = len(read_metrics(folder, resume_step))
                os.truncate(path, sum(map(len, path.read_bytes().splitlines(keepends=True)[:kept])))
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


def check_trackers(config: MetricsConfig) -> None:
    """Raise `UsageError` for the first tracker whose package is not installed, without importing it."""
    for package, value in (("wandb", config.wandb), ("mlflow", config.mlflow)):
        if value and find_spec(package) is None:
            raise UsageError(
                f"metrics.{package} = {value!r} needs the package {package}, which is not installed."
                f"\n  Install shoal[{package}], or leave metrics.{package} out."
            )


def read_metrics(folder: Path, last_step: int | None = None) -> list[StepMetrics]:
    """Read the records of a run in order, up to and including ``last_step``; a truncated last line is ignored.

    Raises:
        UsageError: a line is not a record.
    """
    names = {field.name for field in fields(StepMetrics)}

    def parse(record: dict[str, Any]) -> StepMetrics:
        return StepMetrics(**{"loss": None} | {name: value for name, value in record.items() if name in names})

    records = read_json_lines(folder / FILE_NAME, parse, "record of a step")
    return [record for record in records if last_step is None or record.step <= last_step]


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
    writer = SummaryWriter(folder / "tensorboard", purge_step=resume_step + 1 if resume_step else None)

    def write(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return write, writer.close


def _wandb(project: str, folder: Path, run: dict[str, Any], resume_step: int) -> _TrackerSession:
    import wandb

    session = wandb.init(project=project, name=folder.name, dir=folder, config=run, id=folder.name, resume="allow")
    return (lambda step, values: session.log(values, step=step)), session.finish


def _mlflow(experiment: str, folder: Path, run: dict[str, Any], resume_step: int) -> _TrackerSession:
    import mlflow

    mlflow.set_experiment(experiment)
    mlflow.start_run(run_name=folder.name)
    for section, values in run.items():
        mlflow.log_params({f"{section}.{key}": value for key, value in values.items()})
    return (lambda step, values: mlflow.log_metrics(values, step=step)), mlflow.end_run
