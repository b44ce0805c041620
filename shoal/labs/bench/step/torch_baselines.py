"""torch's own way of each parallelism, tuned as its documents advise, on the same plain model.

Each function builds one rank of a contender and returns its step: from the step's number to this rank's share of the
mean loss [nats]; the ranks' shares add up to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
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
from shoal.labs.bench.contender import Step
from shoal.labs.bench.step.workload import OPTIMIZER, SEED, Workload, emulate_device
from shoal.training.step.engine_state import attention_kernel


def model(workload: Workload, kernel: Kernel) -> Transformer:
    """The whole plain model with the initial values that every contender starts from."""
    built = Transformer(workload.shape, kernel=kernel)
    initialise(built, SEED)
    return built


def best_kernel() -> Kernel:
    """The attention kernel that shoal takes, for the references too: what is compared is the parallelism."""
    return attention_kernel("auto", torch.device("cpu"), torch.float32)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Fused AdamW with weight decay on matrices only, as shoal has it."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in parameters:
        groups[parameter.dim() > 1].append(parameter)
    options = [
        {"params": members, "weight_decay": OPTIMIZER.weight_decay if decay else 0.0}
        for decay, members in groups.items()
        if members
    ]
    return torch.optim.AdamW(
        options, lr=OPTIMIZER.learning_rate, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, fused=True
    )


def _loop(
    module: nn.Module, optimizer: torch.optim.Optimizer, workload: Workload, part: int, parts: int, *,
    tokens: int, share: float, around: Callable[[], AbstractContextManager] = nullcontext,
) -> Step:
    """The usual loop: the loss is divided by ``tokens`` before backward, and ``share`` of it is reported."""

    def step(number: int) -> float:
        batch = workload.batch(number, part, parts)
        optimizer.zero_grad(set_to_none=True)
        with around():
            loss = module(batch.tokens, batch.targets) / tokens
            loss.backward()
        optimizer.step()
        return loss.item() * share

    return step


_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = next(name for name in ("forward_sync_buffers", "broadcast_buffers") if name in _ARGUMENTS)  # renamed


def plain(workload: Workload, rank: int, ranks: int, *, kernel: Kernel = "sdpa") -> Step:
    """One process, no wrapper."""
    module = model(workload, kernel)
    return _loop(module, adamw(module.parameters()), workload, 0, 1, tokens=workload.tokens, share=1.0)


def ddp(workload: Workload, rank: int, ranks: int, *, bucket_mb: float, device_seconds: float = 0.0) -> Step:
    """DistributedDataParallel, which averages gradients over the ranks."""
    whole = model(workload, best_kernel())
    if device_seconds:
        emulate_device(whole.layers.values(), device_seconds)
    module = DistributedDataParallel(
        whole,
        bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, static_graph=True,
        **{_SYNC_BUFFERS: False},  # type: ignore[arg-type]  # which argument it is depends on torch's version
    )
    tokens = workload.tokens // ranks
    return _loop(module, adamw(module.parameters()), workload, rank, ranks, tokens=tokens, share=1 / ranks)


def independent(workload: Workload, rank: int, ranks: int, *, device_seconds: float = 0.0) -> Step:
    """Processes that exchange nothing: each trains a model of its own on its part of the samples. No data parallelism
    that updates whole weights on every rank is faster."""
    module = model(workload, best_kernel())
    if device_seconds:
        emulate_device(module.layers.values(), device_seconds)
    tokens = workload.tokens // ranks
    return _loop(module, adamw(module.parameters()), workload, rank, ranks, tokens=tokens, share=1 / ranks)


def fsdp(workload: Workload, rank: int, ranks: int, *, reshard: bool = True) -> Step:
    """FSDP2: `fully_shard` on each block, on the embedding, and on the final norm and head, as torchtitan has it.

    Args:
        reshard: free parameters between forward and backward; without, it communicates as ZeRO-2 does.
    """
    module = model(workload, best_kernel())
    mesh = init_device_mesh("cpu", (ranks,))
    assert module.embed and module.norm and module.head, "a whole model has all of them"
    fully_shard(module.embed, mesh=mesh, reshard_after_forward=reshard)
    for layer in module.layers.values():
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard([module.norm, module.head], mesh=mesh, reshard_after_forward=False)
    fully_shard(module, mesh=mesh)
    tokens = workload.tokens // ranks
    return _loop(module, adamw(module.parameters()), workload, rank, ranks, tokens=tokens, share=1 / ranks)


class TorchCrossEntropy(CrossEntropy):
    """torch's own, which is the one that `loss_parallel` knows."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """As of `CrossEntropy`."""
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def dtensor(workload: Workload, rank: int, ranks: int, *, prepared: bool) -> Step:
    """DTensor's `parallelize_module` with a loss over the split vocabulary.

    Args:
        prepared: make each block's input a DTensor once, so that the gradients of the projections that share it are
            summed before they are reduced; else each of them is reduced by itself.
    """
    module = model(workload, best_kernel())
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
    share = 1.0 if rank == 0 else 0.0
    optimizer = adamw(module.parameters())
    return _loop(
        module, optimizer, workload, 0, 1, tokens=workload.tokens, share=share, around=loss_parallel
    )


def threaded(workload: Workload, rank: int, ranks: int, *, replicas: int) -> Step:
    """Data parallelism in one process with a thread for each replica, as torch.nn.DataParallel does it.

    The root scatters the batch, replicates its parameters, has a thread run each replica, gathers the gradients, adds
    them up, and updates alone. The replicas share one interpreter, whose lock only one thread holds at a time.
    """
    modules = [model(workload, best_kernel()) for _ in range(replicas)]
    weights: list[list[Tensor]] = [[*module.parameters()] for module in modules]
    root, *others = weights
    optimizer = adamw(modules[0].parameters())
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
        for parameters in weights:
            for parameter in parameters:
                parameter.grad = None
        losses = threads.map(run, range(replicas), [Batch(*part) for part in parts])
        total = sum(losses)
        for copy in others:
            torch._foreach_add_(_gradients(root), _gradients(copy))
        optimizer.step()
        return total

    return step


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
