"""Options of `shoal simulate`."""

from __future__ import annotations

from pathlib import Path

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from shoal.base.section import Section


class SimulateOptions(Section):
    schedule: str | None = None
    """The schedule to simulate (default 1f1b): a name as in a layout, or zb-1p and zb-2p, the automatic schedule with
    the memory of 1f1b and twice that."""

    pp: PositiveInt = 4
    """Number of pipeline ranks."""

    microbatches: PositiveInt = 8
    """Micro-batches per step."""

    virtual_stages: PositiveInt | None = None
    """Stages on each rank, for schedules in which it can be set (default 2)."""

    slices: PositiveInt | None = None
    """Slices of each sequence, sent one by one (default 4 for terapipe, 1 for others). Beside terapipe, other
    schedules stay unsliced."""

    dp: PositiveInt = 1
    """Replicas of the pipeline; identical ones are simulated once."""

    tp: PositiveInt = 1
    """Tensor-parallel ranks of each pipeline rank; they run in lockstep."""

    forward: NonNegativeFloat = 1.0
    """Time of one micro-batch's forward pass through a rank's layers of one model copy (T_F), in any unit."""

    backward_input: NonNegativeFloat = 1.0
    """Time of the first half of its backward, the gradients of activations (T_B)."""

    backward_weight: NonNegativeFloat = 1.0
    """Time of the second half of its backward, the gradients of weights (T_W)."""

    pair: PositiveFloat | None = None
    """Time of a forward and a backward computed together (F&B of dualpipe); by default one follows the other."""

    comm: NonNegativeFloat = 0.0
    """Transfer time of a message on its link; messages on one link are sequential."""

    latency: NonNegativeFloat = 0.0
    """Time from the end of a message's transfer to its arrival."""

    blocking: bool = False
    """Block the sender during a message's transfer."""

    reduce: NonNegativeFloat = 0.0
    """Time of a stage's gradient reduction after its last backward."""

    step: NonNegativeFloat = 0.0
    """Time of the optimizer step."""

    seconds: bool = False
    """Times are in seconds, and are shown in seconds."""

    model: str | None = None
    """With --cluster: use the times of `shoal estimate` for this model (default llama-3-8b), in seconds."""

    cluster: str | None = None
    """Cluster of pp x dp x tp accelerators to estimate times for: 8xH100; 4xhere with --catalog."""

    catalog: Path | None = None
    """With --cluster: a TOML file of accelerators, links and nodes, such as `shoal calibrate` writes."""

    micro_batch: PositiveInt = 1
    """With --cluster: sequences per micro-batch."""

    sequence_length: PositiveInt | None = None
    """With --cluster: tokens per sequence (default: the longest that the model was trained for)."""

    precision: str = "bf16"
    """With --cluster: fp32, bf16 or another precision of `shoal train`."""

    memory: PositiveFloat | None = None
    """Memory limit of zb-auto on each rank, in units of the activations that 1f1b stores on its first rank."""

    kept_for_weight: NonNegativeFloat = 1.0
    """Fraction of an activation that stays in memory between the two halves of its backward (M_W / M_B)."""

    straggler: tuple[str, ...] = ()
    """Slow ranks: RANK=FACTOR ..., numbered over pp x dp x tp from outer to inner."""

    slow_link: tuple[str, ...] = ()
    """Slow links, in both directions: A-B=FACTOR ... between two such ranks."""

    jitter: NonNegativeFloat = 0.0
    """Standard deviation of each computation's time, as a fraction of it."""

    seed: NonNegativeInt = 0
    """Random seed of the jitter."""

    compare: str = ""
    """Comma-separated schedules to compare side by side: 1f1b,zb-h1,..."""

    csv: Path | None = None
    """Simulate the schedule in this file, in the CSV format of torch.distributed.pipelining: a row for each rank. It
    determines the numbers of ranks and micro-batches."""

    json_: bool = False
    """Print one JSON object instead, in seconds, bytes and fractions."""

    out: Path | None = None
    """Write the timelines to this file: a page (.html), a figure (.svg, .png) or a Perfetto trace (.json, .json.gz).
    Or write the schedule itself to a new file (.csv), which --csv and parallel.schedule read."""

    check: Path | None = None
    """Compare with the published bubble rates in this folder's zero_bubble.csv, row by row, instead."""
