"""Muon on matrices that several ranks hold parts of, in turns and runs of any size: threads stand for the ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.base.boxes import flat_range
from shoal.engine.optim import muon_distribution
from shoal.engine.optim.build import build
from shoal.engine.optim.shards import Shard, ShardPart, Shards
from shoal.spec.config import OptimizerConfig

SHAPES = {
    "layers.0.mlp.up.weight": (7, 5), "layers.0.mlp.experts.up": (3, 4, 6), "norm.weight": (7,),
    "layers.1.mlp.down.weight": (4, 9), "layers.1.attention.q.weight": (3, 3),
}


class Threads:
    """`Holders` of one thread, which remembers the most elements that it was given at once."""

    def __init__(self, ranks, index, barrier, given):
        self.ranks, self.index, self.barrier, self.given, self.most = ranks, index, barrier, given, (0, 0)

    def exchange(self, x):
        self.given[self.index] = x
        self.barrier.wait()
        found = [other.clone() for other in self.given]
        self.barrier.wait()
        return found

    def reduce_scatter(self, part, whole):
        self.most = max(self.most[0], whole.numel()), max(self.most[1], part.untyped_storage().nbytes() // 8)
        part.copy_(sum(self.exchange(whole)).view(self.ranks, -1)[self.index])

    def all_gather(self, whole, part):
        whole.copy_(torch.cat(self.exchange(part)))


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def updated(holders, cuts, copies):
    """All parameters after two updates, by one of ranks of which ``copies`` hold the same."""
    weights, shards, gradients = values(0), [], []
    owner = holders.index // copies
    for name, shape in SHAPES.items():
        n = weights[name].numel()
        ends = [0, *sorted(min(cut, n) for cut in cuts), n]
        start, stop = ends[owner], ends[owner + 1]
        if start < stop:
            parts = tuple(ShardPart(name, shape, box, at, copies) for at, box in flat_range(shape, start, stop))
            flat = weights[name].view(-1)[start:stop].clone()
            shards.append(Shard(flat, torch.zeros_like(flat), parts, decay=0.1, rate=0.5))
            gradients.append((name, slice(start, stop)))
    rule = build(OptimizerConfig(name="muon"), Shards(SHAPES, shards, torch.float64, holders=holders))
    for seed in (1, 2):
        gradient = values(seed)
        for shard, (name, place) in zip(shards, gradients, strict=True):
            shard.gradient.copy_(gradient[name].view(-1)[place])
        rule.step(0.1)
    return [(name, place, shard.weights) for shard, (name, place) in zip(shards, gradients, strict=True)]


@settings(deadline=None, max_examples=15)
@given(
    cuts=st.lists(st.integers(0, 72), max_size=3), copies=st.integers(1, 2), at_once=st.sampled_from([7, 20, 50, 999])
)
def test_no_matrix_knows_how_it_came_together(cuts, copies, at_once):
    ranks = copies * (len(cuts) + 1)
    before = muon_distribution.AT_ONCE
    (alone,) = [updated(Threads(1, 0, threading.Barrier(1), [None]), [], 1)]
    expected = {name: weights for name, _, weights in alone}
    assert not any(torch.equal(expected[name], w.view(-1)) for name, w in values(0).items())
    barrier, given = threading.Barrier(ranks, timeout=30), [None] * ranks
    holders = [Threads(ranks, i, barrier, given) for i in range(ranks)]
    try:
        muon_distribution.AT_ONCE = at_once
        with ThreadPoolExecutor(ranks) as pool:
            found = list(pool.map(lambda each: updated(each, cuts, copies), holders))
    finally:
        muon_distribution.AT_ONCE = before
    for name, place, weights in (piece for pieces in found for piece in pieces):
        torch.testing.assert_close(weights, expected[name][place], rtol=1e-12, atol=1e-12)
    for each in holders:
        assert each.most[0] <= max(at_once, ranks), "the buffer"
        assert each.most[1] <= max(at_once, 4 * 9), "what one rank works on: no more than one matrix that is larger"
