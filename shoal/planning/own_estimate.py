"""Memory and time of a model of one's own on a layout, from one micro-batch on fake tensors.

The module's own forward and backward run without values (`torch._subclasses.FakeTensorMode`), or with values on the CPU
if they need them. Their FLOPs and saved tensors are counted, and priced as for models of the catalog.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shoal.base.errors import UsageError
from shoal.base.units import show_bytes, show_metric, show_seconds
from shoal.engine.own.blocks import group_parameters
from shoal.engine.own.check import check_own_model
from shoal.engine.own.definition import OwnModel, load_own_model
from shoal.engine.own.flops import count_flops
from shoal.engine.own.formats import autocast
from shoal.engine.own.optimizer import count_states
from shoal.engine.own.samples import OwnBatch, OwnDataset
from shoal.engine.own.tensor import InputSplitLinear, OutputSplitLinear, SplitEmbedding
from shoal.engine.own.trial import run_first
from shoal.engine.precision.policy import POLICIES, Policy
from shoal.planning.cost.memory.optimizer_state import STATES
from shoal.planning.cost.memory.stage import device_capacity, library_bytes
from shoal.planning.cost.time.communication import axis_extent, ring_group
from shoal.planning.cost.time.engine_layer import attained, product_rate
from shoal.spec.catalog.calibration import cluster_calibration
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.catalog.clusters import cluster as cluster_of
from shoal.spec.config import RunConfig
from shoal.spec.layout import Layout

OTHER_STATES = {"muon": 1.0, "adafactor": 0.0, "adam8bit": 0.5}
"""States per parameter of other optimizers of shoal, about, for matrices."""


@dataclass(frozen=True)
class OwnCounts:
    """Counts of one micro-batch on one of the ranks that split the layers.

    Attributes:
        parameters: trained elements of the rank.
        in_blocks: those in the definition's blocks.
        frozen: bytes of buffers and of parameters that are not trained.
        flops: of matrix products, forward and backward.
        saved: bytes kept for the backward, without the parameters.
        sent: bytes that tensor parallelism sums, forward and backward.
        real: whether values were needed.
    """

    parameters: int
    in_blocks: int
    frozen: int
    flops: int
    saved: int
    sent: int
    real: bool = False


@dataclass(frozen=True)
class OwnEstimate:
    """Estimate of a run of a model of one's own.

    Attributes:
        memory: bytes of a rank by content, at the peak of a step.
        capacity: bytes of an accelerator that a process has.
        compute, tensor_parallel, data_parallel: seconds of a step. Products run at the rate that large ones attain, so
            they are a lower bound.
        exposed: seconds of data parallelism that cannot be hidden by products.
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

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, at least."""
        return self.compute + self.tensor_parallel + self.exposed

    @property
    def fits(self) -> bool:
        """Whether the memory of an accelerator is enough."""
        return sum(self.memory.values()) <= self.capacity

    def lines(self) -> Iterator[str]:
        """Yield the estimate as text."""
        config, counts = self.config, self.counts
        batch, total = config.train.global_batch, sum(self.memory.values())
        yield (f"{config.model.name} on {config.parallel.describe()}, {self.cluster.describe()}, "
               f"{config.train.precision}, {batch} samples per step")
        how = "on the CPU, as it needs values" if counts.real else "on fake tensors"
        yield (f"  counted   {counts.parameters:,} parameters per rank, {show_metric(counts.flops, 'FLOP')} per "
               f"micro-batch of {config.parallel.micro_batch}, {how}")
        kinds = ", ".join(f"{kind} {show_bytes(size)}" for kind, size in self.memory.items() if size)
        yield f"  memory    {show_bytes(total)} of {show_bytes(self.capacity)} per rank: {kinds}"
        yield (f"  step      at least {show_seconds(self.step_seconds)}: products {show_seconds(self.compute)}, tensor "
               f"parallelism {show_seconds(self.tensor_parallel)}, data parallelism {show_seconds(self.data_parallel)}"
               f" ({show_seconds(self.exposed)} not hidden)")
        if not self.fits:
            yield "  does not fit: take a higher parallel.zero or tp, a smaller micro_batch, or recompute in the module"


def estimate_own_model(
    config: RunConfig, cluster: str | Cluster = "8xH100", counts: OwnCounts | None = None
) -> OwnEstimate:
    """Estimate a run of a model of one's own on a cluster.

    Args:
        counts: of its micro-batch, if they are known.

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
    if layout.offload != "none":
        raise UsageError(f"parallel.offload = {layout.offload!r}: estimates of a module of one's own do not count it."
                         "\n  Leave it out.")
    if layout.world_size != layout.dp * layout.tp:
        raise UsageError(f"{layout.describe()}: estimates of a module of one's own count parallel.dp and tp.\n  Leave "
                         "the others out.")
    found = cluster_of(cluster) if isinstance(cluster, str) else cluster
    if train.global_batch % (layout.dp * layout.micro_batch):
        raise UsageError(f"train.global_batch = {train.global_batch} is no multiple of dp {layout.dp} x micro_batch "
                         f"{layout.micro_batch}.\n  Use {layout.dp * layout.micro_batch}.")
    if layout.world_size > found.size:
        raise UsageError(f"{layout.describe()} needs {layout.world_size} accelerators, and {found.describe()} has "
                         f"{found.size}.\n  Give a larger --cluster, or lower parallel.dp or tp.")
    if counts is None:
        check_own_model(config)
    own, policy = load_own_model(config.model.module), POLICIES[train.precision]
    counts, links = counts or count_own_model(own, config), attained(found)
    shards = layout.shards if layout.zero else 1
    storage, compute, reduce = policy.storage.itemsize, policy.compute.itemsize, policy.reduce.itemsize
    p, shard = counts.parameters, -(-counts.parameters // shards)
    states = count_states(own.make_optimizer, config.optimizer) if own.make_optimizer else None
    if states is None:
        name = config.optimizer.name
        states = STATES[name] if name in STATES else OTHER_STATES[name]
    full = p * compute if layout.zero < 3 else 0
    master = shard * storage if layout.zero == 3 or storage != compute else 0
    blocks, calibration = max(1, len(own.blocks)), cluster_calibration(found)
    ahead = counts.in_blocks * min(1 + layout.prefetch, blocks) // blocks
    memory = {
        "weights": full + master, "gradients": (p if layout.zero < 2 else shard) * reduce,
        "optimizer": int(shard * states * policy.state.itemsize), "activations": counts.saved,
        "gathered": (p - counts.in_blocks + ahead) * compute if layout.zero == 3 else 0, "buffers": counts.frozen,
        "libraries": int(library_bytes(found, calibration)),
    }
    passes = layout.microbatches(train.global_batch)
    formats = policy.formats.compute.name
    kind = {"bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}.get(formats, "fp32")
    seconds = passes * counts.flops / product_rate(found, kind)
    ranks = ring_group(links, *axis_extent(layout, "tp"))
    summed = passes * ranks.all_reduce(counts.sent) if layout.tp > 1 else 0.0
    moved = _price_data_parallelism(layout, links, counts, compute, reduce, seconds, passes)
    return OwnEstimate(config, found, counts, memory, device_capacity(found, calibration), seconds, summed, *moved)


def _price_data_parallelism(
    layout: Layout, cluster: Cluster, counts: OwnCounts, compute: int, reduce: int, products: float, passes: int
) -> tuple[float, float]:
    """Return the seconds of a step's gathers and reductions, and those that products cannot hide.

    ZeRO-2 and 3 reduce in each micro-batch, others in the last (`shoal.engine.parallel.zero.zero_engine`). ZeRO-3
    gathers blocks for forward and for backward, and other parameters once for each micro-batch.

    Args:
        compute, reduce: bytes of an element of weights and of gradients.
        products: seconds of the products of a step.
        passes: micro-batches of a step.
    """
    shards, replicas = (ring_group(cluster, *axis_extent(layout, axis)) for axis in ("shard", "replicate"))
    size = counts.parameters * reduce
    reductions = passes if layout.zero >= 2 else 1
    reduced = reductions * shards.reduce_scatter(size) + replicas.all_reduce(size / layout.shards)
    hidden = products * 2 / 3 * reductions / passes if layout.overlap else 0.0  # by these backwards
    if layout.zero < 3:
        gathered = shards.all_gather(counts.parameters * compute)  # after the update
        return reduced + gathered, max(0.0, reduced - hidden) + gathered
    times, rest = 2 if layout.reshard_after_forward else 1, counts.parameters - counts.in_blocks
    gathered = passes * shards.all_gather(rest * compute)
    blocks = passes * times * shards.all_gather(counts.in_blocks * compute)
    if counts.in_blocks and layout.prefetch:
        hidden = products  # the next block is gathered while one computes
    return gathered + blocks + reduced, gathered + max(0.0, blocks + reduced - hidden)


# ---- counting ------------------------------------------------------------------------------------------------------


def count_own_model(own: OwnModel, config: RunConfig) -> OwnCounts:
    """Count the first micro-batch, on fake tensors if that is possible; see `run_first`.

    Raises:
        UsageError: the model or its loss fails.
    """
    policy, seed, tp = POLICIES[config.train.precision], config.train.seed, config.parallel.tp
    batch = OwnDataset(own, "train", seed).batch(range(config.parallel.micro_batch))
    counts, real = run_first(own, policy, seed, batch, partial(_count, own, policy), tp)
    return replace(counts, real=real)


def _count(own: OwnModel, policy: Policy, module: nn.Module, batch: OwnBatch) -> OwnCounts:
    sent = _SummedBytes(module)
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = group_parameters(module, [module.get_submodule(name) for name in own.blocks])[:-1] if own.blocks else []
    untrained = [x for x in (*module.parameters(), *module.buffers()) if not x.requires_grad]
    fixed = {_storage(x) for x in (*trained, *untrained, *batch.tensors())}
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in fixed:
            held[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with count_flops() as counter, saved_tensors_hooks(keep, lambda tensor: tensor):
        with autocast(policy, torch.device("cpu")):
            loss, _, _ = own.compute(module, batch.values)
        loss.backward()
    return OwnCounts(
        parameters=sum(p.numel() for p in trained),
        in_blocks=sum(p.numel() for group in groups for p in group if p.requires_grad),
        frozen=sum(x.numel() * x.element_size() for x in untrained),
        flops=counter.get_total_flops(), saved=sum(held.values()), sent=sent.bytes,
    )  # fmt: skip


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _SummedBytes:
    """Bytes that split layers sum: the outputs of those split by input, and the gradients of inputs of the others."""

    def __init__(self, module: nn.Module):
        self.bytes = 0
        self._last: Tensor | None = None
        for layer in module.modules():
            if isinstance(layer, (InputSplitLinear, SplitEmbedding)):
                layer.register_forward_hook(lambda _, args, y: self._add(y))
            elif isinstance(layer, OutputSplitLinear):
                layer.register_forward_pre_hook(lambda _, args: self._enter(args[0]))

    def _enter(self, x: Tensor) -> None:
        if x is not self._last:  # queries, keys and values share one
            self._last = x
            self._add(x)

    def _add(self, x: Tensor) -> None:
        self.bytes += x.numel() * x.element_size()
