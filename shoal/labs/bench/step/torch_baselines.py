"""torch's own implementation of each parallelism, tuned as its documentation advises, on the same plain model.

Each function builds one rank of a variant and returns its step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import init_device_mesh, pipelining
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from shoal.engine.data.batches import Batch
from shoal.engine.models.attention import Kernel
from shoal.engine.models.loss import IGNORE, CrossEntropy
from shoal.engine.models.transformer import Transformer, initialise
from shoal.engine.parallel.apply import keep_stage
from shoal.labs.bench.optimizers import build_torch
from shoal.labs.bench.step.workload import OPTIMIZER, SEED, Step, Workload, emulate_device
from shoal.pipeline.partition import balance_layers
from shoal.training.step.model_state import attention_kernel


def build_model(workload: Workload, kernel: Kernel | None = None, device_seconds: float = 0.0) -> Transformer:
    """Build the full plain model with the initial values of every variant, by default with the attention kernel that
    shoal chooses, so that only the parallelism differs; ``device_seconds`` as in `emulate_device`."""
    kernel = kernel or attention_kernel("auto", torch.device("cpu"), torch.float32)
    model = Transformer(workload.shape, kernel=kernel)
    initialise(model, SEED)
    emulate_device(model.layers.values(), device_seconds)
    return model


def build_loop(
    optimizer: Any, compute_loss: Callable[[int], Tensor], ranks: int, *,
    context: Callable[[], AbstractContextManager] = nullcontext, backward: Callable[[Tensor], Any] = Tensor.backward,
) -> Step:  # fmt: skip
    """Build the usual training step from a function of the step's number that returns this rank's mean loss."""

    def step(number: int) -> float:
        optimizer.zero_grad(set_to_none=True)
        with context():
            loss = compute_loss(number)
            backward(loss)
        optimizer.step()
        return loss.item() / ranks

    return step


def _train(
    module: nn.Module, workload: Workload, rank: int, ranks: int, *, sharded_batch: bool = True,
    context: Callable[[], AbstractContextManager] = nullcontext,
) -> Step:
    """Build the step of a module, on this rank's part of the batch or on the full batch."""

    def compute_loss(number: int) -> Tensor:
        batch = workload.batch(number, rank, ranks) if sharded_batch else workload.batch(number)
        return module(batch.tokens, batch.targets) / batch.targets.numel()

    return build_loop(build_torch(OPTIMIZER, module.parameters(), "fused"), compute_loss, ranks, context=context)


_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = next(name for name in ("forward_sync_buffers", "broadcast_buffers") if name in _ARGUMENTS)  # renamed


def plain(
    workload: Workload, rank: int, ranks: int, *, kernel: Kernel | None = None, device_seconds: float = 0.0
) -> Step:
    """No wrapper: several ranks train independent models, each on its part of the samples."""
    return _train(build_model(workload, kernel, device_seconds), workload, rank, ranks)


def ddp(workload: Workload, rank: int, ranks: int, *, bucket_mb: float, device_seconds: float = 0.0) -> Step:
    """DistributedDataParallel, which averages gradients over the ranks."""
    module = wrap_ddp(build_model(workload, device_seconds=device_seconds), bucket_mb)
    return _train(module, workload, rank, ranks)


def wrap_ddp(module: nn.Module, bucket_mb: float) -> DistributedDataParallel:
    """Wrap a module whose buffers do not change."""
    return DistributedDataParallel(
        module, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, static_graph=True,
        **{_SYNC_BUFFERS: False},  # type: ignore[arg-type]  # the argument's name depends on torch's version
    )


def fsdp(workload: Workload, rank: int, ranks: int, *, reshard: bool = True) -> Step:
    """FSDP2: `fully_shard` on each block, on the embedding, and on the final norm and head, like torchtitan. Without
    ``reshard`` parameters are kept between forward and backward, and it communicates like ZeRO-2."""
    module = build_model(workload)
    mesh = init_device_mesh("cpu", (ranks,))
    assert module.embed and module.norm and module.head, "a full model has all of them"
    for part in (module.embed, *module.layers.values()):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    fully_shard([module.norm, module.head], mesh=mesh, reshard_after_forward=False)
    fully_shard(module, mesh=mesh)
    return _train(module, workload, rank, ranks)


class TorchCrossEntropy(CrossEntropy):
    """torch's cross entropy, the only one that `loss_parallel` supports."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def dtensor(workload: Workload, rank: int, ranks: int, *, prepared: bool) -> Step:
    """DTensor's `parallelize_module` with a loss over the split vocabulary. With ``prepared`` each block's input is a
    DTensor, so that the gradients of the projections that share it are summed before one all-reduce; otherwise each has
    its own."""
    module = build_model(workload)
    column = ColwiseParallel(input_layouts=Replicate())
    blocks = {"attention": ("q", "k", "v", "out"), "mlp": ("gate", "up", "down")}
    plan: dict[str, ParallelStyle] = {"embed.token": RowwiseParallel(input_layouts=Replicate())}
    for block, (*first, last) in blocks.items():
        if prepared:
            inputs = (Replicate(), None) if block == "attention" else (Replicate(),)
            plan[f"layers.*.{block}"] = PrepareModuleInput(input_layouts=inputs, desired_input_layouts=inputs)
        plan |= {f"layers.*.{block}.{name}": column for name in first}
        plan[f"layers.*.{block}.{last}"] = RowwiseParallel()
    plan["head"] = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(module, init_device_mesh("cpu", (ranks,)), plan)
    module.loss = TorchCrossEntropy()
    return _train(module, workload, rank, ranks, sharded_batch=False, context=loss_parallel)


def threaded(workload: Workload, rank: int, ranks: int, *, replicas: int) -> Step:
    """Data parallelism in one process with a thread for each replica, like torch.nn.DataParallel.

    Each step copies the first replica's weights to the others, runs every replica on its part of the batch in a thread,
    adds up the gradients, and updates the first replica. The threads share the interpreter's lock.
    """
    modules = [build_model(workload) for _ in range(replicas)]
    weights: list[list[Tensor]] = [[*module.parameters()] for module in modules]
    root, *others = weights
    optimizer = build_torch(OPTIMIZER, modules[0].parameters(), "fused")
    threads = ThreadPoolExecutor(replicas, initializer=torch.set_num_threads, initargs=(1,))

    def run(replica: int, batch: Batch) -> float:
        loss = modules[replica](batch.tokens, batch.targets) / workload.tokens
        loss.backward()
        return loss.item()

    def step(number: int) -> float:
        batch = workload.batch(number)
        parts = zip(batch.tokens.chunk(replicas), batch.targets.chunk(replicas), strict=True)
        with torch.no_grad():
            for copy in others:
                torch._foreach_copy_(copy, root)
        for module in modules:
            module.zero_grad()
        loss = sum(threads.map(run, range(replicas), [Batch(*part) for part in parts]))
        for copy in others:
            torch._foreach_add_(_gradients(root), _gradients(copy))
        optimizer.step()
        return loss

    return step


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


MICROBATCHES = 8

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-1f1b": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Schedules that both have: torch's name by shoal's name."""


class StageModule(nn.Module):
    """A pipeline stage with the interface of torch's runtime: one tensor in, one out."""

    def __init__(self, part: Transformer):
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        """x: tokens [b, s] in the first stage, hidden states [b, s, h] in the others."""
        return self.part(x) if self.part.embed is not None else self.part(x[..., 0], hidden=x)


def pipeline(workload: Workload, rank: int, ranks: int, *, schedule: str) -> Step:
    """A pipeline with the same stages as shoal's; looped and V-shaped schedules have two on each rank. ``schedule`` is
    a class of `torch.distributed.pipelining.schedules`, without its prefix ``Schedule``."""
    kind = getattr(schedules, f"Schedule{schedule}")
    several = schedule not in ("GPipe", "1F1B")
    places = [rank]
    if several:
        places.append(2 * ranks - 1 - rank if "V" in schedule else ranks + rank)
    count = ranks * len(places)
    stages = []
    for place in places:
        part = build_model(workload)
        keep_stage(part, place, balance_layers(part.shape, count))
        stages.append(pipelining.PipelineStage(StageModule(part), place, count, torch.device("cpu")))
        # torch 2.11 connects all stages first, also two of one rank, which gloo cannot do and later releases leave out.
        setattr(stages[-1], "_get_init_p2p_neighbors_ops", list)  # noqa: B010
    cross_entropy = CrossEntropy()

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets) / workload.tokens

    runner = kind(stages if several else stages[0], MICROBATCHES, loss_fn=loss, scale_grads=False)
    parameters = (parameter for stage in stages for parameter in stage.submod.parameters())
    optimizer = build_torch(OPTIMIZER, parameters, "fused")
    first, last = 0 in places, count - 1 in places

    def step(number: int) -> float:
        batch = workload.batch(number)
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        inputs = (batch.tokens,) if first else ()
        outputs = {"target": batch.targets, "losses": losses} if last else {}
        runner.step(*inputs, **outputs)
        optimizer.step()
        return sum(loss.item() for loss in losses)

    return step
