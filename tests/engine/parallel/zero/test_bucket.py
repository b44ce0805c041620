"""The arithmetic of buckets: whatever the sizes, each element lies in exactly one shard, run and piece."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.base.boxes import Box
from shoal.engine.collectives.mesh import DryMesh
from shoal.engine.parallel.placement import ParamPlacement
from shoal.engine.parallel.zero.bucket import Bucket, DataParallelGroups, Member
from shoal.engine.precision.policy import POLICIES
from shoal.spec.layout import Layout


@st.composite
def members(draw: st.DrawFn) -> list[Member]:
    """Parameters of awkward sizes, some a box of a larger whole, some padded along dim 0."""
    made = []
    for i in range(draw(st.integers(1, 5))):
        box = tuple(draw(st.lists(st.integers(1, 17), min_size=1, max_size=3)))
        before = tuple(draw(st.integers(0, 3)) for _ in box)
        whole = tuple(n + b + draw(st.integers(0, 2)) for n, b in zip(box, before, strict=True))
        local = (box[0] + draw(st.integers(0, 3)), *box[1:])
        sum_over = draw(st.sampled_from([(), ("tp",)]))
        split = ParamPlacement(f"p{i}", whole, Box(before, box), local, sum_over=sum_over, copies=1 + len(sum_over))
        made.append((nn.Parameter(torch.empty(0, dtype=torch.float64)), split))
    return made


def buckets(members: list, shards: int, *, keep_full: bool = True) -> list[Bucket]:
    """The bucket as each of the ranks that shard it has it."""
    return [
        Bucket(
            list(members), DataParallelGroups(None, None, None, shards, i, 1, 0), POLICIES["fp64"], torch.device("cpu"),
            keep_full=keep_full,
        )
        for i in range(shards)
    ]


def test_gathers_and_reductions_of_zero_3_on_cuda_use_two_groups() -> None:
    def are_apart(zero: int, device: str) -> bool:
        mesh = DryMesh(Layout(dp=4, zero=zero, zero_shard=2), 0)
        mesh.device = torch.device(device)
        groups = DataParallelGroups.along("replicas", mesh)
        assert groups.reduce_group.ranks == groups.shard_group.ranks
        return groups.reduce_group is not groups.shard_group

    found = {(zero, device) for zero in (1, 2, 3) for device in ("cpu", "cuda") if are_apart(zero, device)}
    assert found == {(3, "cuda")}


@settings(max_examples=100, deadline=None)
@given(members(), st.integers(1, 6))
def test_every_element_is_in_exactly_one_piece(made: list, shards: int) -> None:
    owners = {split.name: torch.zeros(split.global_shape, dtype=torch.int64) for _, split in made}
    for bucket in buckets(made, shards):
        for name, piece in bucket.pieces(bucket.master):
            assert tuple(piece.tensor.shape) == piece.box.shape
            owners[name][piece.box.slices] += 1
    for _, split in made:
        inside = torch.zeros(split.global_shape, dtype=torch.int64)
        inside[split.box.slices] = 1
        assert torch.equal(owners[split.name], inside)


@settings(max_examples=100, deadline=None)
@given(members(), st.integers(1, 6))
def test_segments_cover_a_shard_once_and_treat_each_parameter_as_its_split_says(made: list, shards: int) -> None:
    splits = {split.name: split for _, split in made}
    for bucket in buckets(made, shards):
        end = 0
        for run in bucket.segments:
            assert end <= run.start < run.stop <= bucket.chunk
            end = run.stop
            for name, _ in bucket.pieces(bucket.master[run.slice], run.start):
                assert (run.sum_over, run.copies) == (splits[name].sum_over, splits[name].copies)
        inside = min(bucket.chunk, max(0, bucket.numel - bucket.index * bucket.chunk))
        assert sum(run.stop - run.start for run in bucket.segments) == inside


@settings(max_examples=60, deadline=None)
@given(members(), st.integers(1, 4))
def test_what_is_written_into_pieces_is_what_the_parameters_are(made: list, shards: int) -> None:
    """Each rank writes its pieces; the shards end to end (what an all-gather makes) are the parameters."""
    wholes = {
        split.name: torch.arange(math.prod(split.global_shape), dtype=torch.float64).view(split.global_shape)
        for _, split in made
    }
    ranks = buckets(made, shards)
    for bucket in ranks:
        for name, piece in bucket.pieces(bucket.master):
            piece.tensor.copy_(wholes[name][piece.box.slices])
    last = ranks[-1]  # the parameters' data is that of the bucket which was built last
    last.full.copy_(torch.cat([bucket.master for bucket in ranks]))
    for slot in last.slots:
        box = slot.placement.box
        here = slot.parameter.data[tuple(slice(n) for n in box.shape)]
        assert torch.equal(here, wholes[slot.placement.name][box.slices])


def test_a_freed_bucket_has_no_memory_and_gathers_again() -> None:
    made = [(nn.Parameter(torch.empty(0)), ParamPlacement("w", (5, 3), Box.full((5, 3)), (5, 3)))]
    (bucket,) = buckets(made, 1, keep_full=False)
    assert bucket.full.untyped_storage().size() == 0
    bucket.master.fill_(2.0)
    bucket.gather()
    assert made[0][0].data.eq(2.0).all()
    bucket.free()
    assert bucket.full.untyped_storage().size() == 0
