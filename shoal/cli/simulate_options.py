"""The options of `shoal simulate`."""

from __future__ import annotations

from pathlib import Path

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from shoal.base.section import Section


class SimulateOptions(Section):
    schedule: str | None = None
    """The schedule to play (default 1f1b); names as in a layout, or zb-1p and zb-2p: the automatic one with once and
    twice the memory of 1f1b."""

    pp: PositiveInt = 4
    """Pipeline ranks."""

    microbatches: PositiveInt = 8
    """Micro-batches of the step."""

    virtual_stages: PositiveInt | None = None
    """Stages on each rank, for the schedules that leave it open (default 2)."""

    slices: PositiveInt | None = None
    """Slices of each sequence, passed on one by one (default 4 for terapipe, 1 for others)."""

    dp: PositiveInt = 1
    """Replicas of the pipeline; those that do not differ are played once."""

    tp: PositiveInt = 1
    """Tensor-parallel ranks of each replica's pipeline rank; they move together."""

    forward: NonNegativeFloat = 1.0
    """Time of one micro-batch's forward through all that a rank holds of one copy of the model (T_F), in any unit."""

    backward_input: NonNegativeFloat = 1.0
    """Time of the first half of its backward, the gradient of the input (T_B)."""

    backward_weight: NonNegativeFloat = 1.0
    """Time of its second half, the gradients of the weights (T_W)."""

    pair: PositiveFloat | None = None
    """Time of a forward and a backward computed at once (F&B of dualpipe); without it one follows the other."""

    comm: NonNegativeFloat = 0.0
    """Time of a message on its link; those of one link go one after another."""

    latency: NonNegativeFloat = 0.0
    """Time from a message's end on its link to its arrival."""

    blocking: bool = False
    """A message also occupies its sender."""

    reduce: NonNegativeFloat = 0.0
    """Time of a stage's gradient reduction after its last backward."""

    step: NonNegativeFloat = 0.0
    """Time of the optimizer."""

    seconds: bool = False
    """The times are seconds, and are shown so."""

    model: str | None = None
    """With --cluster: the times are those of `shoal estimate`, of this model (default llama-3-8b); in seconds."""

    cluster: str | None = None
    """Price the passes on this cluster of pp x dp x tp accelerators: 8xH100; 4xhere with --catalog."""

    catalog: Path | None = None
    """With --cluster: a file of accelerators, links and nodes, as `shoal calibrate` writes one of this machine."""

    micro_batch: PositiveInt = 1
    """With --cluster: sequences of a micro-batch."""

    sequence_length: PositiveInt | None = None
    """With --cluster: tokens of a sequence (default: the longest that the model was trained for)."""

    precision: str = "bf16"
    """With --cluster: fp32, bf16 or another precision of a run."""

    memory: PositiveFloat | None = None
    """Activations that zb-auto may keep on each rank, in those that 1f1b keeps on its first."""

    kept_for_weight: NonNegativeFloat = 1.0
    """Share of an activation that is still alive between the two halves of its backward (M_W / M_B)."""

    straggler: tuple[str, ...] = ()
    """Ranks that compute slower: RANK=FACTOR ..., counted over pp x dp x tp from outer to inner."""

    slow_link: tuple[str, ...] = ()
    """Links that are slower, both ways: A-B=FACTOR ... of two such ranks."""

    jitter: NonNegativeFloat = 0.0
    """Standard deviation of every computation's time, as a share of it."""

    seed: NonNegativeInt = 0
    """Of the jitter."""

    compare: str = ""
    """More schedules, side by side: 1f1b,zb-h1,..."""

    csv: Path | None = None
    """Play the schedule of this file, in the format of torch.distributed.pipelining: a row for each rank. It says how
    many ranks and micro-batches there are."""

    out: Path | None = None
    """Write the timelines to this file: a page (.html), a figure (.svg, .png) or a Perfetto trace (.json, .json.gz)."""

    check: Path | None = None
    """Instead: compare with the printed bubble rates in this folder's zero_bubble.csv, row by row."""
