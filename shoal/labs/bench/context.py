"""Context parallelism: the ring against its blocks without transfers; and sequences that do not fit on one device."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from pydantic import PositiveFloat, PositiveInt
from rich.console import Console
from torch import Tensor

from shoal.base.errors import UsageError
from shoal.base.units import show_bytes, show_seconds
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import Pending
from shoal.engine.cpu_tuning import tune_process
from shoal.engine.data.batches import SyntheticDataset
from shoal.engine.device import peak_memory
from shoal.engine.parallel.context.causal_blocks import CausalBlocks
from shoal.engine.parallel.context.ring import RingAttention, RingPosition
from shoal.engine.parallel.context.token_order import spread
from shoal.labs.bench.benchmark import TIME_LIMIT, Benchmark, Notify, make_table
from shoal.labs.bench.race import quartiles, slowest_rank, time_in_turns
from shoal.launch.worker_pool import Pool
from shoal.planning.cost.memory import activations
from shoal.planning.cost.micro_batch import MicroBatch
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig, build_config
from shoal.spec.layout import ContextOrder, Layout
from shoal.spec.layout.sizes import check_layout
from shoal.spec.number_formats import FORMATS
from shoal.training.step.engine import Engine

WAYS = {"ring": "ring", "bound": "all keys local"}
"""The ring, and a bound: every rank already has all keys and values."""


class ContextBenchmark(Benchmark):
    """Ring attention, forward and backward, against the same blocks without transfers; exit code 1 if it misses the
    target."""

    ranks: PositiveInt = 2
    """Ranks of the ring, of one thread."""

    tokens: PositiveInt = 8192
    """Tokens of the sequence, over all ranks."""

    heads: PositiveInt = 8
    """Query heads."""

    kv_heads: PositiveInt = 4
    """Key and value heads."""

    head_dim: PositiveInt = 64
    """Width of a head."""

    order: ContextOrder = "zig-zag"
    """Assignment of tokens to ranks."""

    repeats: PositiveInt = 7
    """Measurements of each, in turns; medians are compared."""

    target: PositiveFloat = 1.15
    """Largest accepted time of the ring, as a multiple of the bound's."""

    def run(self, console: Console, notify: Notify) -> bool:
        """Time the ring and its bound."""
        if self.ranks < 2 or self.tokens < 2 * self.ranks or self.heads % self.kv_heads:
            raise UsageError("bench context: use 2 ranks or more, 2 tokens for each, and heads that kv_heads divides.")
        seconds = self.measure()
        layout = Layout(cp=self.ranks, cp_order=self.order).describe()
        title = f"attention of {self.tokens:,} tokens on {layout}, forward and backward"
        console.print(make_table(title, [
            {"": WAYS[way], "median ms": 1e3 * median(times), "fastest ms": 1e3 * min(times)}
            for way, times in seconds.items()
        ]))  # fmt: skip
        ratios = [ring / bound for ring, bound in zip(seconds["ring"], seconds["bound"], strict=True)]
        low, high = quartiles(ratios)
        met = median(ratios) <= self.target
        console.print(
            f"{median(ratios):.3f} of the bound (median of {self.repeats} turns, quartiles {low:.3f} to {high:.3f}); "
            f"target {self.target:g}: {'met' if met else 'missed'}"
        )
        return met

    def measure(self) -> dict[str, list[float]]:
        """Time attention of one layer and one sequence; return the seconds of every turn, by way."""
        with Pool(self.ranks, setup=tune_process) as pool:
            return slowest_rank(pool.run(_time, self.ranks, self, timeout=TIME_LIMIT))


@dataclass(frozen=True)
class IdleRing(RingPosition):
    """A ring without transfers.

    Attributes:
        local: keys and values of every position.
    """

    local: Mapping[int, Tensor] = field(default_factory=dict)

    def blocks_of(self, held: Tensor, lengths: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield the local blocks in the order of `RingPosition.blocks_of`."""
        for step in range(self.places):
            source = (self.place - step) % self.places
            yield source, self.local[source]

    def shift(self, x: Tensor, out: Tensor, group: Group | None) -> Pending:
        """Return gradients of zero."""
        out.zero_()
        return self

    def wait(self) -> None:
        """Return immediately."""


def _time(case: ContextBenchmark) -> dict[str, list[float]]:
    """Return the seconds of every turn on one rank, by way."""
    mesh = Mesh(Layout(cp=case.ranks, cp_order=case.order), dist.get_rank())
    held, ring = spread(mesh.layout, case.tokens), RingPosition.of(mesh)
    chunks = [held.place_chunks(place, range(1)) for place in range(case.ranks)]
    generator = torch.Generator().manual_seed(ring.place)
    lengths = [sum(map(len, chunk)) for chunk in chunks]

    def numbers(heads: int, length: int) -> Tensor:
        return torch.randn(1, heads, length, case.head_dim, generator=generator)

    q, gradient = (numbers(case.heads, lengths[ring.place]) for _ in range(2))
    k, v = (numbers(case.kv_heads, lengths[ring.place]) for _ in range(2))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    blocks = {place: torch.stack([numbers(case.kv_heads, length)] * 2) for place, length in enumerate(lengths)}
    causal = CausalBlocks(chunks[ring.place], chunks, None)

    def attend(ring: RingPosition) -> None:
        out = RingAttention.apply(*inputs, ring, causal, "sdpa")
        torch.autograd.grad(out, inputs, gradient)

    rings = {"ring": ring, "bound": IdleRing(ring.place, ring.places, ring.ranks, None, None, blocks)}
    calls = {way: partial(attend, rings[way]) for way in WAYS}
    return time_in_turns(calls, case.repeats, prepare=lambda way: dist.barrier())


MIB = 2**20


@dataclass(frozen=True)
class RankTraining:
    """One rank's training on long sequences.

    Attributes:
        losses: loss of every step.
        activation_bytes: bytes that one forward keeps for its backward; each tensor counts once, weights not at all.
        seconds: time of the last step.
        peak: peak bytes of the process.
    """

    losses: list[float]
    activation_bytes: int
    seconds: float
    peak: int


class LongContextBenchmark(Benchmark):
    """Train on sequences whose activations do not fit on one device; exit code 1 if they do not fit on the ranks
    either, or would fit on one device."""

    ranks: PositiveInt = 4
    """Context-parallel ranks, of one thread."""

    ulysses: PositiveInt = 1
    """Number of them that exchange tokens for heads."""

    tokens: PositiveInt = 32768
    """Tokens of a sequence."""

    layers: PositiveInt = 2
    """Layers of the model, which otherwise has the sizes of tiny."""

    steps: PositiveInt = 2
    """Training steps, one sequence each."""

    budget_mib: PositiveFloat = 512.0
    """MiB of each device for activations kept for backward."""

    def run(self, console: Console, notify: Notify) -> bool:
        """Train, count the bytes on every rank, and compare them with the budget and with one device, by formula."""
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
        with Pool(self.ranks, setup=tune_process) as pool:
            ranks = pool.run(_train, self.ranks, config, shape, self.steps, timeout=TIME_LIMIT)
        budget, most = self.budget_mib * MIB, max(rank.activation_bytes for rank in ranks)
        console.print(
            f"{self.tokens:,} tokens, {shape.layers} layers, {shape.parameters():,} parameters, "
            f"{config.parallel.describe()}: losses {', '.join(f'{loss:.4f}' for loss in ranks[0].losses)}; "
            f"{show_seconds(max(rank.seconds for rank in ranks))} per step", highlight=False, soft_wrap=True,
        )
        console.print(make_table(f"activations kept for backward; budget {show_bytes(budget)}", [
            {"": where, "bytes": show_bytes(size), "fraction of the budget": size / budget}
            for where, size in (("one device, by formula", alone), ("fullest rank, counted", most))
        ]))  # fmt: skip
        console.print(f"largest process: {show_bytes(max(rank.peak for rank in ranks))} in total", highlight=False)
        return needs_ranks(alone, most, budget)


def needs_ranks(alone: float, most: float, budget: float) -> bool:
    """Return whether every rank stays inside a budget [bytes] that one device would exceed."""
    return most <= budget < alone


def _train(config: RunConfig, shape: ModelShape, steps: int) -> RankTraining:
    mesh = Mesh(config.parallel, dist.get_rank())
    samples = SyntheticDataset(shape.vocab, config.data.sequence_length, config.train.seed)
    engine = Engine(config, shape, mesh, samples)
    losses: list[float] = []
    begin = time.perf_counter()  # counts if it is the only step
    with count_saved_bytes(engine) as kept:
        losses.append(engine.step(0).loss)
    for step in range(1, steps):
        begin = time.perf_counter()
        losses.append(engine.step(step).loss)
    return RankTraining(losses, sum(kept.values()), time.perf_counter() - begin, peak_memory(mesh.device))


@contextmanager
def count_saved_bytes(engine: Engine) -> Iterator[dict[int, int]]:
    """Yield the bytes, by address, of the tensors that autograd keeps in this context, except parameters."""
    weights = {bucket.full.untyped_storage().data_ptr() for bucket in engine.parameters.buckets}
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = max(storage.nbytes(), found.get(storage.data_ptr(), 0))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield found
