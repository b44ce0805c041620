"""What divides better than the given batch and devices: nearest first, each far better than the one before."""

from itertools import pairwise
from math import gcd

from hypothesis import given
from hypothesis import strategies as st

from shoal.planning.search.nearby import nearest_batches, smaller_clusters
from shoal.spec.catalog.clusters import cluster


@given(st.integers(1, 600), st.integers(1, 300))
def test_batches_near_one_divide_into_more_replicas(batch, devices):
    found = nearest_batches(batch, devices)
    shared = [gcd(n, devices) for n in (batch, *found)]
    assert all(more >= 2 * fewer for fewer, more in pairwise(shared))
    distances = [abs(n - batch) for n in found]
    assert distances == sorted(distances) and all(8 * distance <= batch for distance in distances)
    for n in range(max(1, batch - batch // 8), batch + batch // 8 + 1):  # none was left out
        best = max([shared[0], *(s for s, d in zip(shared[1:], distances, strict=True) if d <= abs(n - batch))])
        assert gcd(n, devices) < 2 * best


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 600))
def test_parts_of_a_cluster_take_the_batch_on_more_replicas(nodes, per_node, batch):
    whole = cluster(f"{nodes}x{per_node}xH100-IB400")
    each = per_node if nodes > 1 else 1
    sizes = []
    for part in smaller_clusters(whole, batch):
        assert part.per_node == (per_node if nodes > 1 else part.size)
        sizes.append(part.size)
    expected, most = [], gcd(batch, whole.size)
    for size in range(whole.size - each, 0, -each):
        if 2 * size > whole.size and gcd(batch, size) >= 2 * most:
            most = gcd(batch, size)
            expected.append(size)
    assert sizes == expected
    assert list(smaller_clusters(cluster("v5p-8"), batch)) == []
