"""`shoal explain all-reduce`: how a collective works, its cost on a network, and the best algorithm by size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from pydantic import NonNegativeInt, PositiveInt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.options import reject_unused
from shoal.base.units import BYTES, parse, parse_numbers, show_bytes, show_seconds
from shoal.labs.collectives.checker import check
from shoal.labs.collectives.description import ROOTED, VECTORS, Collective, Description
from shoal.labs.collectives.price import Bound, Price, bus_bandwidth, fastest, lower_bound, price, sort_by_time, traffic
from shoal.labs.collectives.textbook import TEXTBOOK, describe
from shoal.labs.collectives.topology import Topology
from shoal.labs.explain.network import NetworkOptions, build_network, check_network
from shoal.labs.explain.options import FigureOptions
from shoal.labs.explain.rounds import draw_figure, draw_rounds, draw_traffic
from shoal.report.charts import draw_lines, styled, to_svg
from shoal.report.tables import text_table

TOPOLOGIES = ("full", "ring", "torus-2d", "torus-3d", "fat-tree", "islands")
MOST_RANKS = 64
MOST_LINKS = 12  # largest number of rows with traffic
CHARTS = 390.0  # height of the charts [pixels]
SIZES = [10 ** (k / 4) for k in range(8, 41)]  # sizes in the chart: 100 B to 10 GB


class CollectiveOptions(NetworkOptions, FigureOptions):
    """Rounds, traffic, volume and time of each algorithm.

    The lower bound, and which algorithm is best for which size.
    """

    ranks: PositiveInt = 8
    """Number of ranks."""

    algorithm: str = ""
    """Algorithm to draw (default: the fastest at --size). All of them are compared."""

    size: str = "16MB"
    """Bytes of the largest input or output of one rank: 4KiB, 16MB, ..."""

    root: NonNegativeInt = 0
    """Root of a broadcast, reduce, scatter or gather."""

    topology: str = "full"
    """full, ring, torus-2d, torus-3d, fat-tree, or islands (nodes with a fast switch inside and NICs between them)."""

    link: str = "infiniband-ndr"
    """Link between ranks, or of a NIC: a name of the catalog."""

    per_node: PositiveInt | None = None
    """Ranks of a node, of a leaf switch, and inside for the hierarchical algorithm (default: the largest divisor
    of --ranks up to 8)."""

    segments: PositiveInt | None = None
    """Blocks of a pipelined chain, the ring broadcast and reduce (default: --ranks)."""

    values: str = ""
    """A number of each rank, to follow through the rounds: 0.8,-0.2,-0.7,0.4 on 4 ranks."""


@dataclass(frozen=True)
class CollectiveStudy:
    """Every algorithm of one collective on one network for S of ``size`` bytes; ``shown`` is checked, and drawn."""

    descriptions: dict[str, Description]
    prices: dict[str, Price]
    bound: Bound
    topology: Topology
    shown: Description
    size: float


def study_collective(collective: Collective, options: CollectiveOptions) -> CollectiveStudy:
    """Describe and price every algorithm; choose the one that the options name, or the fastest.

    Raises:
        UsageError: an unknown algorithm or network, or options that do not fit the ranks or the collective.
    """
    size = parse(options.size, BYTES, where="--size")
    _check(collective, options)
    ranks, per_node = options.ranks, options.ranks_per_node(options.ranks)
    dims = int(options.topology[-2]) if options.topology.startswith("torus") else 1
    topology = build_network(options, ranks, _grid(ranks, dims))
    descriptions = {
        name: describe(collective, name, ranks, root=options.root, per_node=per_node, segments=options.segments)
        for name in TEXTBOOK[collective]
    }
    prices = {name: price(description, topology) for name, description in descriptions.items()}
    shown = descriptions[options.algorithm or sort_by_time(prices, size)[0]]
    check(shown)
    return CollectiveStudy(descriptions, prices, lower_bound(collective, ranks), topology, shown, size)


def explain(collective: Collective, options: CollectiveOptions, console: Console) -> Callable[[], str]:
    """Print the explanation. Returns a function that draws it."""
    found = study_collective(collective, options)
    shown, size = found.shown, found.size
    values = parse_values(options, shown)
    where = f"{found.topology.name}, {options.describe_wire()}"
    what = f"[bold]{collective}[/] of S = {show_bytes(size)} on {shown.ranks} ranks by [bold]{shown.algorithm}[/]"
    console.print(f"{what}: {where}")
    console.print(draw_rounds(shown, found.topology, size, values))
    console.print()
    console.print(_facts(found))
    console.print(_comparison(found))
    console.print(_crossovers(found.prices))
    return partial(draw, found, where)


def _check(collective: Collective, options: CollectiveOptions) -> None:
    if options.ranks > MOST_RANKS:
        raise UsageError(f"--ranks {options.ranks}: every message is simulated; at most {MOST_RANKS} ranks")
    if options.algorithm and options.algorithm not in TEXTBOOK[collective]:
        near = did_you_mean(options.algorithm, TEXTBOOK[collective])
        raise UsageError(f"--algorithm {options.algorithm}: unknown for {collective}; {near}")
    if options.root and collective not in ROOTED:
        raise UsageError(f"--root {options.root}: {collective} has no root")
    check_network(options, TOPOLOGIES, {})
    if collective not in ("broadcast", "reduce"):
        reject_unused(options, ["segments"], f"only for a broadcast or reduce, not {collective}")


def parse_values(options: CollectiveOptions, shown: Description) -> list[float]:
    """Return the number of each rank; none without --values.

    Raises:
        UsageError: not one number for each rank, or an algorithm that cuts the vector into blocks.
    """
    values = parse_numbers(options.values, where="--values") if options.values else []
    if values and len(values) != shown.ranks:
        raise UsageError(
            f"--values {options.values}: {len(values)} numbers for {shown.ranks} ranks; give --ranks {len(values)}"
        )
    if values and (shown.blocks > 1 or shown.collective not in VECTORS):
        raise UsageError(
            f"--values: {shown.collective} by {shown.algorithm} moves {shown.blocks} blocks; one number fits "
            "algorithms that send the full vector: broadcast, reduce or all-reduce with --algorithm tree"
        )
    return values


def _grid(ranks: int, dims: int) -> tuple[int, ...]:
    if dims == 1:
        return (ranks,)
    first = max(d for d in range(1, ranks + 1) if ranks % d == 0 and d**dims <= ranks)
    return (first, *_grid(ranks // first, dims - 1))


# ---- tables ---------------------------------------------------------------------------------------------------------


def _formula(text: str, unit: str) -> str:
    return f"({text}) {unit}" if " + " in text or " - " in text else f"{text} {unit}"


def _facts(found: CollectiveStudy) -> Table:
    description, topology, size = found.shown, found.topology, found.size
    algorithm = TEXTBOOK[description.collective][description.algorithm]
    time = found.prices[description.algorithm]
    terms = [_formula(algorithm.rounds, "α"), _formula(algorithm.volume, "S β")]
    if algorithm.reduced != "0":
        terms.append(_formula(algorithm.reduced, "S γ"))
    rows = [
        ("time, textbook", f"{'at most ' if algorithm.bound else ''}{' + '.join(terms)}"),
        ("time, this network", f"{show_seconds(time.latency)} + S x {show_seconds(time.per_byte * 1e6)} per MB = "
                 f"{show_seconds(time.seconds(size))}"),
        ("rounds", f"{len(description.rounds)}"),
        ("total volume", f"{_share(description.total, size)} over {len(list(description.messages))} messages"),
        ("peak volume", f"{_share(description.busiest, size)} sent or received by the busiest rank"),
    ]  # fmt: skip
    carried = traffic(description.messages, description.share, topology)
    links = sorted(carried.items(), key=lambda item: -item[1] * topology.wires[item[0]].beta)
    loads: dict[tuple[Fraction, str], list[str]] = {}
    for (source, target), load in links:
        loads.setdefault((load, topology.wires[source, target].kind), []).append(f"{source} → {target}")
    for (load, kind), names in list(loads.items())[:MOST_LINKS]:
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        rows.append(("traffic of a link", f"{_share(load, size)}: {kind} {listed}"))
    if len(loads) > MOST_LINKS:
        rows.append(("", f"and {len(loads) - MOST_LINKS} smaller loads"))
    return text_table(("", ""), [(Text(name, "dim"), value) for name, value in rows], words=(0, 1))


def _share(part: Fraction, size: float) -> str:
    return f"{part} S = {show_bytes(float(part) * size)}"


def _comparison(found: CollectiveStudy) -> Table:
    bound, size = found.bound, found.size
    least = bound.seconds(size, found.topology)
    best = min(price.seconds(size) for price in found.prices.values())
    rows = []
    for name in sort_by_time(found.prices, size):
        d, seconds = found.descriptions[name], found.prices[name].seconds(size)
        bus = f"{show_bytes(bus_bandwidth(bound.collective, d.ranks, size, seconds))}/s" if seconds else "–"
        over = f"{seconds / least:.2f}" if least else "–"
        counts = (len(d.rounds), d.volume, d.reduced, d.total)
        cells = [name, *map(str, counts), show_seconds(seconds), bus, over]
        rows.append([Text(cell, "bold green" if seconds <= best * (1 + 1e-9) else "") for cell in cells])
    limit = [
        "lower bound", str(bound.rounds), str(bound.volume), str(bound.reduced), "", show_seconds(least), "", "1"
    ]  # fmt: skip
    return text_table(
        ("algorithm", "rounds", "S β", "S γ", "total / S", "time", "bus", "x bound"),
        [*rows, [], [Text(cell, "dim") for cell in limit]],
        title=f"{bound.collective} on {found.topology.name}, S = {show_bytes(size)}", gap=1,
    )  # fmt: skip


def _crossovers(prices: dict[str, Price]) -> str:
    envelope = fastest(prices)
    stops = [*(f"to {show_bytes(start)}" for start, _ in envelope[1:]), "on"]
    parts = zip(envelope, stops, strict=True)
    return "fastest: " + ", ".join(f"{name} from {show_bytes(start)} {stop}" for (start, name), stop in parts)


# ---- figure ---------------------------------------------------------------------------------------------------------


@styled
def draw(found: CollectiveStudy, where: str) -> str:
    """Draw an SVG with the rounds of one algorithm, its traffic, and the times of all algorithms over the size."""
    shown, size = found.shown, found.size
    seconds = show_seconds(found.prices[shown.algorithm].seconds(size))
    title = (
        f"{shown.collective} on {shown.ranks} ranks by {shown.algorithm}\n"
        f"S = {show_bytes(size)} on {where}: {seconds}"
    )
    height = 60.0 + 62 * len(shown.rounds)
    figure = Figure(
        figsize=(max(9.4, 1.4 + 0.65 * min(shown.ranks, 24)), (height + CHARTS) / 96), layout="constrained"
    )
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    if shown.ranks > 1:
        grid = figure.add_gridspec(2, 1, height_ratios=(height, CHARTS))
        above, below = (figure.add_subfigure(grid[row]) for row in range(2))
        draw_figure(above.subplots(), shown, found.topology, size)
        traffic_chart, times = below.subplots(1, 2)
        draw_traffic(traffic_chart, shown, size)
        _draw_times(times, found)
    return to_svg(figure)


def _draw_times(axes: Axes, found: CollectiveStudy) -> None:
    """Plot times over the size as multiples of the lower bound, and mark where the fastest algorithm changes."""
    def over(name: str, size: float) -> float:
        return found.prices[name].seconds(size) / found.bound.seconds(size, found.topology)

    marks = [
        (start, over(name, start), show_bytes(start))
        for start, name in fastest(found.prices)[1:]
        if SIZES[0] <= start <= SIZES[-1]
    ]
    draw_lines(
        axes,
        "Time over size, as a multiple of the lower bound",
        {name: [(size, over(name, size)) for size in SIZES] for name in found.prices},
        x=("S, of the largest input or output of a rank", show_bytes),
        y=("", "{:g} x".format),
        marks=marks,
        lowest=1.0,
    )
    axes.xaxis.set_major_locator(LogLocator(1000))  # half of the figure has no space for a label at each power of ten
