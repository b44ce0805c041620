"""Memory and time of a model of one's own on a layout, from one micro-batch on fake tensors.

The module's own forward and backward run without values (`torch._subclasses.FakeTensorMode`), or with values on the CPU
if they need them. Their FLOPs and saved tensors are counted, and priced as for models of the catalog.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from shoal.base.errors import UsageError
from shoal.base.units import show_bytes, show_metric, show_seconds
from shoal.engine.own.definition import OwnModel, drawing, load_own_model
from shoal.engine.own.optimizer import count_states
from shoal.engine.own.samples import OwnBatch, OwnDataset
from shoal.engine.own.tensor import InputSplitLinear, OutputSplitLinear, SplitEmbedding, SplitRanks, apply_table
from shoal.engine.own.user_code import explained
from shoal.engine.precision.policy import POLICIES, Policy
from shoal.planning.cost.memory.optimizer_state import STATES
from shoal.planning.cost.time.communication import axis_extent, ring_group
from shoal.planning.cost.time.engine_layer import attained, product_rate
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.catalog.clusters import cluster as cluster_of
from shoal.spec.config import RunConfig

OTHER_STATES = {"muon": 1.0, "adafactor": 0.0, "adam8bit": 0.5}
"""States per parameter of other optimizers of shoal, about, for matrices."""


@dataclass(frozen=True)
class OwnCounts:
    """Counts of one micro-batch on one of the ranks that split the layers.

    Attributes:
        parameters: trained elements of the rank.
        frozen: bytes of buffers and of parameters that are not trained.
        flops: of matrix products, forward and backward.
        saved: bytes kept for the backward, without the parameters.
        sent: bytes that tensor parallelism sums, forward and backward.
        real: whether values were needed.
    """

    parameters: int
    frozen: int
    flops: int
    saved: int
    sent: int
    real: bool


@dataclass(frozen=True)
class OwnEstimate:
    """Estimate of a run of a model of one's own.

    Attributes:
        memory: bytes of a rank by content, at the peak of a step.
        compute, tensor_parallel, data_parallel: seconds of a step. Products run at the rate that large ones attain, so
            they are a lower bound.
        exposed: seconds of data parallelism that the backward does not hide.
    """

    config: RunConfig
    cluster: Cluster
    counts: OwnCounts
    memory: dict[str, int]
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
        return sum(self.memory.values()) <= self.cluster.memory_bytes

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
        yield f"  memory    {show_bytes(total)} of {show_bytes(self.cluster.memory_bytes)} per rank: {kinds}"
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
        UsageError: the cluster is not known or too small, the layout has other axes, or the model or its first batch
            fails.

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
    blocks = max(1, len(own.blocks))
    memory = {
        "weights": full + master, "gradients": (p if layout.zero < 2 else shard) * reduce,
        "optimizer": int(shard * states * policy.state.itemsize), "activations": counts.saved,
        "gathered": p * compute * min(1 + layout.prefetch, blocks) // blocks if layout.zero == 3 else 0,
        "buffers": counts.frozen,
    }
    passes = layout.microbatches(train.global_batch)
    formats = policy.formats.compute.name
    kind = {"bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}.get(formats, "fp32")
    seconds = passes * counts.flops / product_rate(found, kind)
    ranks = ring_group(links, *axis_extent(layout, "tp"))
    summed = passes * ranks.all_reduce(counts.sent) if layout.tp > 1 else 0.0
    replicas = ring_group(links, *axis_extent(layout, "dp"))
    moved = replicas.all_reduce(p * reduce) if layout.dp > 1 else 0.0
    if layout.zero == 3 and layout.dp > 1:
        moved += passes * (2 if layout.reshard_after_forward else 1) * replicas.all_gather(p * compute)
    hidden = seconds * 2 / 3 / passes if layout.overlap else 0.0  # the backward of the last micro-batch
    return OwnEstimate(config, found, counts, memory, seconds, summed, moved, max(0.0, moved - hidden))


# ---- counting ------------------------------------------------------------------------------------------------------


def count_own_model(own: OwnModel, config: RunConfig) -> OwnCounts:
    """Count the first micro-batch, on fake tensors if that is possible.

    Raises:
        UsageError: the model or its loss fails on the CPU too.
    """
    policy, seed = POLICIES[config.train.precision], config.train.seed
    batch = OwnDataset(own, "train", seed).batch(range(config.parallel.micro_batch))
    try:
        with drawing(seed), FakeTensorMode(allow_non_fake_inputs=True) as fake:
            return _count(own, own.model(), batch.map(fake.from_tensor), config.parallel.tp, policy, real=False)
    except UsageError:
        raise
    except Exception:  # it reads values
        pass
    with explained("its loss()"), drawing(seed):
        return _count(own, own.build(seed), batch, config.parallel.tp, policy, real=True)


def _count(own: OwnModel, module: nn.Module, batch: OwnBatch, tp: int, policy: Policy, *, real: bool) -> OwnCounts:
    sent = _SummedBytes()
    if tp > 1:
        apply_table(module, own.tensor_parallel, SplitRanks(None, 0, tp))
        sent.watch(module)
    trained = [p for p in module.parameters() if p.requires_grad]
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(policy.compute)
    fixed = {_storage(x) for x in module.parameters()}
    fixed |= {_storage(value) for value in batch.tensors()}
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in fixed:
            held[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    narrow = policy.compute.itemsize < 4
    counter = FlopCounterMode(display=False)
    cast: Any = torch.autocast("cpu", policy.compute) if narrow else nullcontext()
    module.train()
    with counter, _decomposed(), saved_tensors_hooks(keep, lambda tensor: tensor):
        with cast:
            loss, _, _ = own.compute(module, batch.values)
        loss.backward()
    frozen = sum(x.numel() * x.element_size() for x in (*module.parameters(), *module.buffers()) if not x.requires_grad)
    return OwnCounts(sum(p.numel() for p in trained), frozen, counter.get_total_flops(), sum(held.values()),
                     sent.bytes, real)  # fmt: skip


@contextmanager
def _decomposed() -> Iterator[None]:
    """Let recurrent layers be products: as one operator, they are not counted."""
    before = torch.backends.mkldnn.set_flags(_enabled=False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before[0])


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _SummedBytes:
    """Bytes that split layers sum: the outputs of those split by input, and the gradients of inputs of the others."""

    def __init__(self) -> None:
        self.bytes = 0
        self._last: Tensor | None = None

    def watch(self, module: nn.Module) -> None:
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
