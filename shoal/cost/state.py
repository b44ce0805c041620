"""Bytes that stay on a rank from step to step: parameters, gradients and optimizer states, to the byte.

What `shoal.parallel` builds on a rank is counted here without building it: which parameters its stages hold, how tensor
parallelism splits them, how they fill buckets, and where the equal cuts of ZeRO fall in these. With P parameters on N
ranks, in bf16 with fp32 Adam, that is (Rajbhandari et al. 2020, figure 1; see `zero_bytes`)

    stage 0: 16 P    stage 1: 4 P + 12 P/N    stage 2: 2 P + 14 P/N    stage 3: 16 P/N

in the paper's accounting. Shoal keeps gradients in fp32, 18 P for stage 0; and with stage 3 no shard in bf16 beside the
one in fp32, 16 P/N again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.catalog import ModelShape
from shoal.cost.buckets import filled
from shoal.cost.moments import Moments
from shoal.cost.parameters import SPLITTING, StagePart
from shoal.layout import Layout
from shoal.precision.formats import Formats


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank.

    Attributes:
        parameters: whole and master, between steps (`HeldParameters.bytes`).
        gradients: likewise.
        optimizer: of its states (`Rule.bytes`).
        gathered: ZeRO-3: of whole parameters at the worst time: a unit and those gathered ahead, or all.
        whole_gradients: ZeRO-2 and 3: of whole gradients at the worst time, two neighbouring buckets.
        elements: parameters that are here, padding left out.
        experts: of these, those of experts.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    whole_gradients: int
    elements: int
    experts: int = 0


def state_bytes(
    shape: ModelShape, layout: Layout, policy: Formats, optimizer: str, parts: Sequence[StagePart],
    *, tp_index: int = 0, shard_index: int = 0, expert_index: tuple[int, int, int] = (0, 0, 0),
) -> StateBytes:
    """What one rank holds.

    Args:
        optimizer: its name in the config.
        parts: the stages of the rank.
        tp_index: its place along tp; the last has the least of a vocabulary that does not divide.
        shard_index: which shard of the state it has, of `Layout.shards`.
        expert_index: its places along edp_shard, ep and etp.
    """
    alone = layout.sync != "all-reduce"  # relaxed: every replica for itself, and whole
    if alone:
        layout = layout.model_copy(update={"zero": 0})
    zero, index = layout.zero, 0 if alone else shard_index
    storage, compute, reduce = policy.storage.itemsize, policy.compute.itemsize, policy.reduce.itemsize
    shards = {False: layout.shards, True: layout.expert_shape[2]}
    parameters = gradients = elements = experts = gathered = whole_gradients = 0
    moments = Moments(optimizer, policy.state.itemsize)
    limit = 0.0 if zero == 3 else layout.bucket_bytes
    at_once = 0 if zero < 3 else 1 + layout.prefetch if layout.reshard_after_forward else shape.layers + 2
    splitting = tuple(getattr(layout, name) for name in SPLITTING)
    for part in parts:
        stage = filled(shape, splitting, part, limit, reduce, at_once, tp_index, *expert_index[1:])
        chunks = [size.chunk(shards[size.expert]) for size in stage.sizes]
        wholes = [shards[size.expert] * chunk for size, chunk in zip(stage.sizes, chunks, strict=True)]
        for size, count, chunk, whole in zip(stage.sizes, stage.counts, chunks, wholes, strict=True):
            if zero < 3:
                parameters += count * (whole * compute + (0 if storage == compute else chunk * storage))
            else:
                parameters += count * chunk * storage
            gradients += count * (whole if zero < 2 else chunk) * reduce
            elements += count * size.elements
            experts += count * size.elements if size.expert else 0
        moments.add(stage, chunks, {False: index, True: expert_index[0]})
        if zero >= 2:
            whole_gradients = max(whole_gradients, _most(stage.neighbours, wholes) * reduce)
        if zero == 3:
            gathered = max(gathered, _most(stage.at_once, wholes) * compute)
    return StateBytes(parameters, gradients, moments.bytes, gathered, whole_gradients, elements, experts)


def _most(windows: Iterable[tuple[int, ...]], sizes: Sequence[int]) -> int:
    """The most that neighbours have together."""
    return max((sum(sizes[kind] for kind in window) for window in windows), default=0)


def zero_bytes(
    parameters: float, ranks: int, stage: int, *, weights: int = 2, gradients: int = 2, rest: int = 12
) -> float:
    """Bytes per rank of ZeRO, in the paper's accounting (Rajbhandari et al. 2020, section 5; K = ``rest`` = 12).

    >>> [zero_bytes(7.5e9, 64, stage) / 1e9 for stage in (0, 1, 2, 3)]
    [120.0, 31.40625, 16.640625, 1.875]
    """
    shared = [rest, gradients, weights][:stage]
    kept = [rest, gradients, weights][stage:]
    return parameters * (sum(kept) + sum(shared) / ranks)
