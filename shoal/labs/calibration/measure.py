"""What the cores of this machine take, all busy at once: products, memory, attention, models, updates, collectives.

Every core has a rank of one thread which does the same as the others, so that what they share (memory, caches, power)
is shared while it is measured. Everything takes turns, A B C A B C, and medians count. What a rank does by itself is
timed by its core's clock, which stands still while other programs have the core; collectives, which wait for other
ranks, by the one on the wall.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import mean, median

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce
from shoal.engine.models.transformer import Transformer
from shoal.engine.parallel.apply import LocalStage, build_stages, initialise
from shoal.engine.parallel.context.token_order import assign_tokens
from shoal.engine.precision.policy import POLICIES
from shoal.labs.bench.collectives import IN_A_ROW, WAYS, time_all_reduces
from shoal.labs.bench.race import time_in_turns
from shoal.launch.worker_pool import Pool
from shoal.pipeline.from_layout import build_layout_program
from shoal.spec.catalog import ModelShape
from shoal.spec.layout import Layout, Recompute
from shoal.training.step.engine_state import attention_kernel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
PRODUCTS = (
    (2048, 1024, 1024), (512, 256, 256), (128, 512, 512), (1024, 64, 1024), (1024, 1024, 64), (256, 256, 1024),
)  # fmt: skip
"""m, k, n: large ones, and each side short."""
ATTENTION = ((8, 128, 32), (8, 256, 32), (4, 256, 64), (4, 512, 64))
"""Heads, tokens of a sequence and width of a head; 1,024 tokens in all."""
MODELS = tuple(
    (layers, *size)
    for layers in (1, 3) for size in ((32, 128), (256, 128), (128, 256), (128, 1024), (256, 1024), (256, 2048))
)
"""Layers, hidden, tokens in sequences of 128: a difference in layers is theirs alone, what is left the loss's; of the
smallest nearly all is launches."""
AGAIN = MODELS[6:8]
"""Those that compute attention's core again, too: where launches weigh most."""
REFERENCE = (1, 256, 1024)
"""The one of `MODELS` that tells how fast the machine is just now."""
REDUCED = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
"""Bytes of an all-reduce."""
SPLIT = {
    "copies": Layout(dp=2, zero=0), "zero 3": Layout(dp=2, zero=3), "tp": Layout(tp=2),
    "sequence": Layout(tp=2, sequence_parallel=True),
}  # fmt: skip
"""Ways in which two ranks do a model's passes, the first without a collective in them."""
SPLIT_MODELS = ((4, 128, 128), (4, 256, 128), (4, 256, 512))
"""Layers, hidden, tokens of a rank's micro-batch: so little that collectives weigh."""
COPIED, UPDATED = 1 << 24, 1 << 22  # float32 numbers
LONG = 0.1  # seconds, of which one is as sure as several shorter ones
PRODUCTS_BETWEEN, MEETINGS = 4, 20  # products between two meetings of all ranks: some 5 ms

Times = dict[str, dict[tuple, float]]
Say = Callable[[float, str], None]
"""Called with the share that is done, from 0 to 1, and what comes next."""


@dataclass(frozen=True)
class CoreMeasurements:
    """Seconds of a core, by what was done; of collectives, on the clock.

    Attributes:
        cores: ranks that did it at once.
        usable: cores that there are for ranks, which may be more.
        products: by (format, m, k, n).
        attention: by (heads, s, d), forward and backward.
        models: by (layers, hidden, tokens), forward and backward of `model_shape_of`.
        forwards: the forward alone.
        again: of `AGAIN`, forward and backward, which computes attention's core again.
        copy: of `COPIED` float32 numbers.
        update: of `UPDATED` parameters by AdamW, with the norm of their gradients.
        waits: by what part some milliseconds take longer if all then meet.
        reduces: by (ranks, bytes).
        split: by (way of `SPLIT`, layers, hidden, tokens), forward and backward on two ranks, on the clock.
    """

    cores: int
    usable: int
    products: dict[tuple[str, int, int, int], float]
    attention: dict[tuple[int, int, int], float]
    models: dict[tuple[int, int, int], float]
    forwards: dict[tuple[int, int, int], float]
    again: dict[tuple[int, int, int], float]
    copy: float
    update: float
    waits: float
    reduces: dict[tuple[int, int], float]
    split: dict[tuple[str, int, int, int], float] = field(default_factory=dict)


def model_shape_of(layers: int, hidden: int) -> ModelShape:
    """A small model of the llama family."""
    return ModelShape(
        family="llama", layers=layers, hidden=hidden, heads=hidden // 32, kv_heads=hidden // 32, head_dim=32,
        ffn=hidden * 8 // 3 // 32 * 32, vocab=2048, max_sequence=128, tied=False,
    )  # fmt: skip


def measure(pool: Pool, cores: int, usable: int, ranks: list[int], rounds: int, say: Say) -> CoreMeasurements:
    """All of it.

    Args:
        pool: of ranks with one thread each.
        cores: ranks that compute at once.
        usable: cores that there are.
        ranks: numbers of them, whose collectives are measured.
        rounds: turns of each.
        say: told how much is done, of 1, and what comes next.
    """
    found: dict[str, dict[tuple, list[float]]] = {}
    turns = rounds + 1  # the first warms up
    for turn in range(turns):
        say(0.7 * turn / turns, f"{cores} cores, turn {turn + 1} of {turns}")
        for rank in pool.run(compute, cores, turn, timeout=300.0):
            for kind, times in rank.items():
                for key, seconds in times.items():
                    found.setdefault(kind, {}).setdefault(key, []).append(seconds)
    means = {
        kind: {key: median(seconds[cores:]) for key, seconds in times.items()} for kind, times in found.items()
    }
    limit = 300.0 + 60.0 * rounds  # seconds; a round of any of these takes a few
    waiting = median(pool.run(waits, cores, rounds, timeout=limit)) if cores > 1 else 0.0
    reduces: dict[tuple[int, int], float] = {}
    split: dict[tuple[str, int, int, int], float] = {}
    if cores > 1:
        say(0.7, "models on two ranks")
        every = pool.run(on_two_ranks, 2, rounds, timeout=limit)
        split = {key: max(rank[key] for rank in every) for key in every[0]}
    for i, n in enumerate(ranks):
        say(0.8 + 0.2 * i / len(ranks), f"collectives of {n} ranks")
        every = pool.run(reductions, n, rounds, timeout=limit)
        reduces |= {(n, size): median(rank[size] for rank in every) for size in every[0]}
    return CoreMeasurements(
        cores, usable, means["product"], means["attention"], means["model"], means["forward"], means["again"],
        means["copy"][()], means["update"][()], waiting, reduces, split,
    )  # fmt: skip


def compute(turn: int) -> Times:
    """One turn of what every rank does by itself, all at once. Seconds by kind and size."""
    torch.manual_seed(turn)
    found: Times = {}
    for kind, key, step, repeats in steps():
        begin = time.process_time()
        step()
        if time.process_time() - begin > LONG:
            repeats = 1
        dist.barrier()
        begin = time.process_time()
        for _ in range(repeats):
            step()
        found.setdefault(kind, {})[key] = (time.process_time() - begin) / repeats
    return found


def steps() -> Iterator[tuple[str, tuple, Callable[[], object], int]]:
    """What is measured: its kind and size, one step, and how many are measured together."""
    for precision, dtype in DTYPES.items():
        for m, k, n in PRODUCTS:
            a, b = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)
            yield "product", (precision, m, k, n), partial(F.linear, a, b), 5
    for heads, s, d in ATTENTION:
        q = torch.randn(1024 // s, heads, s, d, requires_grad=True)
        yield "attention", (heads, s, d), partial(_attention, q), 3
    for layers, hidden, tokens in MODELS:
        model = _model(layers, hidden)
        ids = torch.randint(2048, (tokens // 128, 128))
        key = layers, hidden, tokens
        yield "forward", key, partial(model, ids, ids), 2
        yield "model", key, partial(_passes, model, ids), 3
        if key in AGAIN:
            yield "again", key, partial(_passes, _model(layers, hidden, "selective"), ids), 3
    source, target = torch.zeros(COPIED), torch.zeros(COPIED)
    yield "copy", (), lambda: target.copy_(source), 3
    weights = torch.zeros(UPDATED, requires_grad=True)
    weights.grad = torch.ones(UPDATED)
    rule = torch.optim.AdamW([weights], fused=True)  # which shoal's own is
    yield "update", (), lambda: (torch.linalg.vector_norm(weights.grad), rule.step()), 2


def _model(layers: int, hidden: int, recompute: Recompute = "none") -> Transformer:
    """As a step of the engine has it on one device: its gradients are added up in buffers."""
    return _stage(model_shape_of(layers, hidden), Layout(recompute=recompute), 0).module


def _stage(shape: ModelShape, layout: Layout, rank: int) -> LocalStage:
    """One that is all of a model, as a step of the engine has it."""
    (stage,), parameters = build_stages(
        shape, build_layout_program(layout, microbatches=1), Mesh(layout, rank), POLICIES["fp32"],
        assign_tokens(layout, shape.max_sequence), kernel=attention_kernel("auto", torch.device("cpu"), torch.float32),
    )  # fmt: skip
    initialise(parameters, shape, 0)
    stage.parameters.begin()
    return stage


def _passes(model: Transformer, ids: torch.Tensor) -> None:
    model(ids, ids).backward()


def _attention(q: torch.Tensor) -> None:
    F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


def reference(repeats: int) -> list[float]:
    """Seconds on the clock of the model of `REFERENCE`, forward and backward, beside the other ranks."""
    layers, hidden, tokens = REFERENCE
    ids = torch.randint(2048, (tokens // 128, 128))
    step = partial(_passes, _model(layers, hidden), ids)
    return time_in_turns({REFERENCE: step}, repeats, prepare=lambda key: dist.barrier())[REFERENCE]


def waits(rounds: int) -> float:
    """By what part some milliseconds of products take longer if all ranks then wait for the last: none is as fast as
    the others all the time."""
    group = Mesh(Layout(tp=dist.get_world_size()), dist.get_rank()).group("tp")
    a, b, flag = torch.randn(1024, 256), torch.randn(256, 256), torch.zeros(1)

    def seconds_of(products: int, *, meet: bool) -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(MEETINGS):
            for _ in range(products):
                F.linear(a, b)
            if meet:
                all_reduce(flag, group)
        return time.perf_counter() - begin

    found = []
    for turn in range(rounds + 1):
        together, apart = seconds_of(PRODUCTS_BETWEEN, meet=True), seconds_of(PRODUCTS_BETWEEN, meet=False)
        if turn:
            found.append((together - seconds_of(0, meet=True)) / apart - 1)
    return max(0.0, min(found))  # what else happens on the machine only adds to it


def on_two_ranks(rounds: int) -> dict[tuple[str, int, int, int], float]:
    """Seconds of a micro-batch of each of `SPLIT_MODELS` in each way of `SPLIT`, as those before the last of a step."""
    found: dict[tuple[str, int, int, int], float] = {}
    for layers, hidden, tokens in SPLIT_MODELS:
        ids = torch.randint(2048, (tokens // 128, 128))
        steps = {way: _split_step(layout, model_shape_of(layers, hidden), ids) for way, layout in SPLIT.items()}

        def begin_together(way: str, steps: Mapping[str, Callable[[], None]] = steps) -> None:
            dist.barrier()
            steps[way]()  # with its code and data in the caches again

        seconds = time_in_turns(steps, rounds, prepare=begin_together, in_a_row=IN_A_ROW)
        found |= {(way, layers, hidden, tokens): median(times) for way, times in seconds.items()}
    return found


def _split_step(layout: Layout, shape: ModelShape, ids: torch.Tensor) -> Callable[[], None]:
    stage = _stage(shape, layout, dist.get_rank())

    def step() -> None:
        stage.parameters.last_microbatch = False
        _passes(stage.module, ids)
        stage.parameters.backward_done()

    return step


def reductions(rounds: int) -> dict[int, float]:
    """Seconds of an all-reduce by its bytes, as activations and gradients take it: the mean of both ways."""
    ways = time_all_reduces(REDUCED, rounds, WAYS[:2])
    return {size: mean(median(times) for times in seconds.values()) for size, seconds in ways.items()}
