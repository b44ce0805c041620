"""The fastest layout of a model of one's own that fits, by its estimates, and PipeDream's partition of its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from shoal.base.errors import UsageError, divisors
from shoal.base.units import show_bytes
from shoal.engine.own.chain import find_chain
from shoal.engine.own.check import check_own_model
from shoal.engine.own.definition import OwnModel, load_own_model
from shoal.engine.own.optimizer import check_optimizer
from shoal.engine.own.samples import OwnDataset
from shoal.engine.own.tensor.layers import SplitRanks
from shoal.engine.own.tensor.table import apply_table
from shoal.engine.precision.policy import POLICIES
from shoal.pipeline.partition import PipeDreamPartition, pipedream_partition
from shoal.planning.auto.own_loss import plan_loss
from shoal.planning.cost.time.communication import ring_group
from shoal.planning.cost.time.engine_layer import attained, product_rate
from shoal.planning.own_counts import ChainCounts, OwnCounts, count_chain, count_own_model
from shoal.planning.own_estimate import OwnEstimate, estimate_own_model
from shoal.planning.run import KINDS
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.catalog.clusters import cluster as cluster_of
from shoal.spec.config import RunConfig
from shoal.spec.layout import Layout

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Samples of a micro-batch."""


class OwnLayouts(NamedTuple):
    """Layouts of a model of one's own."""

    fitting: list[OwnEstimate]  # estimates that fit, the fastest first; among equals, with less sharding
    # the definition, with a pipeline along the longest list of its modules if it has none and this is a chain
    own: OwnModel
    unsplit: str = ""  # why the operators of a model without a table cannot be split; empty if they can

    @property
    def best(self) -> OwnModel:
        """The definition with what the fastest layout needs: a plan of its operators, a pipeline, or neither."""
        fastest = self.fitting[0]
        plan, layout = fastest.counts.plan, fastest.config.parallel
        own = self.own if layout.pp > 1 or layout.recompute == "full" else load_own_model(fastest.config.model.module)
        return replace(own, tensor_parallel=plan) if plan else own


def plan_own_model(config: RunConfig, cluster: str | Cluster) -> OwnLayouts:
    """Estimate the layouts of a model of one's own on a cluster: dp, tp, pp, ZeRO, the size of a micro-batch, and
    recomputation where a layout does not fit without. Without a table, tp splits operators as `plan_loss` finds.

    Raises:
        UsageError: none fits, or the model or its first batch fails.
    """
    check_own_model(config.model_copy(update={"parallel": Layout()}))
    found = cluster_of(cluster) if isinstance(cluster, str) else cluster
    size, least = found.size, None
    fitting: list[OwnEstimate] = []
    own = _with_chain(load_own_model(config.model.module), config)
    splits = not own.make_optimizer or _accepts(check_optimizer, own.make_optimizer, config.optimizer, sharded=True)
    unsplit = ""
    options: Iterator[tuple[RunConfig, OwnCounts | ChainCounts]] = _count(own, config, size, splits=splits)
    given = own.tensor_parallel
    table = isinstance(given, Mapping) or (given is None and getattr(own.build_empty(), "tp_plan", None))
    if splits and not table:
        try:
            options = chain(options, [*_split_operators(own, config, found, size)])
        except UsageError as error:
            unsplit = str(error)
    for counted, counts in options:
        for zero in range(4) if counted.parallel.dp > 1 and splits else (0,):
            again = (own.blocks or own.pipeline) and not (isinstance(counts, OwnCounts) and counts.plan)
            for recompute in ("none", "full") if again else ("none",):
                layout = counted.parallel.model_copy(update={"zero": zero, "recompute": recompute})
                estimate = estimate_own_model(counted.model_copy(update={"parallel": layout}), found, counts)
                if least is None or sum(estimate.memory.values()) < sum(least.memory.values()):
                    least = estimate
                if estimate.fits:
                    fitting.append(estimate)
                    break
    if least is None:
        raise UsageError(f"layout auto: no number of replicas on {size} ranks divides train.global_batch = "
                         f"{config.train.global_batch}.\n  Use a multiple of {size}.")
    if not fitting:
        layout, needed = least.config.parallel, show_bytes(sum(least.memory.values()))
        raise UsageError(f"layout auto: no layout on {size} x {found.accelerator.name} fits; the nearest, "
                         f"{layout.describe()} with micro_batch {layout.micro_batch}, needs {needed} per rank.\n  Use "
                         "a larger cluster, blocks, a pipeline or a table of tensor_parallel."
                         + (f" Its operators are not split: {unsplit}" if unsplit else ""))
    fitting.sort(key=lambda each: (
        round(each.step_seconds, 6), each.config.parallel.pp, each.counts.plan is not None, each.config.parallel.zero
    ))  # fmt: skip
    return OwnLayouts(fitting, own, unsplit)


def _count(
    own: OwnModel, config: RunConfig, ranks: int, *, splits: bool
) -> Iterator[tuple[RunConfig, OwnCounts | ChainCounts]]:
    """Yield configs with each degree of tensor and pipeline parallelism and size of a micro-batch, and their counts."""
    batch = config.train.global_batch
    for tp in divisors(ranks):
        layouts = [
            Layout(dp=ranks // tp // pp, tp=tp, pp=pp, micro_batch=n)
            for n in MICRO_BATCHES for pp in divisors(ranks // tp)
            if batch % (ranks // tp // pp * n) == 0 and (pp == 1 or (own.pipeline and ranks // tp * n <= batch))
        ]
        if not layouts:
            continue
        table = own.tensor_parallel
        if tp > 1 and not (splits and _accepts(apply_table, own.build_empty(), table, SplitRanks(None, 0, tp))):
            continue  # no table, or sizes that it does not divide
        kind = count_chain if max(layout.pp for layout in layouts) > 1 else count_own_model
        try:
            one, *two = (
                kind(own, config.model_copy(update={"parallel": Layout(tp=tp, micro_batch=n)}))
                for n in (1, 2) if any(layout.micro_batch >= n for layout in layouts)
            )
        except UsageError:
            if tp > 1:  # its heads are not divisible
                continue
            raise
        for layout in layouts:
            counts = one.extend(two[0], layout.micro_batch) if two else one  # type: ignore[arg-type]  # of one kind
            if isinstance(counts, ChainCounts) and layout.pp > len(counts.chain.names):
                continue
            of = counts.full if isinstance(counts, ChainCounts) and layout.pp == 1 else counts
            yield config.model_copy(update={"parallel": layout}), of


def _split_operators(
    own: OwnModel, config: RunConfig, cluster: Cluster, ranks: int
) -> Iterator[tuple[RunConfig, OwnCounts]]:
    """Yield configs with each degree of tensor parallelism, and counts with a plan of the operators.

    Micro-batches are as large as fits: this sends the least.
    """
    for tp in divisors(ranks)[1:]:
        dp = ranks // tp
        for n in reversed(MICRO_BATCHES):
            if config.train.global_batch % (dp * n):
                continue
            layout = Layout(dp=dp, tp=tp, micro_batch=n, zero=3 if dp > 1 else 0)
            counted = config.model_copy(update={"parallel": layout})
            counts = plan_loss(own, counted, cluster)
            yield counted, counts
            if estimate_own_model(counted, cluster, counts).fits:
                break


def _with_chain(own: OwnModel, config: RunConfig) -> OwnModel:
    """Return a definition with a pipeline along the longest list of its modules, if it names none and this is one."""
    if own.pipeline:
        return own
    found, seed = replace(own, pipeline="auto"), config.train.seed
    batch = OwnDataset(own, "train", seed).batch(range(1))
    try:
        find_chain(found, POLICIES[config.train.precision], seed, batch)
    except UsageError:  # no list, or no chain
        return own
    return found


def _accepts(check: Callable[..., object], *arguments: Any, **options: Any) -> bool:
    """Return whether a check raises no `UsageError`."""
    try:
        check(*arguments, **options)
    except UsageError:
        return False
    return True


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
    rate, links = product_rate(found, KINDS[policy.formats.compute.name]), attained(found)
    weights = [0.0] * len(counts.modules)
    for name, size in counts.sizes.items():
        weights[max(0, *counts.chain.parts.get(name, (0,)))] += size * policy.reduce.itemsize
    inside, nodes = min(found.size, found.per_node), found.size // min(found.size, found.per_node)
    levels = [(inside, ring_group(links, inside).bandwidth)]
    if nodes > 1:
        levels.append((nodes, ring_group(links, nodes, inside).bandwidth))
    seconds = [each.flops / rate for each in counts.modules]
    messages = [*(each.message for each in counts.modules[1:]), 0]
    return pipedream_partition(seconds, weights, messages, levels), counts.chain.names
