"""Splitting sequences: ring attention, sequences that do not fit on one device, and TeraPipe's slices."""

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
from shoal.base.section import NonEmpty
from shoal.base.units import show_bytes, show_seconds
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.pending import Done, Pending
from shoal.engine.data.batches import SyntheticDataset
from shoal.engine.device import peak_memory, pick_device, tune_process
from shoal.engine.models.cache import Slice
from shoal.engine.models.transformer import Transformer, initialise
from shoal.engine.parallel.context.causal_blocks import CausalBlocks
from shoal.engine.parallel.context.ring import RingAttention, RingPosition
from shoal.engine.parallel.context.token_order import assign_tokens
from shoal.labs.bench.benchmark import TIME_LIMIT, Benchmark, Notify, make_table
from shoal.labs.bench.race import quartiles, slowest_rank, time_in_turns
from shoal.launch.worker_pool import Pool
from shoal.pipeline.sequence_slices import best_slices, fit_times, pipeline_time
from shoal.planning.cost.memory import activations
from shoal.planning.cost.micro_batch import MicroBatch
from shoal.spec.catalog import ModelShape, model_shape
from shoal.spec.compatibility.sizes import check_layout
from shoal.spec.config import RunConfig, build_config
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS
from shoal.training.step.engine import Engine

HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
TARGET = 1.15
"""Largest accepted time of the ring, as a multiple of the bound's."""


class ContextBenchmark(Benchmark):
    """Ring attention, forward and backward, against the same blocks without transfers; exit code 1 if it misses the
    target."""

    ranks: PositiveInt = 2
    """Ranks of the ring, of one thread."""

    tokens: PositiveInt = 8192
    """Tokens of the sequence, over all ranks."""

    repeats: PositiveInt = 7
    """Measurements of each, in turns; medians are compared."""

    def run(self, console: Console, notify: Notify) -> bool:
        if self.ranks < 2 or self.tokens < 2 * self.ranks:
            raise UsageError("bench context: use 2 ranks or more, and 2 tokens for each.")
        seconds = self.measure()
        layout = Layout(cp=self.ranks).describe()
        title = f"attention of {self.tokens:,} tokens on {layout}, forward and backward"
        console.print(make_table(title, [
            {"": name, "median ms": 1e3 * median(seconds[way]), "fastest ms": 1e3 * min(seconds[way])}
            for way, name in (("ring", "ring"), ("bound", "all keys local"))
        ]))  # fmt: skip
        ratios = [ring / bound for ring, bound in zip(seconds["ring"], seconds["bound"], strict=True)]
        low, high = quartiles(ratios)
        met = median(ratios) <= TARGET
        console.print(
            f"{median(ratios):.3f} of the bound (median of {self.repeats} turns, quartiles {low:.3f} to {high:.3f}); "
            f"target {TARGET:g}: {'met' if met else 'missed'}"
        )
        return met

    def measure(self) -> dict[str, list[float]]:
        """Time attention of one layer and one sequence; return the seconds of every turn, by way."""
        with Pool(self.ranks, setup=tune_process) as pool:
            return slowest_rank(pool.run(_time, self.ranks, self, timeout=TIME_LIMIT))


@dataclass(frozen=True)
class IdleRing(RingPosition):
    """A ring without transfers, the bound: `local` has the keys and values of every position."""

    local: Mapping[int, Tensor] = field(default_factory=dict)

    def circulate(self, held: Tensor, lengths: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        for step in range(self.size):
            source = (self.index - step) % self.size
            yield source, self.local[source]

    def shift(self, x: Tensor, out: Tensor, group: Group | None) -> Pending:
        out.zero_()
        return Done()


def _time(case: ContextBenchmark) -> dict[str, list[float]]:
    """Return the seconds of every turn on one rank, by way."""
    mesh = Mesh(Layout(cp=case.ranks), dist.get_rank())
    held, ring = assign_tokens(mesh.layout, case.tokens), RingPosition.from_mesh(mesh)
    chunks = [held.ring_chunks(place, range(1)) for place in range(case.ranks)]
    generator = torch.Generator().manual_seed(ring.index)
    lengths = [sum(map(len, chunk)) for chunk in chunks]

    def numbers(heads: int, length: int) -> Tensor:
        return torch.randn(1, heads, length, HEAD_DIM, generator=generator)

    q, gradient = (numbers(HEADS, lengths[ring.index]) for _ in range(2))
    k, v = (numbers(KV_HEADS, lengths[ring.index]) for _ in range(2))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    blocks = {place: torch.stack([numbers(KV_HEADS, length)] * 2) for place, length in enumerate(lengths)}
    causal = CausalBlocks(chunks[ring.index], chunks, None)

    def attend(ring: RingPosition) -> None:
        out = RingAttention.apply(*inputs, ring, causal, "sdpa")
        torch.autograd.grad(out, inputs, gradient)

    rings = {"ring": ring, "bound": IdleRing(ring.index, ring.size, ring.ranks, None, None, blocks)}
    calls = {way: partial(attend, each) for way, each in rings.items()}
    return time_in_turns(calls, case.repeats, prepare=lambda way: dist.barrier())


class LongContextBenchmark(Benchmark):
    """Train on sequences whose activations do not fit on one device; exit code 1 if they do not fit on the ranks
    either, or would fit on one device."""

    ranks: PositiveInt = 4
    """Context-parallel ranks, of one thread."""

    tokens: PositiveInt = 32768
    """Tokens of a sequence."""

    layers: PositiveInt = 2
    """Layers of the model, which otherwise has the sizes of tiny."""

    steps: PositiveInt = 2
    """Training steps, one sequence each."""

    budget_mib: PositiveFloat = 512.0
    """MiB of each device for activations kept for backward."""

    def run(self, console: Console, notify: Notify) -> bool:
        config = build_config({
            "model": {"name": "tiny", "layers": self.layers},
            "parallel": {"cp": self.ranks},
            "data": {"source": "synthetic", "sequence_length": self.tokens},
            "train": {"global_batch": 1, "steps": self.steps, "precision": "fp32"},
        })
        shape = config.model.shape(vocab=257, sequence_length=self.tokens)
        check_layout(config.parallel, shape, global_batch=1, sequence_length=self.tokens)
        one = MicroBatch(shape, Layout(), self.tokens, FORMATS["fp32"].compute.itemsize, fused=False)
        alone = activations.total(activations.stage(one, range(self.layers), first=True, last=True))
        with Pool(self.ranks, setup=tune_process) as pool:
            ranks = pool.run(_train, self.ranks, config, shape, self.steps, timeout=TIME_LIMIT)
        (losses, *_), kept, seconds, peaks = zip(*ranks, strict=True)
        budget, most = self.budget_mib * 2**20, max(kept)
        console.print(
            f"{self.tokens:,} tokens, {shape.layers} layers, {shape.parameters():,} parameters, "
            f"{config.parallel.describe()}: losses {', '.join(f'{loss:.4f}' for loss in losses)}; "
            f"{show_seconds(max(seconds))} per step", highlight=False, soft_wrap=True,
        )
        console.print(make_table(f"activations kept for backward; budget {show_bytes(budget)}", [
            {"": where, "bytes": show_bytes(size), "fraction of the budget": size / budget}
            for where, size in (("one device, by formula", alone), ("fullest rank, counted", most))
        ]))  # fmt: skip
        console.print(f"largest process: {show_bytes(max(peaks))} in total", highlight=False)
        return needs_ranks(alone, most, budget)


def needs_ranks(alone: float, most: float, budget: float) -> bool:
    """Return whether every rank stays inside a budget [bytes] that one device would exceed."""
    return most <= budget < alone


def _train(config: RunConfig, shape: ModelShape, steps: int) -> tuple[list[float], int, float, int]:
    """Train on one rank; return the losses of all steps, the bytes that one forward keeps for its backward, without
    weights, the seconds of the last step, and the peak bytes of the process."""
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
    return losses, sum(kept.values()), time.perf_counter() - begin, peak_memory(mesh.device)


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


class SlicesBenchmark(Benchmark):
    """Slices of a sequence, forward and backward through one layer, and the best slices for TeraPipe."""

    model: str = "tiny"
    """Model of the catalog whose layer is timed."""

    length: PositiveInt = 1024
    """Tokens of a sequence."""

    stages: NonEmpty[PositiveInt] = (2, 4, 8)
    """Pipeline stages to choose for."""

    microbatches: PositiveInt = 1
    """Micro-batches in a step."""

    repeats: PositiveInt = 5
    """Measurements of each; the median counts."""

    device: str = "auto"
    """auto, cpu or cuda."""

    def run(self, console: Console, notify: Notify) -> bool:
        device = pick_device(self.device)
        if device.type == "cpu":
            tune_process()
        measured = self.measure(device)
        title = f"a slice through one layer of {self.model}, forward and backward, on {device}"
        console.print(make_table(title, [
            {"tokens": tokens, "tokens before": before, "ms": 1e3 * seconds, "us / token": 1e6 * seconds / tokens}
            for tokens, before, seconds in measured
        ]))  # fmt: skip
        times, shortest = fit_times(measured), min(tokens for tokens, _, _ in measured)
        cuts = [*range(0, self.length - shortest + 1, shortest), self.length]  # as short as measured
        for stages in self.stages:
            best = best_slices(cuts, times, stages, self.microbatches)
            unsliced, sliced = (
                pipeline_time(slices, times, stages, self.microbatches) for slices in ((self.length,), best)
            )
            console.print(
                f"pp {stages}, {self.microbatches} micro-batches: sequence_slices = {list(best)}, "
                f"predicted at {sliced / unsliced:.2f} of the time without slices", highlight=False,
            )
        return True

    def measure(self, device: torch.device) -> list[tuple[int, int, float]]:
        """Time slices of a sixteenth up to the full sequence, at several positions; return for each (tokens of the
        slice, tokens before it, median seconds of forward and backward)."""
        shape = model_shape(self.model)
        shape = shape.model_copy(update={"max_sequence": max(shape.max_sequence, self.length), "layers": 1, "vocab": 1})
        model = Transformer(shape)
        initialise(model, seed=0)
        model.embed = model.norm = model.head = None
        model.to(device)
        before: Slice | None = None

        def forward(length: int, part: Slice) -> torch.Tensor:
            hidden = torch.randn(1, length, shape.hidden, device=device)  # [b, s, h]
            tokens = torch.zeros(1, length, dtype=torch.int64, device=device)
            return model(tokens, hidden=hidden.requires_grad_(), part=part)

        def prepare(place: tuple[int, int]) -> None:
            nonlocal before
            before = Slice() if place[1] else None
            if before:
                forward(place[1], before)

        def step(size: int) -> None:
            forward(size, Slice(before)).sum().backward()

        sizes = sorted({max(1, self.length // part) for part in (16, 8, 4, 2, 1)})
        places = [
            (size, start) for size in sizes
            for start in sorted({0, self.length // 4, self.length // 2, self.length - size})
            if size + start <= self.length
        ]  # fmt: skip
        steps = {place: partial(step, place[0]) for place in places}
        seconds = time_in_turns(steps, self.repeats, prepare=prepare, device=device)
        return [(*place, median(times)) for place, times in seconds.items()]
