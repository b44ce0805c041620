"""Train on sequences whose activations one device has no room for, and count what each rank keeps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from pydantic import PositiveFloat, PositiveInt
from rich.console import Console
from torch import Tensor

from shoal.base.units import show_bytes, show_seconds
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.cpu_tuning import tune_process
from shoal.engine.data.batches import SyntheticDataset
from shoal.engine.device import peak_memory
from shoal.labs.bench.benchmark import Benchmark, Say, make_table
from shoal.labs.bench.context import SLOW
from shoal.launch.worker_pool import Pool
from shoal.planning.cost.memory import activations
from shoal.planning.cost.micro_batch import MicroBatch
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig, build_config
from shoal.spec.layout import Layout
from shoal.spec.layout.sizes import check_layout
from shoal.spec.number_formats import FORMATS
from shoal.training.step.engine import Engine

MIB = 2**20


@dataclass(frozen=True)
class Kept:
    """One rank's training on long sequences.

    Attributes:
        loss: of every step.
        kept: bytes that a forward left for its backward, tensors counted once, weights not at all.
        seconds: of the last step.
        peak: bytes of the process at the most.
    """

    loss: list[float]
    kept: int
    seconds: float
    peak: int


class LongContextBenchmark(Benchmark):
    """Train on sequences whose activations one device has no room for; exit code 1 if a rank has none either, or one
    device would have had it."""

    ranks: PositiveInt = 4
    """Context-parallel ranks, each of one thread."""

    ulysses: PositiveInt = 1
    """How many of them exchange tokens for heads."""

    tokens: PositiveInt = 32768
    """Tokens of a sequence."""

    layers: PositiveInt = 2
    """Layers of the model, whose other sizes are those of tiny."""

    steps: PositiveInt = 2
    """Training steps, one sequence each."""

    budget_mib: PositiveFloat = 512.0
    """Room for what a forward leaves for its backward, on each device."""

    def run(self, console: Console, say: Say) -> bool:
        """Train, count what every rank kept, and compare with the budget and with one device, by formula."""
        config = build_config({
            "model": {"name": "tiny", "layers": self.layers},
            "parallel": {"cp": self.ranks, "ulysses": self.ulysses},
            "data": {"source": "synthetic", "sequence_length": self.tokens},
            "train": {"global_batch": 1, "steps": self.steps, "precision": "fp32"},
        })
        shape = config.model.shape(vocab=257, sequence_length=self.tokens)
        check_layout(config.parallel, shape, global_batch=1, sequence_length=self.tokens)
        one = MicroBatch(shape, Layout(), self.tokens, FORMATS["fp32"].compute.itemsize)
        alone = activations.total(activations.stage(one, range(self.layers), first=True, last=True))
        limit = 3600.0 + self.steps * self.tokens * shape.flops_per_token(self.tokens) / SLOW
        with Pool(self.ranks, setup=tune_process) as pool:
            ranks = pool.run(_train, self.ranks, config, shape, self.steps, timeout=limit)
        budget, most = self.budget_mib * MIB, max(rank.kept for rank in ranks)
        console.print(
            f"{self.tokens:,} tokens, {shape.layers} layers, {shape.parameters():,} parameters, "
            f"{config.parallel.describe()}: losses {', '.join(f'{loss:.4f}' for loss in ranks[0].loss)}; "
            f"{show_seconds(max(rank.seconds for rank in ranks))} a step", highlight=False, soft_wrap=True,
        )
        console.print(make_table(f"activations kept for backward; budget {show_bytes(budget)}", [
            {"": where, "bytes": show_bytes(size), "of the budget": size / budget}
            for where, size in (("one device, by formula", alone), ("fullest rank, counted", most))
        ]))  # fmt: skip
        console.print(f"largest process: {show_bytes(max(rank.peak for rank in ranks))} in all", highlight=False)
        return makes_room(alone, most, budget)


def makes_room(alone: float, most: float, budget: float) -> bool:
    """Whether every rank stays inside a budget [bytes] that one device would not."""
    return most <= budget < alone


def _train(config: RunConfig, shape: ModelShape, steps: int) -> Kept:
    mesh = Mesh(config.parallel, dist.get_rank())
    samples = SyntheticDataset(shape.vocab, config.data.sequence_length, config.train.seed)
    engine = Engine(config, shape, mesh, samples)
    losses: list[float] = []
    begin = time.perf_counter()  # of the first, where there is no other
    with counted(engine) as kept:
        losses.append(engine.step(0).loss)
    for step in range(1, steps):
        begin = time.perf_counter()
        losses.append(engine.step(step).loss)
    return Kept(losses, sum(kept.values()), time.perf_counter() - begin, peak_memory(mesh.device))


@contextmanager
def counted(engine: Engine) -> Iterator[dict[int, int]]:
    """Bytes, by address, of all that autograd keeps in this context, but for parameters."""
    weights = {bucket.full.untyped_storage().data_ptr() for bucket in engine.parameters.buckets}
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = max(storage.nbytes(), found.get(storage.data_ptr(), 0))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield found
