"""`shoal explain memory`: the parts of a rank's memory against its device; activations by tensor and by formula.

Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models", section 4) count the
activations of a GPT layer in 16 bits: s b h (34 + 5 a s/h) bytes. shoal counts the tensors that its own layers keep.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pydantic import PositiveInt
from rich.console import Console
from rich.table import Table

from shoal.base.units import show_bytes
from shoal.labs.explain.options import BatchOptions
from shoal.planning.cost.memory import activations
from shoal.planning.cost.memory.saved import total
from shoal.planning.cost.micro_batch import MicroBatch
from shoal.planning.describe import estimate
from shoal.planning.estimate import Estimate
from shoal.report.charts import draw_bars, draw_lines, new_figure, to_svg
from shoal.report.tables import text_table
from shoal.spec.catalog import ModelShape
from shoal.spec.layout import Layout, Recompute, ZeroStage

MODES: tuple[Recompute, ...] = ("none", "selective", "full")
SEQUENCES = tuple(1024 * 2**k for k in range(8))


class MemoryOptions(BatchOptions):
    """Memory of a rank by part; activations tensor by tensor.

    Against its device; the activations of a layer also by formula.
    """

    cluster: str = "8xH100"
    """A cluster: 8xH100, 64x8xH100, v5p-4096, or an accelerator of the catalog."""

    pp: PositiveInt = 1
    """Pipeline stages; replicas fill the rest of the cluster."""

    zero: ZeroStage = 1
    """ZeRO stage."""

    sequence_parallel: bool = False
    """Also split activations between the tensor-parallel blocks along the sequence."""

    recompute: Recompute = "none"
    """What backward computes again: none, selective or full."""

    precision: str = "bf16"
    """Number formats: bf16, fp32 or another precision of `shoal train`."""


def korthikanti(shape: ModelShape, s: int, layout: Layout, recompute: Recompute) -> float:
    """Return the bytes of a layer's activations on a rank in 16 bits, by Korthikanti et al. 2022, equations 1 to 4.

    t ranks split what is inside of a block; with sequence parallelism also the rest. Selective recomputation drops the
    scores, 5 a s/h. Full recomputation keeps the layer's input.

    >>> from shoal.spec.catalog import model_shape
    >>> shape = model_shape("gpt3-6.7b")
    >>> layer = korthikanti(shape, 2048, Layout(), "none")
    >>> round(shape.layers * layer / 1e9, 1), layer == 2048 * 4096 * (34 + 5 * 32 * 2048 / 4096)
    (30.6, True)
    """
    size, t = s * layout.micro_batch * shape.hidden, layout.tp
    scores = 5 * shape.heads * s / shape.hidden if recompute == "none" else 0.0
    if recompute == "full":
        return 2 * size / (t if layout.sequence_parallel else 1)
    if layout.sequence_parallel:
        return size * (34 + scores) / t
    return size * (10 + (24 + scores) / t)


def explain(options: MemoryOptions, console: Console) -> Callable[[], str]:
    """Print the tables. Returns a function that draws them."""
    layout = Layout(
        tp=options.tp, pp=options.pp, zero=options.zero, recompute=options.recompute,
        sequence_parallel=options.sequence_parallel, micro_batch=options.micro_batch,
    )  # fmt: skip
    found = estimate(
        layout, model=options.model, cluster=options.cluster, sequence_length=options.sequence_length, fill=True,
        precision=options.precision,
    )  # fmt: skip
    assert isinstance(found, Estimate), "no other software was named"
    run = found.run
    batch = f"{options.precision}, {options.micro_batch} x {run.sequence_length:,} tokens"
    where = f"{run.cluster.describe()}: {run.layout.describe()}"
    console.print(f"[bold]{options.model}[/] on {where}, {batch}", highlight=False)
    console.print(_parts(found), "")
    saved = activations.layer(found.forward)
    rows = [(tensor.what, tensor.shape, show_bytes(tensor.bytes)) for tensor in saved]
    rows.append(("all of a layer", "", show_bytes(total(saved))))
    console.print(text_table(("kept by a layer for backward", "", "of a rank"), rows, words=(0, 1)), "")
    console.print("A layer by what is recomputed: 34 + 5 a s/h of a GPT with stored scores, and what shoal keeps.")
    console.print(_modes(found))
    return partial(draw, found, f"Memory of {options.model}, {run.layout.describe()}")


def _parts(found: Estimate) -> Table:
    memory = found.fullest
    held = ((name, size) for name, size in vars(memory).items() if size)
    rows: list[tuple[str, ...]] = [
        (name, show_bytes(size), f"{100 * size / found.capacity:.1f} %") for name, size in held
    ]
    verdict = "fits" if found.fits else "does not fit"
    rows += [(), ("all", show_bytes(memory.reserved), f"{100 * memory.reserved / found.capacity:.1f} %"),
             ("of the device", show_bytes(found.capacity), verdict)]  # fmt: skip
    return text_table(("fullest rank", "bytes", "of the device"), rows)


def _modes(found: Estimate) -> Table:
    """Compare the bytes of a layer in each recomputation: by the formula, and of shoal's two attention kernels."""
    run, rows = found.run, []
    for mode in MODES:
        formula = korthikanti(run.shape, run.sequence_length, run.layout, mode)
        counted = [total(activations.layer(batch, mode)) for batch in _kernels(found)]
        rows.append((mode, *map(show_bytes, (formula, *counted))))
    return text_table(("", "formula", "shoal, explicit scores", "shoal, sdpa"), rows)


def _kernels(found: Estimate, s: int | None = None) -> list[MicroBatch]:
    """Return the micro-batch with each attention kernel, and with another sequence length."""
    forward = found.forward
    args = (forward.shape, forward.layout, s or forward.s, forward.itemsize)
    return [MicroBatch(*args, "explicit", fused=forward.fused), MicroBatch(*args, "sdpa", fused=forward.fused)]


def draw(found: Estimate, title: str) -> str:
    """Draw the memory of each pipeline rank against the device, and a layer's activations over the sequence length."""
    figure, (bars, lines) = new_figure(860, 560, rows=2, title=title)
    memory = found.memory
    held = [(f"pp {rank}", list(vars(each).values()), show_bytes(each.reserved)) for rank, each in enumerate(memory)]
    draw_bars(bars, list(vars(memory[0])), held, (found.capacity, f"{show_bytes(found.capacity)} of a device"))
    run = found.run
    series: dict[str, list[tuple[float, float]]] = {
        "34 + 5 a s/h": [(s, korthikanti(run.shape, s, run.layout, "none")) for s in SEQUENCES]
    }  # fmt: skip
    for kernel, name in enumerate(("explicit scores", "sdpa")):
        series[name] = [(s, total(activations.layer(_kernels(found, s)[kernel], "none"))) for s in SEQUENCES]
    draw_lines(lines, "Activations of a layer over the sequence length", series, dots=True,
               x=("tokens", lambda x: f"{x:,.0f}"), y=("", show_bytes))  # fmt: skip
    return to_svg(figure)
