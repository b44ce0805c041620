"""PipeDream's partition of a model of one's own, from the counts of the modules of its chain."""

from __future__ import annotations

from shoal.base.errors import UsageError
from shoal.engine.own.check import check_own_model
from shoal.engine.own.definition import load_own_model
from shoal.engine.precision.policy import POLICIES
from shoal.pipeline.partition import PipeDreamPartition, pipedream_partition
from shoal.planning.cost.time.communication import ring_group
from shoal.planning.cost.time.engine_layer import attained, product_rate
from shoal.planning.own_counts import count_chain
from shoal.planning.own_estimate import name_format
from shoal.spec.catalog.clusters import cluster as cluster_of
from shoal.spec.config import RunConfig
from shoal.spec.layout import Layout


def partition_own_model(config: RunConfig, cluster: str) -> tuple[PipeDreamPartition, tuple[str, ...]]:
    """Return PipeDream's partition of the modules of a pipeline over a cluster, and their names.

    A module's time is its FLOPs at the rate that large products attain, as in estimates.

    Raises:
        UsageError: there is no pipeline, the model or its first batch fails, or the cluster is not known.
    """
    config = config.model_copy(update={"parallel": Layout(micro_batch=config.parallel.micro_batch)})
    check_own_model(config)
    own, policy, found = load_own_model(config.model.module), POLICIES[config.train.precision], cluster_of(cluster)
    if not own.pipeline:
        raise UsageError("Run.partition: its OwnModel has no pipeline.\n  Give the names of modules that run one after "
                         "the other.")
    counts = count_chain(own, config)
    chain = counts.chain
    work = chain.flops if any(chain.flops) else (1,) * len(chain.names)
    rate, links = product_rate(found, name_format(policy)), attained(found)
    weights = [0.0] * len(work)
    for name, size in counts.sizes.items():
        weights[max(0, *chain.parts.get(name, (0,)))] += size * policy.reduce.itemsize
    inside, nodes = min(found.size, found.per_node), found.size // min(found.size, found.per_node)
    levels = [(inside, ring_group(links, inside).bandwidth)]
    if nodes > 1:
        levels.append((nodes, ring_group(links, nodes, inside).bandwidth))
    seconds = [counts.full.flops * each / sum(work) / rate for each in work]
    return pipedream_partition(seconds, weights, [*counts.messages[1:], 0], levels), chain.names
