"""Ring attention, forward and backward, against the same blocks without a ring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from pydantic import PositiveFloat, PositiveInt
from rich.console import Console
from torch import Tensor

from shoal.base.errors import UsageError
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import Pending
from shoal.engine.cpu_tuning import tune_process
from shoal.engine.parallel.context.causal_blocks import CausalBlocks
from shoal.engine.parallel.context.ring import RingAttention, RingPosition
from shoal.engine.parallel.context.token_order import spread
from shoal.labs.bench.benchmark import Benchmark, Say, make_table
from shoal.labs.bench.race import quartiles, slowest_rank, time_in_turns
from shoal.launch.worker_pool import Pool
from shoal.spec.layout import ContextOrder, Layout

SLOW = 2e9  # FLOP/s that all ranks together attain on any machine, sharing a core or not; slower ones hang
WAYS = {"ring": "round the ring", "bound": "all keys there"}
"""As it runs, and with the keys and values of every rank there already."""


class ContextBenchmark(Benchmark):
    """Ring attention, forward and backward, against the same blocks without a ring; exit code 1 if it is slower than
    the target allows."""

    ranks: PositiveInt = 2
    """Places of the ring, each a rank of one thread."""

    tokens: PositiveInt = 8192
    """Tokens of the sequence, over all ranks."""

    heads: PositiveInt = 8
    """Query heads."""

    kv_heads: PositiveInt = 4
    """Key and value heads."""

    head_dim: PositiveInt = 64
    """Width of a head."""

    order: ContextOrder = "zig-zag"
    """Which tokens a rank has."""

    repeats: PositiveInt = 7
    """Measurements of each way, in turn; what is compared are medians."""

    target: PositiveFloat = 1.15
    """How many times the bound's time the ring may take."""

    def run(self, console: Console, say: Say) -> bool:
        """Time the ring and its bound; what disturbs a machine for longer disturbs both in a turn."""
        if self.ranks < 2 or self.tokens < 2 * self.ranks or self.heads % self.kv_heads:
            raise UsageError("bench context: give 2 ranks or more, 2 tokens for each, and heads that kv_heads divides.")
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
        """Time attention of one layer and one sequence; returns the seconds of every turn by way."""
        with Pool(self.ranks, setup=tune_process) as pool:
            return slowest_rank(pool.run(_time, self.ranks, self, timeout=self.seconds_at_most))

    @property
    def seconds_at_most(self) -> float:
        """What all repeats take if nothing hangs."""
        flops = 3.5 * 2 * self.tokens**2 * self.heads * self.head_dim  # causal: half of 4; backward 2.5 times forward
        return 900.0 + len(WAYS) * (self.repeats + 1) * flops / SLOW


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


def _time(case: ContextBenchmark) -> dict[str, list[float]]:
    """The seconds of every turn by way, on one rank."""
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
    sight = CausalBlocks(chunks[ring.place], chunks, None)

    def attend(ring: RingPosition) -> None:
        out = RingAttention.apply(*inputs, ring, sight, "sdpa")
        torch.autograd.grad(out, inputs, gradient)

    rings = {"ring": ring, "bound": Idle(ring.place, ring.places, ring.ranks, None, None, blocks)}
    calls = {way: partial(attend, rings[way]) for way in WAYS}
    return time_in_turns(calls, case.repeats, prepare=lambda way: dist.barrier())
