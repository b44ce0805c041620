"""What a run measures, one record per logged step, and where the records go.

JSONL is always written, and is the record of truth: one line per logged step. A resumed run continues the same file,
cut back to the step that it resumes from, so that no step is there twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal.base.errors import UsageError
from shoal.spec.config import MetricsConfig

FILE_NAME = "metrics.jsonl"


@dataclass(frozen=True)
class StepMetrics:
    """One logged step, over all ranks."""

    step: int
    """Optimizer steps done, from 1."""

    steps: int
    """Of the whole run."""

    loss: float
    """Training loss, nats per unmasked token."""

    learning_rate: float
    """Used in this step."""

    tokens_per_second: float
    """Over all ranks, since the last logged step."""

    tokens_per_second_per_rank: float
    """The same, divided by the world size."""

    memory_bytes: int
    """Peak of the rank that holds most."""

    seconds_left: float
    """To the end of the run, at the present speed."""

    gradient_norm: float | None = None
    """Global L2 norm before clipping; None where a gradient overflowed and the step was skipped."""

    loss_scale: float | None = None
    """That the loss was multiplied by in this step; None without one."""

    skipped_steps: int | None = None
    """Of the whole run so far, since a gradient overflowed; None without a loss scale."""

    saving: float | None = None
    """Part of the time since the last logged step, 0 to 1, for which saving held up this training."""

    mfu: float | None = None
    """Model FLOPs utilisation, 0 to 1 (`ModelShape.flops_per_token`); None where the device's peak is not known."""

    validation_loss: float | None = None
    """Nats per unmasked token, in steps that validated."""

    validation_dropped: float | None = None
    """Part of the choices of experts that found no room, in steps that validated."""

    staleness: float | None = None
    """Of the updates since the last logged step, in the mean (docs/relaxed.md); None where nothing is stale."""

    stalest: int | None = None
    """The most of this attempt so far."""

    dropped: float | None = None
    """Part of the choices of experts that found no room, in this step (expert-choice: tokens chosen by none)."""

    idle_experts: float | None = None
    """Part of the experts, of all layers, that got no token."""

    busiest_expert: float | None = None
    """Tokens of the expert with most over the mean of its layer."""

    balance_loss: float | None = None
    """Of the routers, mean over sequences and layers, without its weight; likewise z_loss."""

    z_loss: float | None = None

    expert_load: list[list[float]] | None = None
    """For each layer with experts, the part of its tokens that each expert got."""

    depth_accuracy: float | None = None
    """Part of the tokens of which it was foreseen rightly whether they pass through a layer, of all layers that take
    some; the part of the chosen ones that was expected is depth_recall, and that of all tokens depth_expected."""

    depth_recall: float | None = None

    depth_expected: float | None = None

    depth_loss: float | None = None
    """Cross-entropy of what foresees it, nats per token."""

    def values(self) -> dict[str, float]:
        """All numbers that are known, by name, without the step."""
        return {name: value for name, value in asdict(self).items()
                if value is not None and name not in ("step", "steps", "expert_load")}


class MetricsWriter:
    """Writes `StepMetrics` to JSONL in the run folder, and to the trackers that are asked for. For rank 0 alone.

    Args:
        folder: of the run; TensorBoard's files go to ``tensorboard/`` in it.
        resume_step: records of later steps are dropped; 0 starts afresh.
        config: which trackers.
        run: settings of the run, for trackers that keep them.

    Raises:
        UsageError: a tracker is asked for that is not installed.
    """

    def __init__(
        self,
        folder: Path,
        resume_step: int = 0,
        config: MetricsConfig | None = None,
        run: dict[str, Any] | None = None,
    ):
        config = config or MetricsConfig()
        check_trackers(config)
        folder.mkdir(parents=True, exist_ok=True)
        self._trackers: list[_Tracker] = []
        if config.tensorboard:
            self._trackers.append(_tensorboard(folder, resume_step))
        if config.wandb:
            self._trackers.append(_wandb(config.wandb, folder, run or {}))
        if config.mlflow:
            self._trackers.append(_mlflow(config.mlflow, folder, run or {}))
        path = folder / FILE_NAME
        _cut_back(path, resume_step)
        self._file = open(path, "a")  # noqa: SIM115 -- open as long as the writer

    def write(self, metrics: StepMetrics) -> None:
        """Append one record; it is with the kernel when this returns, so a killed process loses none."""
        known = {name: value for name, value in asdict(metrics).items() if value is not None}
        self._file.write(json.dumps(known) + "\n")
        self._file.flush()
        for tracker in self._trackers:
            tracker.write(metrics.step, metrics.values())

    def close(self) -> None:
        """Finish all files."""
        self._file.close()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_trackers(config: MetricsConfig) -> None:
    """Look for the packages of the trackers that are asked for, without importing them.

    Raises:
        UsageError: one is not installed.
    """
    for package, value in (("wandb", config.wandb), ("mlflow", config.mlflow)):
        if value and find_spec(package) is None:
            raise UsageError(
                f"metrics.{package} = {value!r} needs the package {package}, which is not installed."
                f"\n  Install shoal[{package}], or leave metrics.{package} out."
            )


def read_metrics(folder: Path, last_step: int | None = None) -> list[StepMetrics]:
    """The records of a run, in order, up to and with ``last_step``; a torn last line is left out.

    Raises:
        UsageError: a line is none.
    """
    path = folder / FILE_NAME
    lines = path.read_bytes().splitlines() if path.exists() else []
    known = {field.name for field in fields(StepMetrics)}
    records = []
    for number, line in enumerate(lines):
        try:
            record = json.loads(line)
            records.append(StepMetrics(**{name: value for name, value in record.items() if name in known}))
        except (ValueError, TypeError, AttributeError) as error:
            if number == len(lines) - 1 and isinstance(error, ValueError):  # the process was killed while it wrote
                break
            raise UsageError(f"{path}, line {number + 1}: it is no record of a step.\n  Remove the line.") from None
    return [record for record in records if last_step is None or record.step <= last_step]


def _cut_back(path: Path, step: int) -> None:
    """Drop the records of later steps, and a torn line, by an atomic replacement."""
    if not path.exists():
        return
    kept = [json.dumps({name: value for name, value in asdict(record).items() if value is not None})
            for record in read_metrics(path.parent, step)]
    partial = path.with_suffix(".partial")
    with open(partial, "w") as file:
        file.writelines(f"{line}\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


@dataclass(frozen=True)
class _Tracker:
    write: Callable[[int, dict[str, float]], None]
    close: Callable[[], None]


def _tensorboard(folder: Path, resume_step: int) -> _Tracker:
    from torch.utils.tensorboard import SummaryWriter

    # TensorBoard then hides what an earlier process wrote from this step on.
    writer = SummaryWriter(folder / "tensorboard", purge_step=resume_step + 1 if resume_step else None)

    def write(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return _Tracker(write, writer.close)


def _wandb(project: str, folder: Path, run: dict[str, Any]) -> _Tracker:
    import wandb

    session = wandb.init(project=project, name=folder.name, dir=folder, config=run, id=folder.name, resume="allow")
    return _Tracker(lambda step, values: session.log(values, step=step), session.finish)


def _mlflow(experiment: str, folder: Path, run: dict[str, Any]) -> _Tracker:
    import mlflow

    mlflow.set_experiment(experiment)
    mlflow.start_run(run_name=folder.name)
    for section, values in run.items():
        mlflow.log_params({f"{section}.{key}": value for key, value in values.items()})
    return _Tracker(lambda step, values: mlflow.log_metrics(values, step=step), mlflow.end_run)
