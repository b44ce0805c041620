"""Data parallelism in one process, a thread for each replica: the baseline that processes are measured against.

It is what torch.nn.DataParallel does: the root *scatters* the batch, *replicates* its parameters, has a thread run each
replica, and *gathers* the gradients, which it adds up; then it alone updates. The replicas share one interpreter, whose
lock only one thread holds at a time, and all that is not forward and backward is the root's work.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from shoal.engine.data.batches import Batch
from shoal.labs.bench.step.torch_baselines import adamw, best_kernel, model
from shoal.labs.bench.step.workload import Workload


def data_parallel(workload: Workload, rank: int, ranks: int, *, replicas: int) -> Callable[[int], float]:
    """One process with so many replicas of one thread each; returns its step, as those of `references`."""
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
