"""The options of those commands whose rooms take seconds to import, because of torch: what is wrong is refused before.

Those of the others are in their rooms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from shoal.base.section import POSITIONAL, Section


class TrainOptions(Section):
    ranks: PositiveInt | None = None
    """Processes to start here (default: as many as the layout has); must equal pp x dp x tp."""

    run_folder: Path | None = None
    """Where checkpoints and metrics go (default: a new folder under runs/)."""

    resume: Path | None = None
    """Go on from the newest checkpoint of this run folder, on any layout. Without a value: --run-folder, or the newest
    run under runs/. The run's own config is the default for every option."""

    keep_going: bool = False
    """Begin the run of --run-folder, or go on with it if it has begun: for jobs that are started again (Kubernetes). So
    do jobs that torchrun --max-restarts or SLURM's requeue start again."""

    profile: bool = False
    """The same as --metrics.profile: record some steps action by action, for `shoal report`."""


class ReportOptions(Section):
    run_folder: Annotated[Path, POSITIONAL]
    """A run folder."""

    out: Path | None = None
    """The file to write: a page (.html), a figure (.svg, .png) or a trace (.json, .json.gz). Default: report.html in
    the run folder."""


class VerifyOptions(Section):
    random: PositiveInt | None = None
    """Verify this many randomly drawn layouts instead of the given one."""

    rule: str | None = None
    """With --random: an update rule (several with commas, or all), each on as many layouts drawn for it."""

    steps: PositiveInt = 3
    """Training steps to compare."""

    precision: Literal["fp64", "own"] = "fp64"
    """fp64 compares to 1e-9; own takes the run's precision and compares to its rounding."""

    plant: str | None = None
    """Plant this fault, to see it found; a wrong name lists them."""


class SampleOptions(Section):
    run_folder: Annotated[Path, POSITIONAL]
    """A run folder that holds a checkpoint."""

    prompt: Annotated[str, POSITIONAL]
    """The text to go on from."""

    tokens: PositiveInt = 200
    """Tokens to write."""

    temperature: NonNegativeFloat = 0.8
    """Of the distribution that tokens are drawn from; 0 takes the likeliest."""

    seed: NonNegativeInt = 0
    """Of the draws."""


class TokenizerOptions(Section):
    vocab_size: int = Field(8192, gt=0, le=2**24)
    """Token ids, the 256 bytes and the special tokens included."""

    out: Path = Path("tokenizer.json")
    """The file to write; name it in data.tokenizer."""


class CheckpointOptions(Section):
    path: Annotated[str, POSITIONAL]
    """A checkpoint's folder, or its address, as in s3://bucket/run/step-00000100."""
