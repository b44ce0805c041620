"""The fastest layout of a model of one's own that fits, by its estimates."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.base.errors import UsageError, divisors
from shoal.base.units import show_bytes
from shoal.engine.own.check import check_own_model
from shoal.engine.own.definition import OwnModel, load_own_model
from shoal.engine.own.optimizer import check_optimizer
from shoal.engine.own.tensor import SplitRanks, apply_table
from shoal.planning.own_estimate import OwnCounts, OwnEstimate, count_own_model, estimate_own_model
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.catalog.clusters import cluster as cluster_of
from shoal.spec.config import RunConfig
from shoal.spec.layout import Layout

MOST_SAMPLES = 64  # in a micro-batch


def plan_own_model(config: RunConfig, cluster: str | Cluster, *, ranks: int | None = None) -> list[OwnEstimate]:
    """Estimate the layouts of a model of one's own on a cluster: dp, tp, ZeRO and the size of a micro-batch.

    Args:
        ranks: number of ranks (default: all accelerators).

    Returns:
        The estimates that fit, the fastest first; among equals, with less sharding.

    Raises:
        UsageError: none fits, or the model or its first batch fails.
    """
    check_own_model(config.model_copy(update={"parallel": Layout()}))
    found = cluster_of(cluster) if isinstance(cluster, str) else cluster
    size, least = ranks or found.size, None
    fitting: list[OwnEstimate] = []
    own = load_own_model(config.model.module)
    splits = _splits_states(own, config)
    for counted, counts in _count(own, config, size, splits=splits):
        for zero in (0, 1, 2, 3) if counted.parallel.dp > 1 and splits else (0,):
            layout = counted.parallel.model_copy(update={"zero": zero})
            estimate = estimate_own_model(counted.model_copy(update={"parallel": layout}), found, counts)
            if estimate.fits:
                fitting.append(estimate)
            if least is None or sum(estimate.memory.values()) < sum(least.memory.values()):
                least = estimate
    if least is None:
        raise UsageError(f"layout auto: no number of replicas on {size} ranks divides train.global_batch = "
                         f"{config.train.global_batch}.\n  Use a multiple of {size}.")
    if not fitting:
        layout, needed = least.config.parallel, show_bytes(sum(least.memory.values()))
        raise UsageError(f"layout auto: no layout on {size} x {found.accelerator.name} fits; the nearest, "
                         f"{layout.describe()} with micro_batch {layout.micro_batch}, needs {needed} per rank.\n  Use "
                         "a larger cluster, blocks, a table of tensor_parallel, or recompute in the module.")
    return sorted(fitting, key=lambda each: (round(each.step_seconds, 6), each.config.parallel.zero))


def _count(
    own: OwnModel, config: RunConfig, ranks: int, *, splits: bool
) -> Iterator[tuple[RunConfig, OwnCounts]]:
    """Yield configs with each degree of tensor parallelism and size of a micro-batch, and their counts."""
    batch = config.train.global_batch
    for tp in divisors(ranks):
        dp = ranks // tp
        if batch % dp or (tp > 1 and not (splits and _splits(own, tp))):
            continue
        micro_batch = 1
        while micro_batch <= MOST_SAMPLES and batch // dp % micro_batch == 0:
            layout = Layout(dp=dp, tp=tp, micro_batch=micro_batch)
            changed = config.model_copy(update={"parallel": layout})
            try:
                counts = count_own_model(own, changed)
            except UsageError:
                if tp > 1:  # its heads are not divisible
                    break
                raise
            yield changed, counts
            micro_batch *= 2


def _splits_states(own: OwnModel, config: RunConfig) -> bool:
    """Return whether the optimizer updates parts of parameters."""
    if not own.make_optimizer:
        return True
    try:
        check_optimizer(own.make_optimizer, config.optimizer, sharded=True)
    except UsageError:  # it needs full tensors
        return False
    return True


def _splits(own: OwnModel, tp: int) -> bool:
    try:
        apply_table(own.build_empty(), own.tensor_parallel, SplitRanks(None, 0, tp))
    except UsageError:  # no table, or sizes that it does not divide
        return False
    return True
