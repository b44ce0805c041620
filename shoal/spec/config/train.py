"""One training run: how long, on what, and what it writes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from shoal.base.section import Section
from shoal.spec.config.precision import Precision


class TrainConfig(Section):
    """One training run."""

    steps: PositiveInt = 200
    """Optimizer steps."""

    global_batch: PositiveInt = 16
    """Sequences per step over all replicas: dp x micro_batch x micro-batches."""

    precision: Precision = "fp32"
    """The number formats of weights, products, gradient sums and moments; `shoal explain precision` has a table."""

    seed: NonNegativeInt = 0
    """Of the initial weights and of the order of the data."""

    attention: Literal["auto", "sdpa", "explicit"] = "auto"
    """The attention kernel; auto takes what was measured fastest for the device and dtype."""

    compile: bool = False
    """torch.compile each layer, the loss where it is not split over ranks, and update rules that gain by it."""

    validate_every: NonNegativeInt = 100
    """Steps between validations; 0 validates only at the end."""

    validation_sequences: PositiveInt = 64
    """Sequences in one validation (rounded up to whole passes)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where there is one."""

    threads: int = Field(default=0, ge=0, le=4096)
    """CPU threads per rank; 0 shares the cores between the local ranks."""

    transport: Literal["auto", "backend"] = "auto"
    """How CPU ranks of one host communicate: auto takes memory that they share, backend always gloo."""


class CheckpointConfig(Section):
    """What is kept on disk, and when."""

    every: NonNegativeInt = 100
    """Steps between checkpoints; 0 saves only at the end and on a stop."""

    keep: PositiveInt = 2
    """Newest checkpoints kept."""

    asynchronous: bool = True
    """Write in the background while training goes on."""

    folder: str = ""
    """Where checkpoints go, if not into the run's folder: a path, or an address that fsspec knows, as s3://bucket/run.
    It belongs to this run alone."""


class MetricsConfig(Section):
    """What is recorded while training. JSONL is always written."""

    log_every: PositiveInt = 10
    """Steps between logged lines; the first step, the last, and those that validated are logged too."""

    profile: bool = False
    """Record when each action of some steps begins and ends, on every rank, for `shoal report`."""

    profile_after: NonNegativeInt = 3
    """Steps before the first recorded one, which are slower."""

    profile_steps: PositiveInt = 10
    """Steps to record."""

    histograms: NonNegativeInt = 0
    """Steps between histograms of weights, gradients and activations, for `shoal report`; 0 records none."""

    tensorboard: bool = True
    """Write TensorBoard event files into the run folder."""

    wandb: str = ""
    """Weights & Biases project (needs the extra shoal[wandb])."""

    mlflow: str = ""
    """MLflow experiment (needs the extra shoal[mlflow])."""
