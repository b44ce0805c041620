"""`shoal explain tensor`: which parameter is split how, where ranks communicate, and what that sends and saves.

Column then row (Shoeybi et al. 2019, "Megatron-LM", section 3). The paper's f and g enter and leave a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pydantic import PositiveInt
from rich.console import Console
from rich.table import Table

from shoal.base.units import show_bytes
from shoal.labs.explain.options import BatchOptions
from shoal.planning.cost.memory.state import state_bytes
from shoal.planning.cost.micro_batch import MicroBatch
from shoal.planning.cost.parameters import StagePart, list_units
from shoal.planning.cost.time.traffic import tensor_parallel
from shoal.report.charts import stacked_bars
from shoal.report.tables import text_table
from shoal.spec.catalog import ModelShape, model_shape
from shoal.spec.compatibility.sizes import check_layout
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS

SPLITS = {
    "VocabularyEmbedding": "rows: token ids", "SequenceEmbedding": "replicated", "ColumnLinear": "columns: outputs",
    "KVColumnLinear": "columns: heads", "HeadsLinear": "columns: heads", "RowLinear": "rows: inputs",
    "JointNorm": "heads",
    "HeadSinks": "heads",
}  # fmt: skip
"""How the layers of `shoal.engine.parallel.linear` split a weight, in the notation y = x A."""
OPERATORS = {
    False: (("f, into a block", "identity", "all-reduce"), ("g, out of a block", "all-reduce", "identity")),
    True: (
        ("f, into a block", "all-gather", "all-gather, reduce-scatter"),
        ("g, out of a block", "reduce-scatter", "all-gather"),
    ),
}  # fmt: skip
"""Operator, its forward and its backward; with sequence parallelism as in Korthikanti et al. 2022, section 4.2.2."""
DEGREES = (1, 2, 4, 8, 16)


class TensorOptions(BatchOptions):
    """Which parameter is split how, and what a layer sends.

    Tensor parallelism: column and row splits, and the f and g steps.
    """

    tp: PositiveInt = 8
    """Tensor-parallel ranks."""

    sequence_parallel: bool = False
    """Also split activations between the blocks along the sequence."""


def explain(options: TensorOptions, console: Console) -> Callable[[], str]:
    """Print the tables. Returns a function that draws the bytes of a rank over tp."""
    shape = model_shape(options.model)
    s = options.sequence_length or shape.max_sequence
    layout = _layout(options, options.tp)
    check_layout(layout, shape, global_batch=options.micro_batch, sequence_length=s)
    batch = f"{options.micro_batch} x {s:,} tokens"
    console.print(f"[bold]{options.model}[/], {layout.describe()}, bf16, {batch}", highlight=False)
    console.print(_parameters(shape, layout), "")
    operators = OPERATORS[options.sequence_parallel]
    console.print(text_table(("operator", "forward", "backward"), operators, words=(0, 1, 2)), "")
    degrees = [tp for tp in sorted({*DEGREES, options.tp}) if shape.heads % tp == shape.ffn % tp == 0]
    held = {tp: _state(shape, _layout(options, tp)) for tp in degrees}
    console.print("Over tp: bytes of a rank between steps, and what it sends for a layer and a micro-batch.")
    console.print(_costs(options, shape, s, held))
    return partial(draw, held, f"Parameters, gradients and optimizer of {options.model} on a rank over tp")


def _layout(options: TensorOptions, tp: int) -> Layout:
    split = options.sequence_parallel and tp > 1
    return Layout(tp=tp, sequence_parallel=split, micro_batch=options.micro_batch)


def _parameters(shape: ModelShape, layout: Layout) -> Table:
    """List the parameters of a stage with one layer, and the part of the first rank."""
    from shoal.engine.parallel.tensor import TENSOR_PARALLEL, matches  # slow import

    rows = []
    for unit in list_units(shape, layout, StagePart(range(1))):
        for held in unit:
            module = held.name.rpartition(".")[0]
            style = next((style for pattern, style in TENSOR_PARALLEL.items() if matches(pattern, module)), None)
            split = SPLITS.get(getattr(style, "__name__", ""), "replicated")
            if held.box.shape == held.global_shape:
                split = "replicated"
            rows.append((held.name, _sides(held.global_shape), split, _sides(held.box.shape)))
    return text_table(("parameter", "shape", "split", "on a rank"), rows, words=(0, 2), gap=1)


def _sides(sides: tuple[int, ...]) -> str:
    return " x ".join(f"{side:,}" for side in sides)


def _state(shape: ModelShape, layout: Layout) -> tuple[int, int, int]:
    state = state_bytes(shape, layout, FORMATS["bf16"], "adamw", [StagePart(range(shape.layers))])
    return state.parameters, state.gradients, state.optimizer


def _costs(options: TensorOptions, shape: ModelShape, s: int, held: dict[int, tuple[int, int, int]]) -> Table:
    rows = []
    for tp, state in held.items():
        run = MicroBatch(shape, _layout(options, tp), s)
        forward, backward = (
            sum(sent.values()) for sent in tensor_parallel(run, StagePart(range(1), False, False), s, by_parts=False)
        )
        rows.append((str(tp), show_bytes(sum(state)), show_bytes(forward), show_bytes(backward)))
    return text_table(("tp", "a rank", "forward", "backward"), rows, words=())


def draw(held: dict[int, tuple[int, int, int]], title: str) -> str:
    """Draw a bar for each degree."""
    bars = [(f"tp {tp}", list(map(float, state)), show_bytes(sum(state))) for tp, state in held.items()]
    return stacked_bars(("parameters", "gradients", "optimizer"), bars, title=title, height=40)
