"""Exact bytes that persist between steps on a rank: parameters, gradients and optimizer states.

Counts what `shoal.engine.parallel` builds on a rank, without building it: the parameters of its stages, their
tensor-parallel split, their buckets, and the boundaries of ZeRO's equal shards. With P parameters on N ranks, in bf16
with fp32 Adam, that is (Rajbhandari et al. 2020, figure 1)

    stage 0: 16 P    stage 1: 4 P + 12 P/N    stage 2: 2 P + 14 P/N    stage 3: 16 P/N

in the paper's accounting. Shoal keeps gradients in fp32, which gives 18 P for stage 0. With stage 3 it keeps no bf16
shard besides the fp32 one, which gives 16 P/N again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.planning.cost.buckets import cut_buckets, fill_buckets, replica_layout
from shoal.planning.cost.memory.optimizer_state import Moments, Orthogonal
from shoal.planning.cost.parameters import StagePart
from shoal.spec.catalog import ModelShape
from shoal.spec.layout import Layout
from shoal.spec.number_formats import Formats


class StateBytes(NamedTuple):
    """State bytes on one rank."""

    parameters: int  # unsharded and master parameters between steps (`RankParameters.bytes`)
    gradients: int  # gradients between steps
    optimizer: int  # optimizer states (`Rule.bytes`)
    elements: int  # number of local parameters, without padding
    experts: int  # number of local expert parameters among them
    updating: int  # extra bytes during an update (`Moments.passing`)
    estimating: int  # extra bytes during the backward of a curvature estimate (`Moments.estimating`)
    orthogonal: Orthogonal  # matrices that a Muon update multiplies and communicates


def state_bytes(
    shape: ModelShape, layout: Layout, policy: Formats, optimizer: str, parts: Sequence[StagePart],
    *, tp_index: int = 0, shard_index: int = 0, expert_index: tuple[int, int, int] = (0, 0, 0),
) -> StateBytes:
    """Return the state bytes of one rank.

    Args:
        tp_index: index along tp; the last rank has the least of a vocabulary that tp does not divide.
        shard_index: index of its state shard, among `Layout.shards`.
        expert_index: indices along edp_shard, ep and etp.
    """
    index = shard_index if layout.sync == "all-reduce" else 0
    layout = replica_layout(layout)
    zero = layout.zero
    storage, compute, reduce = policy.storage.itemsize, policy.compute.itemsize, policy.reduce.itemsize
    parameters = gradients = elements = experts = 0
    moments = Moments(optimizer, policy.state.itemsize)
    for part in parts:
        stage = fill_buckets(shape, layout, part, reduce, tp_index, *expert_index[1:])
        chunks, full_sizes = cut_buckets(layout, stage)
        for size, chunk, full in zip(stage.sizes, chunks, full_sizes, strict=True):
            if zero < 3:
                parameters += full * compute + (0 if storage == compute else chunk * storage)
            else:
                parameters += chunk * storage
            gradients += (full if zero < 2 else chunk) * reduce
            elements += size.elements
            experts += size.elements if size.expert else 0
        moments.add(stage, chunks, {False: index, True: expert_index[0]})
    return StateBytes(
        parameters, gradients, moments.bytes, elements, experts, moments.passing, moments.estimating, moments.orthogonal
    )
