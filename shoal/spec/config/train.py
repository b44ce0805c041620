"""Configuration of training, checkpoints and metrics."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from shoal.base.section import Section
from shoal.spec.config.precision import Precision


class TrainConfig(Section):
    """Length, batch, precision and devices of a training run."""

    steps: PositiveInt = 200
    """Number of optimizer steps."""

    global_batch: PositiveInt = 16
    """Sequences per step over all replicas: dp x micro_batch x micro-batches."""

    precision: Precision = "fp32"
    """Number formats of weights, products, gradient sums and moments; see `shoal explain precision`."""

    seed: NonNegativeInt = 0
    """Random seed of the initial weights and of the data order."""

    attention: Literal["auto", "sdpa", "explicit"] = "auto"
    """The attention kernel; auto chooses the one measured fastest for the device and dtype."""

    compile: bool = False
    """Use torch.compile for each layer, the loss (unless split over ranks), and update rules that gain from it."""

    validate_every: NonNegativeInt = 100
    """Steps between validations; 0 validates only at the end."""

    validation_sequences: PositiveInt = 64
    """Sequences per validation (rounded up to complete passes)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device type; auto chooses CUDA if available."""

    threads: int = Field(default=0, ge=0, le=4096)
    """CPU threads per rank; 0 divides the cores between the local ranks."""

    transport: Literal["auto", "backend"] = "auto"
    """Transport between CPU ranks of one host: auto uses shared memory, backend always uses gloo."""


class CheckpointConfig(Section):
    """Checkpoints on disk."""

    every: NonNegativeInt = 100
    """Steps between checkpoints; 0 saves only at the end and when the run is stopped."""

    keep: PositiveInt = 2
    """Number of newest checkpoints to keep."""

    asynchronous: bool = True
    """Write in the background while training continues."""

    folder: str = ""
    """Folder of the checkpoints (default: the run folder): a path, or an fsspec URL such as s3://bucket/run. Use one
    folder for each run."""


class MetricsConfig(Section):
    """Metrics recorded while training. JSONL is always written."""

    log_every: PositiveInt = 10
    """Steps between logged lines; the first step, the last one and steps with validation are also logged."""

    profile: bool = False
    """Record the start and end of each action for some steps, on every rank, for `shoal report`."""

    profile_after: NonNegativeInt = 3
    """Steps before the first recorded one; the first steps are slower."""

    profile_steps: PositiveInt = 10
    """Number of steps to record."""

    histograms: NonNegativeInt = 0
    """Steps between histograms of weights, gradients and activations, for `shoal report`; 0 records none."""

    tensorboard: bool = True
    """Write TensorBoard event files into the run folder."""

    wandb: str = ""
    """Weights & Biases project (needs the extra shoal[wandb])."""

    mlflow: str = ""
    """MLflow experiment (needs the extra shoal[mlflow])."""
