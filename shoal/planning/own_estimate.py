"""Memory and time of a model of one's own on a layout: what one micro-batch computes, keeps and sends (`own_counts`),
priced as for models of the catalog."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shoal.base.errors import UsageError
from shoal.base.units import show_bytes, show_metric, show_seconds
from shoal.engine.own.check import check_own_model
from shoal.engine.own.definition import load_own_model
from shoal.engine.own.optimizer import count_states
from shoal.engine.precision.policy import POLICIES, Policy
from shoal.pipeline.from_layout import build_layout_program
from shoal.pipeline.program import Program
from shoal.pipeline.simulator import ActionTimes, MessageTimes, Timeline, simulate
from shoal.planning.auto.own_loss import is_planned, plan_loss
from shoal.planning.cost.memory.optimizer_state import least
from shoal.planning.cost.memory.stage import device_capacity, library_bytes
from shoal.planning.cost.time.communication import axis_extent, ring_group
from shoal.planning.cost.time.engine_layer import attained, attained_group, product_rate
from shoal.planning.own_counts import ChainCounts, OwnCounts, count_chain, count_own_model
from shoal.planning.run import KINDS
from shoal.spec.catalog.calibration import cluster_calibration
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.catalog.clusters import cluster as cluster_of
from shoal.spec.config import RunConfig
from shoal.spec.layout import Layout


@dataclass(frozen=True)
class OwnEstimate:
    """Estimate of a run of a model of one's own.

    Attributes:
        counts: of the rank whose memory is largest, for one micro-batch.
        memory: bytes of this rank by content, at the peak of a step.
        capacity: bytes of an accelerator that a process has.
        compute, tensor_parallel, data_parallel: seconds of a step on the busiest rank. Products run at the rate that
            large ones attain, so they are a lower bound.
        exposed: seconds of data parallelism that cannot be hidden by products.
        pipeline: seconds in which the busiest rank of a pipeline waits for others.
    """

    config: RunConfig
    cluster: Cluster
    counts: OwnCounts
    memory: dict[str, int]
    capacity: float
    compute: float
    tensor_parallel: float
    data_parallel: float
    exposed: float
    pipeline: float = 0.0

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, at least."""
        return self.compute + self.tensor_parallel + self.exposed + self.pipeline

    @property
    def fits(self) -> bool:
        """Whether the memory of an accelerator is enough."""
        return sum(self.memory.values()) <= self.capacity

    def summary(self) -> str:
        """Return the layout and its time in one line."""
        layout, plan = self.config.parallel, self.counts.plan
        split = ""
        if plan:
            ways = [kept for kept, *_ in plan.plan.weight_shardings().values()]
            split = f", {sum(bool(way.used) for way in ways)} of {len(ways)} weights split by operators"
        return (f"{layout.describe()}, micro_batch {layout.micro_batch}{split}: at least "
                f"{show_seconds(self.step_seconds)} a step on {self.cluster.describe()}")

    def lines(self) -> Iterator[str]:
        """Yield the estimate as text."""
        config, counts = self.config, self.counts
        batch, total = config.train.global_batch, sum(self.memory.values())
        yield (f"{config.model.title} on {config.parallel.describe()}, {self.cluster.describe()}, "
               f"{config.train.precision}, {batch} samples per step")
        how = "on the CPU, as it needs values" if counts.real else "on fake tensors"
        yield (f"  counted   {counts.parameters:,} parameters per rank, {show_metric(counts.flops, 'FLOP')} per "
               f"micro-batch of {config.parallel.micro_batch}, {how}")
        kinds = ", ".join(f"{kind} {show_bytes(size)}" for kind, size in self.memory.items() if size)
        yield f"  memory    {show_bytes(total)} of {show_bytes(self.capacity)} per rank: {kinds}"
        waits = f", idle in the pipeline {show_seconds(self.pipeline)}" if config.parallel.pp > 1 else ""
        yield (f"  step      at least {show_seconds(self.step_seconds)}: products {show_seconds(self.compute)}, tensor "
               f"parallelism {show_seconds(self.tensor_parallel)}, data parallelism {show_seconds(self.data_parallel)}"
               f" ({show_seconds(self.exposed)} not hidden){waits}")
        if not self.fits:
            yield "  does not fit: take a higher parallel.zero, tp or pp, a smaller micro_batch, or recompute = 'full'"


def estimate_own_model(
    config: RunConfig, cluster: str | Cluster = "8xH100", counts: OwnCounts | ChainCounts | None = None
) -> OwnEstimate:
    """Estimate a run of a model of one's own on a cluster.

    Args:
        counts: of its micro-batch, if they are known; by the modules of the chain for a pipeline.

    Raises:
        UsageError: the cluster is not known or too small, the layout has other axes or offloads, training refuses the
            settings, or the model or its first batch fails.

    >>> import shoal, torch
    >>> run = shoal.Run(
    ...     model=lambda: torch.nn.Linear(4, 1), loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
    ...     data=torch.ones(16, 4), global_batch=4,
    ... )
    >>> found = run.estimate(shoal.Layout(dp=2), cluster="8xH100")  # which calls this
    >>> found.counts.parameters, found.memory["weights"], found.fits
    (5, 20, True)
    """
    layout, train = config.parallel, config.train
    found = cluster_of(cluster) if isinstance(cluster, str) else cluster
    _check(config, found)
    if counts is None:
        own = load_own_model(config.model.module)
        planned = layout.tp > 1 and layout.pp == 1 and is_planned(own)
        if planned:
            check_own_model(config.replace(parallel={"tp": 1}))
            counts = plan_loss(own, config, found)
        else:
            check_own_model(config)
            counts = count_chain(own, config) if layout.pp > 1 else count_own_model(own, config)
    policy, links = POLICIES[train.precision], attained(found)
    program = build_layout_program(layout, layout.microbatches(train.global_batch), transfers=False)
    stages = [counts] if isinstance(counts, OwnCounts) else counts.assign(
        program, sequence_parallel=layout.sequence_parallel)
    if layout.recompute == "full":  # blocks compute in backward again, with their sums over ranks
        stages = [
            replace(each, saved=each.kept, flops=each.flops + each.again, sent=each.sent * 3 // 2,
                    sums=each.sums * 3 // 2) for each in stages
        ]
    else:
        stages = [replace(each, rebuilt=0) for each in stages]
    ranks = [OwnCounts.add([stages[i] for i in program.rank_stages(rank)]) for rank in range(program.ranks)]

    rate = product_rate(found, KINDS[policy.formats.compute.name])
    split = attained_group(found, *axis_extent(layout, "tp"))
    sums = [split.all_reduce(each.sent, each.sums) if layout.tp > 1 else 0.0 for each in stages]
    timeline = _simulate(layout, links, program, stages, sums, rate)
    kept = timeline.columns.peak_bytes(*(
        np.array([getattr(stage, of) for stage in stages], float) for of in ("saved", "between")
    ))
    memories = [
        _count_memory(config, found, policy, each, int(bytes_) + each.rebuilt, versions)
        for each, bytes_, versions in zip(ranks, kept, timeline.weight_versions.tolist(), strict=True)
    ]
    largest = max(range(len(ranks)), key=lambda rank: sum(memories[rank].values()))

    passes = program.microbatches
    busiest = int(np.argmax(timeline.busy[0]))
    compute = passes * ranks[busiest].flops / rate
    summed = passes * sum(sums[i] for i in program.rank_stages(busiest))
    moved = max((
        _price_data_parallelism(layout, found, each, policy, passes * each.flops / rate, passes, program.updates)
        for each in ranks
    ), key=lambda pair: pair[1])  # fmt: skip
    idle = max(0.0, timeline.compute_span - compute - summed)
    return OwnEstimate(
        config, found, ranks[largest], memories[largest], device_capacity(found, cluster_calibration(found)), compute,
        summed, *moved, idle,
    )  # fmt: skip


def _check(config: RunConfig, cluster: Cluster) -> None:
    layout, batch = config.parallel, config.train.global_batch
    if layout.offload != "none":
        raise UsageError(f"parallel.offload = {layout.offload!r}: estimates of a module of one's own do not count it."
                         "\n  Leave it out.")
    if layout.world_size != layout.dp * layout.tp * layout.pp:
        raise UsageError(f"{layout.describe()}: estimates of a module of one's own count parallel.dp, tp and pp."
                         "\n  Leave the others out.")
    if batch % (layout.dp * layout.micro_batch):
        raise UsageError(f"train.global_batch = {batch} is no multiple of dp {layout.dp} x micro_batch "
                         f"{layout.micro_batch}.\n  Use {layout.dp * layout.micro_batch}.")
    if layout.world_size > cluster.size:
        raise UsageError(f"{layout.describe()} needs {layout.world_size} accelerators, and {cluster.describe()} has "
                         f"{cluster.size}.\n  Give a larger --cluster, or lower parallel.dp, tp or pp.")


def _simulate(
    layout: Layout, cluster: Cluster, program: Program, stages: Sequence[OwnCounts], sums: Sequence[float], rate: float
) -> Timeline:
    """Simulate the products and messages of a step.

    Args:
        sums: seconds of tensor parallelism of a micro-batch in each stage, half of it in the forward.
        rate: FLOP/s of products.
    """
    half = np.array(sums) / 2
    forward = np.array([each.forward_flops / rate for each in stages]) + half
    late = np.array([each.weight_flops / rate for each in stages])
    backward = np.array([(each.flops - each.forward_flops) / rate for each in stages]) + half
    hop = ring_group(cluster, *axis_extent(layout, "pp"))
    size = max(each.message for each in stages)
    latency = hop.hop_latency + cluster_calibration(cluster).numbers["hop"]
    links = MessageTimes(size / hop.hop, latency) if layout.pp > 1 else MessageTimes()
    return simulate(program, ActionTimes(forward, backward - late, late), links)


def _count_memory(
    config: RunConfig, cluster: Cluster, policy: Policy, rank: OwnCounts, saved: int, versions: int
) -> dict[str, int]:
    """Return the bytes of a rank by content, with the activations that it keeps at its peak.

    Args:
        versions: of its weights, of an asynchronous pipeline. It computes with copies (`shoal.engine.weight_versions`).
    """
    layout, own = config.parallel, load_own_model(config.model.module)
    shards = layout.shards if layout.zero else 1
    storage, compute, reduce = policy.storage.itemsize, policy.compute.itemsize, policy.reduce.itemsize
    p, shard = rank.parameters, -(-rank.parameters // shards)
    if own.make_optimizer:
        states = count_states(own.make_optimizer, config.optimizer) * policy.state.itemsize
    else:
        states = least(config.optimizer.name, policy.state.itemsize)  # of matrices
    full = p * compute if layout.zero < 3 else 0
    master = shard * storage if layout.zero == 3 or storage != compute else 0
    copies = (shard if layout.zero == 3 else p) * compute * (versions - (layout.zero == 3)) if versions > 1 else 0
    blocks = max(1, rank.blocks)
    ahead = rank.in_blocks * min(1 + layout.prefetch, blocks) // blocks
    return {
        "weights": full + master + copies, "gradients": (p if layout.zero < 2 else shard) * reduce,
        "optimizer": int(shard * states), "activations": saved,
        "gathered": (p - rank.in_blocks + ahead) * compute if layout.zero == 3 else 0, "buffers": rank.frozen,
        "libraries": int(library_bytes(cluster, cluster_calibration(cluster))),
    }


def _price_data_parallelism(
    layout: Layout, cluster: Cluster, counts: OwnCounts, policy: Policy, products: float, passes: int, updates: int
) -> tuple[float, float]:
    """Return the seconds of a step's gathers and reductions, and those that products cannot hide.

    ZeRO-2 and 3 reduce in each micro-batch, others in the last (`shoal.engine.parallel.zero.zero_engine`). ZeRO-3
    gathers blocks for forward and for backward, and other parameters once for each micro-batch.

    Args:
        products: seconds of the products of a step.
        passes: micro-batches of a step.
        updates: of the weights in a step.
    """
    compute, reduce = policy.compute.itemsize, policy.reduce.itemsize
    shards, replicas = (attained_group(cluster, *axis_extent(layout, axis)) for axis in ("shard", "replicate"))
    size = counts.parameters * reduce
    reductions = passes if layout.zero >= 2 else updates
    reduced = reductions * shards.reduce_scatter(size) + updates * replicas.all_reduce(size / layout.shards)
    hidden = products * 2 / 3 * reductions / passes if layout.overlap else 0.0  # by these backwards
    if layout.zero < 3:
        gathered = updates * shards.all_gather(counts.parameters * compute)  # after each
        return reduced + gathered, max(0.0, reduced - hidden) + gathered
    times, rest = 2 if layout.reshard_after_forward else 1, counts.parameters - counts.in_blocks
    gathered = passes * shards.all_gather(rest * compute)
    blocks = passes * times * shards.all_gather(counts.in_blocks * compute)
    if counts.in_blocks and layout.prefetch:
        hidden = products  # the next block is gathered while one computes
    return gathered + blocks + reduced, gathered + max(0.0, blocks + reduced - hidden)
