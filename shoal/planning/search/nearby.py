"""Runs beside an awkward one: the nearest global batches that divide into more replicas, and fewer devices.

The devices of a cluster whose size has a factor that the batch lacks (25 nodes and 512 sequences) cannot all be
replicas: that factor has to be pipeline stages. A batch a little larger or smaller, or a few devices less, may then
train more tokens per second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import gcd

from shoal.base.errors import divisors
from shoal.planning.run import EstimatedRun
from shoal.spec.catalog.clusters import Cluster

FARTHEST = 1 / 8  # maximum relative change of the global batch
FEWEST = 1 / 2  # minimum part of the devices
MORE = 2  # how much larger the common divisor of batch and devices is in each further run


def nearest_batches(batch: int, devices: int, more: int = MORE) -> list[int]:
    """Return global batches near one, each of which divides into more replicas than all nearer ones; nearest first.

    >>> nearest_batches(512, 200), nearest_batches(512, 256)
    ([520, 500], [])
    """
    multiples = {multiple for n in divisors(devices) for multiple in (batch // n * n, -(-batch // n) * n)}
    near = sorted(multiples - {0}, key=lambda n: (abs(n - batch), -gcd(n, devices)))
    most = gcd(batch, devices)
    return [n for n in _rising(near, devices, most, more) if abs(n - batch) <= FARTHEST * batch]


def smaller_clusters(cluster: Cluster, batch: int, more: int = MORE) -> Iterator[Cluster]:
    """Yield parts of a cluster over which a batch divides into more replicas than over all larger ones; largest first.

    A part has fewer nodes, or for one node fewer devices. Slices of pods have no parts.
    """
    if cluster.torus:
        return
    each = 1 if cluster.nodes == 1 else cluster.per_node
    sizes = range((cluster.size - 1) // each * each, int(FEWEST * cluster.size / each) * each, -each)
    for size in _rising(sizes, batch, gcd(batch, cluster.size), more):
        yield cluster.part(1, size) if cluster.nodes == 1 else cluster.part(size // each)


def _rising(numbers: Iterable[int], other: int, most: int, more: int) -> Iterator[int]:
    """Yield numbers whose greatest common divisor with another is ``more`` times that of all before."""
    for n in numbers:
        if gcd(n, other) >= more * most:
            most = gcd(n, other)
            yield n


def nearby_runs(run: EstimatedRun, more: int = MORE) -> tuple[list[EstimatedRun], list[EstimatedRun]]:
    """Return the run with other global batches, and on fewer devices; nearest first.

    Args:
        more: how much larger the common divisor of batch and devices is in each further run; 0 for all runs.
    """
    batches = [replace(run, global_batch=n) for n in nearest_batches(run.global_batch, run.cluster.size, more)]
    return batches, [replace(run, cluster=part) for part in smaller_clusters(run.cluster, run.global_batch, more)]
