"""Bytes that stay on a rank from step to step: parameters, gradients and optimizer states, to the byte.

What `shoal.parallel` builds on a rank is counted here without building it: which parameters its stages hold, how tensor
parallelism splits them, how they fill buckets, and where the equal cuts of ZeRO fall in these. With P parameters on N
ranks, in bf16 with fp32 Adam, that is (Rajbhandari et al. 2020, figure 1; see `zero_bytes`)

    stage 0: 16 P    stage 1: 4 P + 12 P/N    stage 2: 2 P + 14 P/N    stage 3: 16 P/N

in the paper's accounting. Shoal keeps gradients in fp32, 18 P for stage 0; and with stage 3 no shard in bf16 beside the
one in fp32, 16 P/N again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.catalog import ModelShape
from shoal.cost.buckets import Filled, buckets_of
from shoal.cost.moments import Moments, Orthogonal
from shoal.cost.parameters import StagePart
from shoal.layout import Layout
from shoal.precision.formats import Formats

TURNS = 2  # behind which as much is whole, and less else is alive


class Whole(NamedTuple):
    """Bytes that a unit of a stage has for a while.

    Attributes:
        parameters: gathered, of this unit and those ahead (ZeRO-3).
        gradients: of this unit's buckets, before they are reduced (ZeRO-2 and 3).
        before: of buckets that units behind it have begun to fill, or whose reduction is on its way.
        second, third: besides, from the second and from the third micro-batch on. Their sums are added to what is
            there, and have memory of their own; in the first unit of a backward the last bucket of the one before is
            on its way, where reductions overlap.
    """

    parameters: int
    gradients: int
    before: int
    second: int
    third: int


class Passing(NamedTuple):
    """Of one stage, at moments of its backward (`shoal.cost.working`).

    Attributes:
        head: in its last unit.
        layer: in its last layer.
        first: in its first layer.
        end: in its first unit.
        turns: in the layers, below the last, where the gradients of the next buckets begin while the one before is on
            its way: how many layers are done, and what is whole.
    """

    head: Whole
    layer: Whole
    first: Whole
    end: Whole
    turns: tuple[tuple[int, Whole], ...] = ()


class StateBytes(NamedTuple):
    """Bytes on one rank.

    Attributes:
        parameters: whole and master, between steps (`HeldParameters.bytes`).
        gradients: likewise.
        optimizer: of its states (`Rule.bytes`).
        passing: by stage: of whole parameters (ZeRO-3) and whole gradients (ZeRO-2 and 3) that are there for a while.
        elements: parameters that are here, padding left out.
        experts: of these, those of experts.
        updating: bytes besides, of an update while it goes on (`Moments.passing`).
        estimating: bytes besides, of an estimate of the curvature in its backward (`Moments.estimating`).
        orthogonal: what an update of muon multiplies and moves.
    """

    parameters: int
    gradients: int
    optimizer: int
    passing: tuple[Passing, ...]
    elements: int
    experts: int
    updating: int
    estimating: int
    orthogonal: Orthogonal


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
    parameters = gradients = elements = experts = 0
    passing = []
    moments = Moments(optimizer, policy.state.itemsize)
    for part in parts:
        stage = buckets_of(shape, layout, part, reduce, tp_index, *expert_index[1:])
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
        each = ([sizes[kind] for kind in stage.kind] for sizes in (wholes, chunks))
        passing.append(_passing(layout, part, stage, *each, compute, reduce))
    return StateBytes(
        parameters, gradients, moments.bytes, tuple(passing), elements, experts, moments.passing, moments.estimating,
        moments.orthogonal,
    )


def _passing(
    layout: Layout, part: StagePart, stage: Filled, wholes: Sequence[int], chunks: Sequence[int], compute: int,
    reduce: int,
) -> Passing:
    """What is whole at each moment of a backward.

    Args:
        wholes: elements of each bucket, padding included.
        chunks: of this rank's shard of each.
    """
    units = stage.used
    last = len(units) - 1
    tied = set(units[-1]) - set(stage.of_unit[-1])  # the embedding, which is in use from the head to the end

    def at(unit: int) -> Whole:
        ahead = layout.prefetch + 1 if layout.reshard_after_forward else len(units)
        there = units[max(0, unit + 1 - ahead) : unit + 1]
        needed = tied.union(*there) if layout.zero == 3 else set()
        made: set[int] = set()
        before: set[int] = set()
        second = third = 0
        if layout.zero >= 2:
            done = tied.union(*stage.of_unit[unit + 1 :]) if unit < last else set()
            before = done & tied.union(*stage.of_unit[: unit + 1])  # experts' wait for the next layer that has some
            made = tied.union(stage.of_unit[unit]) - before
            behind = done - before
            if layout.overlap and layout.shards > 1:
                if behind:
                    second = wholes[min(behind)] // layout.shards
                    before = before | {min(behind)}
                else:
                    second, third = wholes[0], wholes[0] // layout.shards
            else:  # the sum of a bucket that is complete, where its last matrix had memory of its own before
                complete = (before | made).difference(*stage.of_unit[:unit])
                narrow = compute / reduce if compute < 4 else 0
                second = max((max(0, int(chunks[b] - narrow * wholes[b])) for b in complete), default=0)
        gathered, reducing, going = (sum(wholes[b] for b in of) for of in (needed, made, before))
        return Whole(gathered * compute, reducing * reduce, going * reduce, second * reduce, third * reduce)

    top = max(0, last - part.last)  # the last layer
    turns: list[tuple[int, Whole]] = []
    if layout.zero >= 2:
        begun = tied.union(*stage.of_unit[top:])
        for unit in range(top - 1, int(part.first) - 1, -1):
            if not begun.issuperset(stage.of_unit[unit]) and len(turns) < TURNS:
                turns.append((top - unit, at(unit)))
            begun.update(stage.of_unit[unit])
    return Passing(at(last), at(top), at(min(int(part.first), last)), at(0), tuple(turns))


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
