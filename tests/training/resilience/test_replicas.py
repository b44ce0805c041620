"""Replicas that drift apart are found, and the rank that is out of line is named."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.section import plain
from shoal.engine.collectives.mesh import Mesh
from shoal.spec.config import build_config
from shoal.training.check import check
from shoal.training.resilience.replicas import CHUNK, SilentFailure, compare_replicas, find_differences, hash_bits
from shoal.training.step.engine import Engine
from tests.training.step.test_engine import Uneven, numbers_config

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).view(torch.uint8)


# ---- the hash --------------------------------------------------------------------------------------------------------


@given(st.sampled_from(DTYPES), st.integers(1, 200), st.data())
def test_any_flipped_bit_changes_the_hash(dtype, numel, data):
    x = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    before = hash_bits(x).item()
    assert hash_bits(x.clone()).item() == before
    at = data.draw(st.integers(0, numel * dtype.itemsize - 1))
    bits(x)[at] ^= 1 << data.draw(st.integers(0, 7))
    assert hash_bits(x).item() != before


def test_places_count_and_so_does_what_is_far_behind():
    x = torch.arange(2 * CHUNK + 10, dtype=torch.float32)
    for a, b in ((3, 4), (3, CHUNK + 3), (CHUNK + 3, 2 * CHUNK + 3)):
        y = x.clone()
        y[a], y[b] = x[b].item(), x[a].item()
        assert hash_bits(y).item() != hash_bits(x).item()
    assert hash_bits(torch.tensor(0.0)).item() != hash_bits(torch.tensor(-0.0)).item()
    assert hash_bits(torch.zeros(0)).item() == hash_bits(torch.zeros(0)).item()


# ---- the verdict -----------------------------------------------------------------------------------------------------


@given(st.integers(3, 6), st.data())
def test_the_minority_is_named_whoever_it_is(ranks, data):
    odd = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=(ranks - 1) // 2))
    every = [[("a", 1), ("b", 10 + rank if rank in odd else 2), ("c", 3)] for rank in range(ranks)]
    assert find_differences(every) == {"ranks": sorted(odd), "names": ["b"], "agreed": ranks - len(odd)}


def test_two_that_differ_are_both_named_and_what_each_has_alone_is_no_matter():
    every = [[("a", 1), ("b", 1)], [("a", 2)], [("c", 5)]]
    assert find_differences(every) == {"ranks": [0, 1], "names": ["a"], "agreed": 0}
    assert find_differences([[("a", 1)], [("b", 2)], []]) is None


# ---- real ranks ------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "dp 3": {"dp": 3, "micro_batch": 1},
    "dp 4, ZeRO-1": {"dp": 4, "zero": 1, "micro_batch": 1},
    "dp 2 x tp 2": {"dp": 2, "tp": 2, "micro_batch": 1},
    "dp 4 in shards of 2, ZeRO-3": {"dp": 4, "zero": 3, "zero_shard": 2, "micro_batch": 1},
}


def drift(values, rank: int, part: str) -> tuple[str, str] | None:
    """Train a step, compare, flip the lowest bit of one number on a rank, compare again: what is then said, of what."""
    config = build_config(values)
    engine = Engine(config, check(config), Mesh(config.parallel, dist.get_rank(), transport="backend"), Uneven(config))
    group = dist.group.WORLD
    compare_replicas(engine, 0, group)
    engine.step(0)
    compare_replicas(engine, 1, group)
    if part == "computed with":
        name, stage = "layers.0.mlp.down.weight", engine.stages[0].module
        victim = stage.layers["0"].mlp.down.weight.data
    else:
        name, (piece, *_) = next(iter(engine.parameters.weights().items()))
        victim = piece.tensor
    if dist.get_rank() == rank:
        bits(victim)[victim.element_size()] ^= 1
    try:
        compare_replicas(engine, 1, group)
    except SilentFailure as error:
        return f"{error.ranks}: {error}", name
    return None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_flipped_bit_on_one_rank_is_found_and_named(layout, pool):
    parallel = LAYOUTS[layout]
    config = numbers_config(parallel, train={"global_batch": 12}, optimizer={"clip_norm": 1.0})
    ranks = config.parallel.world_size
    part = "updated" if config.parallel.zero == 3 else "computed with"
    said = pool.run(drift, ranks, plain(config), 1, part)
    message, name = said[1]
    assert [told for told, _ in said] == [message] * ranks
    place = Mesh(config.parallel, 1).describe()
    others = {"dp 3": 2, "dp 4, ZeRO-1": 3}.get(layout)
    if others:
        assert message.startswith(f"[1]: after step 1: {place} differs from the {others} other replicas in {name}[")
    else:
        assert place in message and f"different values of {name}[" in message and "no majority" in message
