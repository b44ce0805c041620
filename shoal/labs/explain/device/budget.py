"""`shoal explain budget`: what a training costs on paper, from its FLOPs and the part of the peak that it reaches.

`shoal estimate` finds that part for a layout; here it is given. The rest of the arithmetic is the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt
from rich.console import Console

from shoal.base.errors import UsageError
from shoal.base.options import reject_unused
from shoal.base.units import DAY, show_bytes, show_metric, show_number
from shoal.labs.explain.device.accelerators import find_node
from shoal.labs.explain.options import FigureOptions
from shoal.labs.explain.scaling import YEAR, six_n_t, training_seconds
from shoal.planning.cost.flops import petaflop_days
from shoal.planning.full_training import FullTraining
from shoal.report.charts import draw_lines, new_figure, to_svg
from shoal.report.tables import text_table
from shoal.spec.catalog import ModelShape, model_shape
from shoal.spec.catalog.accelerators import Accelerator, accelerator
from shoal.spec.catalog.clusters import Cluster, Node, cluster, link

TEXT_BYTES = 5.0  # of a token: the 60 TB of 12e12 tokens


class BudgetOptions(FigureOptions):
    """Days, dollars and energy of a training on some devices.

    From a model and its tokens, or from FLOPs; or the devices that a number of days needs.
    """

    model: str = "llama-3-8b"
    """A model of the catalog, for its number of parameters."""

    parameters: PositiveFloat | None = None
    """Parameters N instead of a model's, such as 70e9; of experts those that one token passes."""

    tokens: PositiveFloat | None = None
    """Tokens T of the training, such as 15e12 (default: 20 per parameter). FLOPs are 6 N T,
    without attention's scores, which `shoal estimate` counts."""

    flops: PositiveFloat | None = None
    """FLOPs of the training instead, such as 2e25."""

    accelerator: str = "h100-sxm"
    """Device: a name of the catalog."""

    format: str = ""
    """Number format of its peak: bf16, fp8, ... (default: its 16-bit format)."""

    utilisation: float = Field(0.4, gt=0, le=1)
    """Part of the dense peak that the training reaches (MFU)."""

    devices: PositiveInt | None = None
    """Number of devices (default: the most that --batch keeps busy, else 1)."""

    days: PositiveFloat | None = None
    """Duration, from which the number of devices follows."""

    price: PositiveFloat | None = None
    """Dollars per device and hour (default: the catalog's list price)."""

    batch: PositiveFloat | None = None
    """Tokens of a step, such as 16e6: shows the most devices that FSDP keeps busy with it."""

    axes: PositiveInt = 3
    """Axes of a torus over which FSDP communicates, both directions of each."""


class Work(NamedTuple):
    """FLOPs of a training; parameters and tokens are None if only the FLOPs were given."""

    flops: float
    parameters: float | None
    tokens: float | None


def tokens_to_keep_busy(machine: Accelerator, kind: str, axes: int) -> float | None:
    """Return the tokens of a device's batch from which FSDP is bound by arithmetic: peak over network bandwidth.

    A layer of D x F has 4 B D F / X FLOPs in a forward for 4 D F gathered bytes, so B/X > C/W (Austin et al. 2025, *How
    to Scale Your Model*, chapter 5). W is both directions of ``axes`` axes of a torus, or one direction of the link of
    a switched node.

    Returns:
        None if the catalog does not know what connects the devices.
    """
    node = find_node(machine)
    if node is None:
        return None
    return machine.dense_flops(kind) / _network(node, axes)


def _network(node: Node, axes: int) -> float:
    """Return the bytes/s over which a device gathers weights."""
    if node.dimensions and axes > node.dimensions:
        raise UsageError(f"--axes {axes}: a torus of {node.accelerator} has {node.dimensions}.")
    return link(node.inside).bandwidth * (2 * axes if node.dimensions else 1)


def explain(options: BudgetOptions, console: Console) -> Callable[[], str]:
    """Print the budget. Returns a function that draws the days over the number of devices."""
    machine = accelerator(options.accelerator)
    kind = options.format or machine.half
    work, rate = _work(options), machine.dense_flops(kind)
    if options.days and options.devices:
        raise UsageError("--devices and --days: one determines the other.\n  Give one.")
    busy = tokens_to_keep_busy(machine, kind, options.axes) if options.batch else None
    devices = options.devices or _devices(options, work, rate, busy)
    seconds = training_seconds(work.flops, rate, devices, options.utilisation)
    machines = _cluster(machine)
    training = FullTraining(
        work.tokens or 0.0, seconds, devices, options.price or machine.dollars_per_hour, machines.watts, machines.pue
    )
    rows = [
        *_work_rows(work), (),
        ("devices", f"{devices:,} x {machine.name}: {rate / 1e12:,.4g} TFLOP/s of {kind} each, "
                    f"{100 * options.utilisation:g} % of it"),
        ("time", f"{_days(seconds)}; on one device {_days(seconds * devices)}"),
        *_cost_rows(training, machine, machines), *_batch_rows(options, busy),
    ]  # fmt: skip
    console.print(text_table(("", ""), rows, words=(0, 1)))
    return partial(draw, work.flops, rate, devices, options.utilisation, machine.name)


def draw(flops: float, rate: float, devices: int, utilisation: float, name: str) -> str:
    """Draw the days of a training over the number of devices, with the given one marked."""
    counts = [count for k in range(-3, 4) if (count := devices * 2.0**k) >= 1]
    series = {
        f"{100 * part:.3g} % of the peak": [(n, training_seconds(flops, rate, 1, part) / n / DAY) for n in counts]
        for part in (utilisation, 1.0)
    }
    days = training_seconds(flops, rate, devices, utilisation) / DAY
    figure, (axes,) = new_figure(860, 360)
    draw_lines(axes, f"Days of {flops:.3g} FLOPs over the number of {name}", series, x=("devices", "{:,.0f}".format),
               y=("days", show_number), marks=[(float(devices), days, f"{show_number(days)} days")])  # fmt: skip
    axes.set_xticks(counts)
    return to_svg(figure)


def _work(options: BudgetOptions) -> Work:
    if options.flops:
        reject_unused(options, ("model", "parameters", "tokens"), "--flops is what they would give")
        return Work(options.flops, None, None)
    if options.parameters:
        reject_unused(options, ("model",), "--parameters is its number of parameters")
    parameters = options.parameters or active_parameters(model_shape(options.model))
    tokens = options.tokens or 20 * parameters
    return Work(six_n_t(parameters, tokens), parameters, tokens)


def active_parameters(shape: ModelShape) -> float:
    """Return the parameters that one token passes: all of a dense model, of experts those that are chosen."""
    if shape.experts is None:
        return float(shape.parameters())
    return shape.flops_per_token(0) / 6 + shape.vocab * shape.hidden


def _devices(options: BudgetOptions, work: Work, rate: float, busy: float | None) -> int:
    if options.days:
        return max(1, -int(-work.flops // (rate * options.utilisation * options.days * DAY)))
    return max(1, int(options.batch / busy)) if options.batch and busy else 1


def _cluster(machine: Accelerator) -> Cluster:
    """Return the device with its share of a node, if its node is known."""
    node = find_node(machine)
    if node is None or node.dimensions:
        return cluster(machine.name)
    return cluster(f"{node.per_node}x{node.name}")


def _work_rows(work: Work) -> Iterator[tuple[str, str]]:
    if work.parameters and work.tokens:
        each = f"{show_number(work.tokens / work.parameters)} each"
        yield "parameters N, tokens T", f"{work.parameters:.4g}, {work.tokens:.4g} ({each})"
    named = "FLOPs, 6 N T" if work.parameters else "FLOPs"
    yield named, f"{work.flops:.3g}, {show_number(petaflop_days(work.flops))} petaFLOP/s-days"
    if work.tokens:
        ids = ", ".join(f"{show_bytes(work.tokens * size)} in {8 * size} bits" for size in (2, 4))
        yield "tokens on disk", f"{show_bytes(work.tokens * TEXT_BYTES)} of text; as numbers {ids}"


def _cost_rows(training: FullTraining, machine: Accelerator, machines: Cluster) -> Iterator[tuple[str, str]]:
    if training.dollars is not None:
        yield "rent", f"${training.dollars:,.0f} at ${training.price:,.2f} a device-hour"
    if machine.watts:
        yield "power of the boards alone", show_metric(training.devices * machine.watts, "W")
    if training.kilowatts is not None and training.kilowatt_hours is not None:
        of = f"{training.watts:,.0f} W each {machines.watts_of}, times {machines.pue:g} (PUE)"
        yield "power of all", f"{show_metric(1000 * training.kilowatts, 'W')}: {of}"
        yield "energy", show_metric(1000 * training.kilowatt_hours, "Wh")


def _batch_rows(options: BudgetOptions, busy: float | None) -> Iterator[tuple[str, str]]:
    if options.batch is None:
        return
    if busy is None:
        raise UsageError(f"--batch: the catalog has no network of {options.accelerator}.\n  Leave it out.")
    most = int(options.batch / busy)
    yield "tokens of a device to be busy", f"{busy:,.0f}: peak over network bandwidth (FSDP)"
    node = find_node(accelerator(options.accelerator))
    pods = f", {most / node.most:.2f} pods of {node.most:,}" if node and node.most else ""
    yield "most devices that are", f"{most:,} with {options.batch:.3g} tokens a step{pods}"


def _days(seconds: float) -> str:
    days = seconds / DAY
    return f"{show_number(seconds / YEAR)} years" if seconds >= 2 * YEAR else f"{show_number(days)} days"
