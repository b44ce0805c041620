"""What the replicas take together, whatever their number."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.data.order import OverlappingShards

few = st.integers(1, 6)


@given(few, st.integers(1, 100), st.floats(0, 2), st.integers(0, 5))
def test_overlapping_shards_cover_an_epoch_and_reach_into_the_next(replicas, samples, overlap, epoch):
    count, lengths = Counter(), []
    for r in range(replicas):
        sampler = OverlappingShards(replicas, r, samples, overlap)
        first = sampler(np.arange(2 * samples + 2))
        length = int((first < samples).sum())  # of this replica's part of epoch 0
        taken = sampler(np.arange(epoch * length, (epoch + 1) * length)) - epoch * samples
        assert ((taken >= 0) & (taken < samples)).all() and len(set(taken)) == length
        assert set(taken) == set(first[:length])  # positions of the epoch, which is in another order each time
        count.update(taken.tolist())
        lengths.append(length)
    assert set(count) == set(range(samples))
    own = samples / replicas
    assert all(length <= samples and length >= min(samples, int(own)) for length in lengths)
    if overlap == 0 and samples >= replicas:
        assert max(count.values()) == 1
