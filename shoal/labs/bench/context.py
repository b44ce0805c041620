"""Ring attention against the same blocks without a ring; and long sequences against what one device would keep."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from shoal.base.units import show_bytes, show_seconds
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import Pending
from shoal.engine.cpu_tuning import tune_process
from shoal.engine.data.batches import SyntheticDataset
from shoal.engine.device import peak_memory
from shoal.engine.parallel.context.causal_blocks import Sight
from shoal.engine.parallel.context.ring import RingAttention, RingPosition
from shoal.engine.parallel.context.token_order import spread
from shoal.labs.bench.peak import DTYPES
from shoal.labs.bench.race import quartiles
from shoal.labs.bench.step.workload import BenchPrecision
from shoal.launch.worker_pool import Pool
from shoal.planning.cost.memory import activations
from shoal.planning.cost.micro_batch import MicroBatch
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig, build_config
from shoal.spec.layout import ContextOrder, Layout
from shoal.spec.layout.sizes import check_layout
from shoal.spec.number_formats import FORMATS
from shoal.training.step.engine import Engine

SLOW = 2e9  # FLOP/s that all ranks together attain on any machine, sharing a core or not; slower ones hang

WAYS = ("ring", "bound")
"""As it runs, and with every place's keys and values there already."""


@dataclass(frozen=True)
class AttentionCase:
    """What is timed: forward and backward of one layer's attention, one sequence, one thread a rank."""

    ranks: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    precision: BenchPrecision = "fp32"
    order: ContextOrder = "zig-zag"


@dataclass(frozen=True)
class Idle(RingPosition):
    """A ring on which nothing travels.

    Attributes:
        there: every place's block.
    """

    there: Mapping[int, Tensor] = field(default_factory=dict)

    def blocks_of(self, held: Tensor, lengths: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """As `RingPosition`."""
        for step in range(self.places):
            source = (self.place - step) % self.places
            yield source, self.there[source]

    def shift(self, x: Tensor, out: Tensor, group: Group | None) -> Pending:
        """As `RingPosition`, of gradients, which are zeros."""
        out.zero_()
        return self

    def wait(self) -> None:
        """Nothing to wait for."""


def seconds_of_a_step(what: AttentionCase, repeats: int) -> dict[str, list[float]]:
    """Seconds of every repeat by way: A B A B, of the slower rank each."""
    with Pool(what.ranks, setup=tune_process) as pool:
        every = pool.run(_time, what.ranks, what, repeats, timeout=seconds_at_most(what, repeats))
    return {way: [max(times) for times in zip(*(found[way] for found in every), strict=True)] for way in WAYS}


def seconds_at_most(what: AttentionCase, repeats: int) -> float:
    """What all repeats take if nothing hangs."""
    flops = 3.5 * 2 * what.tokens**2 * what.heads * what.head_dim  # causal: half of 4; backward 2.5 times forward
    return 900.0 + len(WAYS) * (repeats + 1) * flops / SLOW


def _time(what: AttentionCase, repeats: int) -> dict[str, list[float]]:
    mesh = Mesh(Layout(cp=what.ranks, cp_order=what.order), dist.get_rank())
    held, ring = spread(mesh.layout, what.tokens), RingPosition.of(mesh)
    chunks = [held.place_chunks(place, range(1)) for place in range(what.ranks)]
    generator = torch.Generator().manual_seed(ring.place)
    lengths = [sum(map(len, chunk)) for chunk in chunks]
    dtype = DTYPES[what.precision]

    def numbers(heads: int, length: int) -> Tensor:
        return torch.randn(1, heads, length, what.head_dim, generator=generator).to(dtype)

    q, gradient = (numbers(what.heads, lengths[ring.place]) for _ in range(2))
    k, v = (numbers(what.kv_heads, lengths[ring.place]) for _ in range(2))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    blocks = {place: torch.stack([numbers(what.kv_heads, length)] * 2) for place, length in enumerate(lengths)}
    rings = {"ring": ring, "bound": Idle(ring.place, ring.places, ring.ranks, None, None, blocks)}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for repeat in range(repeats + 1):
        for way in WAYS:
            dist.barrier()
            start = time.perf_counter()
            out = RingAttention.apply(*inputs, rings[way], Sight(chunks[ring.place], chunks, None), "sdpa")
            torch.autograd.grad(out, inputs, gradient)
            if repeat > 0:  # the first warms up
                seconds[way].append(time.perf_counter() - start)
    return seconds


def ratios(seconds: dict[str, list[float]]) -> list[float]:
    """The ring's time over that of its bound in each turn: what disturbs a machine for longer disturbs both."""
    return [ring / bound for ring, bound in zip(seconds["ring"], seconds["bound"], strict=True)]


def table(what: AttentionCase, seconds: Mapping[str, Sequence[float]]) -> Table:
    """A row for each way."""
    layout = Layout(cp=what.ranks, cp_order=what.order)
    view = Table(title=f"attention of {what.tokens:,} tokens on {layout.describe()}, forward and backward")
    for column in ("", "median ms", "fastest ms"):
        view.add_column(column, justify="right" if column else "left")
    for way, words in zip(WAYS, ("round the ring", "all keys there"), strict=True):
        view.add_row(words, f"{median(seconds[way]) * 1e3:.1f}", f"{min(seconds[way]) * 1e3:.1f}")
    return view


def verdict(seconds: dict[str, list[float]], target: float) -> tuple[str, bool]:
    """How far the ring is from its bound, in words, and whether the median is within the target."""
    each = ratios(seconds)
    low, high = quartiles(each)
    met = median(each) <= target
    said = f"{median(each):.3f} of the bound (median of {len(each)} turns, quartiles {low:.3f} to {high:.3f})"
    return f"{said}; target {target:g}: {'met' if met else 'missed'}", met


# ---- long sequences ------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class LongTraining:
    """A training on sequences whose activations one device may have no room for.

    Attributes:
        alone: bytes that a forward would leave for its backward on one device, by formula.
        ranks: what each rank kept.
    """

    config: RunConfig
    shape: ModelShape
    alone: int
    ranks: list[Kept]

    @property
    def most(self) -> int:
        """Bytes that the fullest rank kept."""
        return max(rank.kept for rank in self.ranks)

    def makes_room(self, budget: float) -> bool:
        """Whether every rank stays inside a budget [bytes] that one device would not."""
        return makes_room(self.alone, self.most, budget)

    def describe(self) -> str:
        """What was trained, the losses and the time of a step, in one line."""
        losses = ", ".join(f"{loss:.4f}" for loss in self.ranks[0].loss)
        return (
            f"{self.config.data.sequence_length:,} tokens, {self.shape.layers} layers, "
            f"{self.shape.parameters():,} parameters, {self.config.parallel.describe()}: losses {losses}; "
            f"{show_seconds(max(rank.seconds for rank in self.ranks))} a step"
        )

    def table(self, budget: float) -> Table:
        """What is kept beside a budget [bytes]."""
        view = Table(title=f"activations kept for backward; budget {show_bytes(budget)}")
        for column in ("", "bytes", "of the budget"):
            view.add_column(column, justify="right" if column else "left")
        for words, size in (("one device, by formula", self.alone), ("fullest rank, counted", self.most)):
            view.add_row(words, show_bytes(size), f"{size / budget:.2f}")
        return view


def train_long(*, ranks: int, ulysses: int, tokens: int, layers: int, steps: int) -> LongTraining:
    """Train a small model on long sequences, split over context-parallel ranks, one sequence a step.

    Args:
        ulysses: so many of the ranks exchange tokens for heads.
        tokens: of a sequence.

    Raises:
        UsageError: the ranks cannot share heads or tokens.
    """
    config = build_config({
        "model": {"name": "tiny", "layers": layers},
        "parallel": {"cp": ranks, "ulysses": ulysses},
        "data": {"source": "synthetic", "sequence_length": tokens},
        "train": {"global_batch": 1, "steps": steps, "precision": "fp32"},
    })
    shape = config.model.shape(vocab=257, sequence_length=tokens)
    check_layout(config.parallel, shape, global_batch=1, sequence_length=tokens)
    one = MicroBatch(shape, Layout(), tokens, FORMATS["fp32"].compute.itemsize)
    alone = activations.total(activations.stage(one, range(layers), first=True, last=True))
    return LongTraining(config, shape, alone, train(config, shape, steps))


def train(config: RunConfig, shape: ModelShape, steps: int) -> list[Kept]:
    """Train on synthetic data with all ranks of the config on this machine, one thread each."""
    ranks = config.parallel.world_size
    with Pool(ranks, setup=tune_process) as pool:
        tokens = config.data.sequence_length
        limit = 3600.0 + steps * tokens * shape.flops_per_token(tokens) / SLOW
        return pool.run(_train, ranks, config, shape, steps, timeout=limit)


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
