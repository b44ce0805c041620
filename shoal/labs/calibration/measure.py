"""Time matrix products, memory, attention, models, updates and collectives on all cores of this machine together.

Every core has a rank of one thread that does the same as the others, so memory, caches and power are shared while they
are measured. Measurements alternate, A B C A B C, and the median is used. What a rank does by itself is measured in CPU
time, which excludes other programs; collectives, which wait for other ranks, in wall time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from shoal.training.step.model_state import attention_kernel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
PRODUCTS = (
    (2048, 1024, 1024), (512, 256, 256), (128, 512, 512), (1024, 64, 1024), (1024, 1024, 64), (256, 256, 1024),
)  # fmt: skip
"""m, k, n: large ones, and each dimension short."""
ATTENTION = ((8, 128, 32), (8, 256, 32), (4, 256, 64), (4, 512, 64))
"""Heads, sequence length and head dim; 1,024 tokens in total."""
MODELS = tuple(
    (layers, *size)
    for layers in (1, 3) for size in ((32, 128), (256, 128), (128, 256), (128, 1024), (256, 1024), (256, 2048))
)
"""Layers, hidden, tokens in sequences of 128. Two numbers of layers separate the layers from the loss; the smallest
models are nearly all launches."""
AGAIN = MODELS[6:8]
"""The `MODELS` also measured with attention's core recomputed: those where launches matter most."""
REFERENCE = (1, 256, 1024)
"""The one of `MODELS` that measures the current speed of the machine."""
REDUCED = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
"""Bytes of an all-reduce."""
SPLIT = {
    "copies": Layout(dp=2, zero=0), "zero 3": Layout(dp=2, zero=3), "tp": Layout(tp=2),
    "sequence": Layout(tp=2, sequence_parallel=True),
}  # fmt: skip
"""Layouts in which two ranks run a model's passes; the first has no collective in them."""
SPLIT_MODELS = ((4, 128, 128), (4, 256, 128), (4, 256, 512))
"""Layers, hidden, tokens of a rank's micro-batch: so small that collectives matter."""
COPIED, UPDATED = 1 << 24, 1 << 22  # float32 numbers
LONG = 0.1  # seconds from which one repetition is enough
PRODUCTS_BETWEEN, MEETINGS = 4, 20  # products between two synchronisations of all ranks: some 5 ms

Say = Callable[[float, str], None]
"""Called with the completed fraction, from 0 to 1, and a label of what comes next."""


@dataclass(frozen=True)
class CoreMeasurements:
    """Median times of a core [s]: CPU time of what a rank does by itself, wall time of what ranks do together."""

    cores: int  # ranks that computed at the same time
    usable: int  # cores available to ranks, which may be more
    products: dict[tuple[str, int, int, int], float]  # by (format, m, k, n)
    attention: dict[tuple[int, int, int], float]  # by (heads, s, d), forward and backward
    # by (layers, hidden, tokens), forward and backward of `build_model_shape`
    models: dict[tuple[int, int, int], float]
    forwards: dict[tuple[int, int, int], float]  # the same, forward only
    again: dict[tuple[int, int, int], float]  # by `AGAIN`, forward and backward with attention's core recomputed
    copy: float  # of `COPIED` float32 numbers
    update: float  # of `UPDATED` parameters by AdamW, with the norm of their gradients
    waits: float  # relative slowdown of some milliseconds of work if all ranks then wait for the last
    reduces: dict[tuple[int, int], float]  # by (ranks, bytes)
    # by (key of `SPLIT`, layers, hidden, tokens), forward and backward on two ranks
    split: dict[tuple[str, int, int, int], float]


def build_model_shape(layers: int, hidden: int) -> ModelShape:
    """Return the shape of a small llama model with these sizes."""
    return ModelShape(
        family="llama", layers=layers, hidden=hidden, heads=hidden // 32, kv_heads=hidden // 32, head_dim=32,
        ffn=hidden * 8 // 3 // 32 * 32, vocab=2048, max_sequence=128, tied=False,
    )  # fmt: skip


def measure(pool: Pool, cores: int, usable: int, ranks: list[int], rounds: int, say: Say) -> CoreMeasurements:
    """Measure everything, on a pool of ranks with one thread each.

    Args:
        cores: ranks that compute at the same time, of the ``usable`` ones.
        ranks: numbers of ranks to measure collectives for.
    """
    turns = []
    for turn in range(rounds):
        say(0.7 * turn / rounds, f"{cores} cores, turn {turn + 1} of {rounds}")
        turns += pool.run(time_kernels, cores, turn, timeout=300.0)
    medians: dict[str, dict] = {}
    for kind, key in turns[0]:
        medians.setdefault(kind, {})[key] = median(times[kind, key] for times in turns)
    limit = 300.0 + 60.0 * rounds  # seconds; a round of any of these takes a few
    waits = median(pool.run(measure_waits, cores, rounds, timeout=limit)) if cores > 1 else 0.0
    split: dict[tuple[str, int, int, int], float] = {}
    for size in SPLIT_MODELS if cores > 1 else ():
        say(0.7, "models on two ranks")
        every = pool.run(time_split, 2, size, rounds, timeout=limit)
        split |= {(way, *size): max(rank[way] for rank in every) for way in SPLIT}
    reduces: dict[tuple[int, int], float] = {}
    for i, n in enumerate(ranks):
        say(0.8 + 0.2 * i / len(ranks), f"collectives of {n} ranks")
        every = pool.run(time_reductions, n, rounds, timeout=limit)
        reduces |= {(n, size): median(rank[size] for rank in every) for size in REDUCED}
    return CoreMeasurements(
        cores, usable, medians["product"], medians["attention"], medians["model"], medians["forward"],
        medians["again"], medians["copy"][()], medians["update"][()], waits, reduces, split,
    )  # fmt: skip


def time_kernels(turn: int) -> dict[tuple[str, tuple], float]:
    """Return the CPU time of everything that a rank does by itself, by kind and size, while all ranks do the same."""
    torch.manual_seed(turn)
    times = {}
    for kind, key, step, repeats in list_kernels():
        begin = time.process_time()
        step()
        if time.process_time() - begin > LONG:
            repeats = 1
        dist.barrier()
        begin = time.process_time()
        for _ in range(repeats):
            step()
        times[kind, key] = (time.process_time() - begin) / repeats
    return times


def list_kernels() -> Iterator[tuple[str, tuple, Callable[[], object], int]]:
    """Yield what to measure: its kind and size, a function, and the repetitions of one measurement."""
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
    rule = torch.optim.AdamW([weights], fused=True)  # like shoal's own
    yield "update", (), lambda: (torch.linalg.vector_norm(weights.grad), rule.step()), 2


def _model(layers: int, hidden: int, recompute: Recompute = "none") -> Transformer:
    """Return a model as the engine has it on one device, with gradient buffers."""
    return _stage(build_model_shape(layers, hidden), Layout(recompute=recompute), 0).module


def _stage(shape: ModelShape, layout: Layout, rank: int) -> LocalStage:
    """Return a stage with all of a model, as the engine has it."""
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


def time_reference(repeats: int) -> list[float]:
    """Return the wall times of forward and backward of the `REFERENCE` model, together with the other ranks."""
    layers, hidden, tokens = REFERENCE
    ids = torch.randint(2048, (tokens // 128, 128))
    step = partial(_passes, _model(layers, hidden), ids)
    return time_in_turns({REFERENCE: step}, repeats, prepare=lambda key: dist.barrier())[REFERENCE]


def measure_waits(rounds: int) -> float:
    """Return the relative slowdown of some milliseconds of products if all ranks then wait for the last."""
    group = Mesh(Layout(tp=dist.get_world_size()), dist.get_rank()).group("tp")
    a, b, flag = torch.randn(1024, 256), torch.randn(256, 256), torch.zeros(1)

    def time_products(products: int, *, meet: bool) -> float:
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
        together, apart = time_products(PRODUCTS_BETWEEN, meet=True), time_products(PRODUCTS_BETWEEN, meet=False)
        if turn:
            found.append((together - time_products(0, meet=True)) / apart - 1)
    return max(0.0, min(found))  # other programs can only add to it


def time_split(size: tuple[int, int, int], rounds: int) -> dict[str, float]:
    """Return the median seconds of a micro-batch before the last of a step, for one of `SPLIT_MODELS`, by `SPLIT`."""
    layers, hidden, tokens = size
    ids = torch.randint(2048, (tokens // 128, 128))
    steps = {way: _split_step(layout, build_model_shape(layers, hidden), ids) for way, layout in SPLIT.items()}

    def prepare(way: str) -> None:
        dist.barrier()
        steps[way]()  # fills the caches again

    seconds = time_in_turns(steps, rounds, prepare=prepare, in_a_row=IN_A_ROW)
    return {way: median(times) for way, times in seconds.items()}


def _split_step(layout: Layout, shape: ModelShape, ids: torch.Tensor) -> Callable[[], None]:
    stage = _stage(shape, layout, dist.get_rank())

    def step() -> None:
        stage.parameters.last_microbatch = False
        _passes(stage.module, ids)
        stage.parameters.backward_done()

    return step


def time_reductions(rounds: int) -> dict[int, float]:
    """Return the seconds of an all-reduce by bytes: the mean of activations' and gradients' transports."""
    ways = time_all_reduces(REDUCED, rounds, WAYS[:2])
    return {size: mean(median(times) for times in seconds.values()) for size, seconds in ways.items()}
