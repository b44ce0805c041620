"""`shoal explain all-reduce`: how a collective works, what it costs on a network, which algorithm is best when."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from rich.console import Console
from rich.table import Table

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.files import check_writable
from shoal.base.options import reject_unused
from shoal.base.section import Section
from shoal.base.units import BANDWIDTH, BYTES, TIME, parse, show_bytes, show_seconds
from shoal.labs.collectives import topology as networks
from shoal.labs.collectives.checker import check
from shoal.labs.collectives.description import ROOTED, Collective, Description
from shoal.labs.collectives.price import Bound, Price, bus_bandwidth, fastest, lower_bound, price, traffic
from shoal.labs.collectives.textbook import TEXTBOOK, describe
from shoal.labs.collectives.topology import Topology, Wire
from shoal.labs.explain.figures import rounds as rounds_figure
from shoal.labs.explain.rounds import picture
from shoal.report.charts import draw_lines, new_figure, to_svg
from shoal.report.svg import FAINT, Canvas
from shoal.spec.catalog.accelerators import accelerator
from shoal.spec.catalog.links import link

TOPOLOGIES = ("full", "ring", "torus-2d", "torus-3d", "fat-tree", "islands")
OF_TOPOLOGY = {"fat-tree": ["oversubscription"], "islands": ["nics", "inside"]}  # options
MOST_RANKS = 64
MOST_LINKS = 12  # in the table of traffic
SIZES = [10 ** (k / 4) for k in range(8, 41)]  # of the chart: 100 B to 10 GB


class CollectiveOptions(Section):
    """A collective: its rounds, traffic, time and volume, the lower bound, and which algorithm is best when."""

    ranks: PositiveInt = 8
    """Ranks that take part."""

    algorithm: str = ""
    """The one that is drawn (default: the fastest at --size). All of them are compared."""

    size: str = "16MB"
    """Bytes of the largest input or output of one rank: 4KiB, 16MB, ..."""

    root: NonNegativeInt = 0
    """Of a broadcast, reduce, scatter or gather."""

    topology: str = "full"
    """full, ring, torus-2d, torus-3d, fat-tree, or islands (nodes with a fast switch inside and NICs between them)."""

    link: str = "infiniband-ndr"
    """Between ranks, or of a NIC: a name of the catalog."""

    alpha: str = ""
    """Latency of that link instead of the catalog's: 5us."""

    bandwidth: str = ""
    """Its bandwidth instead of the catalog's, in one direction: 1MB/s."""

    inside: str = "nvlink-4"
    """The link inside an island: a name of the catalog."""

    per_node: PositiveInt | None = None
    """Ranks of a node, of a leaf switch, and inside for the hierarchical algorithm (default: the largest divisor
    of --ranks up to 8)."""

    nics: PositiveInt | None = None
    """NICs of an island's node (default: one for each rank)."""

    oversubscription: PositiveFloat = 1.0
    """Of a fat tree: what a leaf's ranks can send over what its trunk carries."""

    segments: PositiveInt | None = None
    """Blocks of a pipelined chain, the ring broadcast and reduce (default: --ranks)."""

    accelerator: str = "h100-sxm"
    """Whose memory adds the numbers of a reduction: a name of the catalog."""

    out: Path | None = None
    """Also draw the rounds, the traffic and the times to this file, .svg."""


def explain(collective: Collective, options: CollectiveOptions, console: Console) -> int:
    """Print the explanation and draw it.

    Raises:
        UsageError: bad options.
    """
    size = parse(options.size, BYTES, where="--size")
    _check(collective, options)
    topology = network(options)
    descriptions = {
        name: describe(
            collective, name, options.ranks, root=options.root, per_node=_per_node(options), segments=options.segments
        )
        for name in TEXTBOOK[collective]
    }
    prices = {name: price(description, topology) for name, description in descriptions.items()}
    bound = lower_bound(collective, options.ranks)
    chosen = options.algorithm or min(prices, key=lambda name: float(f"{prices[name].seconds(size):.9g}"))
    shown = descriptions[chosen]
    check(shown)
    where = f"{topology.name}, {wire_words(options)}"
    what = f"[bold]{collective}[/] of S = {show_bytes(size)} on {options.ranks} ranks by [bold]{chosen}[/]"
    console.print(f"{what}: {where}")
    console.print(picture(shown, topology, size))
    console.print()
    console.print(_facts(shown, topology, size))
    console.print(_comparison(descriptions, prices, bound, topology, size))
    console.print(_crossovers(prices))
    if options.out:
        options.out.write_text(figure(shown, prices, bound, topology, size, where))
        console.print(f"drawn: {options.out}")
    return 0


def _check(collective: Collective, options: CollectiveOptions) -> None:
    if options.ranks > MOST_RANKS:
        raise UsageError(f"--ranks {options.ranks}: every message is looked at, so at most {MOST_RANKS} are explained")
    if options.algorithm and options.algorithm not in TEXTBOOK[collective]:
        near = did_you_mean(options.algorithm, TEXTBOOK[collective])
        raise UsageError(f"--algorithm {options.algorithm}: {collective} has none of that name; {near}")
    check_writable(options.out, "--out", ".svg")
    if options.root and collective not in ROOTED:
        raise UsageError(f"--root {options.root}: {collective} has no root")
    for topology, names in OF_TOPOLOGY.items():
        if options.topology != topology:
            reject_unused(options, names, f"of --topology {topology}, not of {options.topology}")
    if collective not in ("broadcast", "reduce"):
        reject_unused(options, ["segments"], f"of a broadcast or reduce, not of {collective}")


def network(options: CollectiveOptions) -> Topology:
    """The topology that the options name.

    Raises:
        UsageError: there is none of that name, or its groups do not come out even.
    """
    wire = wire_of(options)
    gamma = 3 / accelerator(options.accelerator).memory_bandwidth  # reads two numbers and writes one
    n, per_node = options.ranks, _per_node(options)
    if options.topology == "full":
        return networks.fully_connected(n, wire, gamma)
    if options.topology == "ring":
        return networks.ring(n, wire, gamma)
    if options.topology in ("torus-2d", "torus-3d"):
        return networks.torus(_grid(n, int(options.topology[-2])), wire, gamma)
    if options.topology == "fat-tree":
        return networks.fat_tree(n, per_node, wire, options.oversubscription, gamma)
    if options.topology == "islands":
        inner = link(options.inside)
        inside = Wire(inner.latency, inner.bandwidth, inner.name)
        return networks.islands(n, per_node, inside, wire, options.nics, gamma)
    raise UsageError(f"--topology {options.topology}: {did_you_mean(options.topology, TOPOLOGIES)}")


def wire_of(options: CollectiveOptions) -> Wire:
    """The link that the options name.

    Raises:
        UsageError: it is not in the catalog, or carries nothing.
    """
    known = link(options.link)
    alpha = parse(options.alpha, TIME, where="--alpha") if options.alpha else known.latency
    bandwidth = parse(options.bandwidth, BANDWIDTH, where="--bandwidth") if options.bandwidth else known.bandwidth
    if bandwidth == 0:
        raise UsageError(f"--bandwidth {options.bandwidth}: more than nothing is needed")
    return Wire(alpha, bandwidth, "link" if options.alpha or options.bandwidth else known.name)


def wire_words(options: CollectiveOptions) -> str:
    """The link in words."""
    wire = wire_of(options)
    return f"{wire.kind} with α = {show_seconds(wire.latency)}, 1/β = {show_bytes(wire.bandwidth)}/s"


def _per_node(options: CollectiveOptions) -> int:
    divisors = [d for d in range(1, min(8, options.ranks - 1) + 1) if options.ranks % d == 0]
    return options.per_node or max(divisors, default=1)


def _grid(ranks: int, dims: int) -> tuple[int, ...]:
    """The most even grid of so many ranks."""
    if dims == 1:
        return (ranks,)
    first = max(d for d in range(1, ranks + 1) if ranks % d == 0 and d**dims <= ranks)
    return (first, *_grid(ranks // first, dims - 1))


# ---- tables ---------------------------------------------------------------------------------------------------------


def _formula(text: str, unit: str) -> str:
    return f"({text}) {unit}" if " + " in text or " - " in text else f"{text} {unit}"


def _facts(description: Description, topology: Topology, size: float) -> Table:
    """The counts of one algorithm and its busiest links."""
    algorithm = TEXTBOOK[description.collective][description.algorithm]
    time = price(description, topology)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    terms = [_formula(algorithm.rounds, "α"), _formula(algorithm.volume, "S β")]
    if algorithm.reduced != "0":
        terms.append(_formula(algorithm.reduced, "S γ"))
    table.add_row("time, textbook", f"{'at most ' if algorithm.bound else ''}{' + '.join(terms)}")
    table.add_row("here", f"{show_seconds(time.latency)} + S x {show_seconds(time.per_byte * 1e6)} per MB = "
                  f"{show_seconds(time.seconds(size))}")
    table.add_row("rounds", f"{len(description.rounds)}")
    table.add_row("total volume", f"{_share(description.total, size)} over {len(list(description.messages))} messages")
    table.add_row("peak volume", f"{_share(description.busiest, size)} sent or received by the busiest rank")
    links = sorted(traffic(description, topology).items(), key=lambda item: -item[1] * topology.wires[item[0]].beta)
    loads: dict[tuple[Fraction, str], list[str]] = {}
    for (source, target), load in links:
        loads.setdefault((load, topology.wires[source, target].kind), []).append(f"{source} → {target}")
    for (load, kind), names in list(loads.items())[:MOST_LINKS]:
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        table.add_row("traffic of a link", f"{_share(load, size)}: {kind} {listed}")
    if len(loads) > MOST_LINKS:
        table.add_row("", f"and {len(loads) - MOST_LINKS} lesser loads")
    return table


def _share(part: Fraction, size: float) -> str:
    return f"{part} S = {show_bytes(float(part) * size)}"


def _comparison(
    descriptions: dict[str, Description], prices: dict[str, Price], bound: Bound, topology: Topology, size: float
) -> Table:
    """All algorithms and the lower bound."""
    collective = next(iter(descriptions.values())).collective
    table = Table(title=f"{collective} on {topology.name}, S = {show_bytes(size)}", title_justify="left")
    table.add_column("algorithm")
    for column in ("rounds", "S β", "S γ", "total / S", "time", "bus", "x bound"):
        table.add_column(column, justify="right")
    least = bound.seconds(size, topology)
    best = min(price.seconds(size) for price in prices.values())
    for name, d in sorted(descriptions.items(), key=lambda item: float(f"{prices[item[0]].seconds(size):.9g}")):
        seconds = prices[name].seconds(size)
        bus = f"{show_bytes(bus_bandwidth(collective, d.ranks, size, seconds))}/s" if seconds else "–"
        style = "bold green" if seconds <= best * (1 + 1e-9) else ""
        over = f"{seconds / least:.2f}" if least else "–"
        counts = [str(len(d.rounds)), str(d.volume), str(d.reduced), str(d.total)]
        table.add_row(name, *counts, show_seconds(seconds), bus, over, style=style)
    table.add_section()
    table.add_row(
        "lower bound", str(bound.rounds), str(bound.volume), str(bound.reduced), "", show_seconds(least), "", "1",
        style="dim",
    )
    return table


def _crossovers(prices: dict[str, Price]) -> str:
    """Which algorithm is the fastest at which sizes."""
    envelope = fastest(prices)
    parts = []
    for i, (start, name) in enumerate(envelope):
        stop = f" to {show_bytes(envelope[i + 1][0])}" if i + 1 < len(envelope) else " on"
        parts.append(f"{name} from {show_bytes(start)}{stop}")
    return "fastest: " + ", ".join(parts)


# ---- figure ---------------------------------------------------------------------------------------------------------


def figure(
    shown: Description, prices: dict[str, Price], bound: Bound, topology: Topology, size: float, where: str
) -> str:
    """The rounds of one algorithm, its traffic, and the times of all over the size, as one SVG file."""
    width = max(900.0, 140 + 62.0 * min(shown.ranks, 24))
    canvas = Canvas()
    title = f"{shown.collective} on {shown.ranks} ranks by {shown.algorithm}"
    canvas.text(30, 40, title, size=21, font_weight=650)
    words = f"S = {show_bytes(size)} on {where}: {show_seconds(prices[shown.algorithm].seconds(size))}"
    canvas.text(30, 62, words, size=13, fill=FAINT)
    canvas.place(30, 84, rounds_figure.rounds(shown, topology, size, width=width - 60))
    below = 84 + rounds_figure.height(shown) + 34
    panel = 370.0
    side = 330.0
    canvas.place(30, below, rounds_figure.matrix(shown, size, side=side))
    if shown.ranks > 1:
        canvas.embed(side + 70, below, _chart(prices, bound, topology, width=width - side - 100, height=panel + 20))
    return canvas.document(width, below + panel + 40, title)


def _chart(prices: dict[str, Price], bound: Bound, topology: Topology, *, width: float, height: float) -> str:
    """Draw times over the size as multiples of the lower bound, and mark where the fastest changes."""
    def over(name: str, size: float) -> float:
        return prices[name].seconds(size) / bound.seconds(size, topology)

    marks = [
        (start, over(name, start), show_bytes(start))
        for start, name in fastest(prices)[1:]
        if SIZES[0] <= start <= SIZES[-1]
    ]
    figure, (axes,) = new_figure(width, height)
    draw_lines(
        axes,
        "Time over size, as a multiple of the lower bound",
        {name: [(size, over(name, size)) for size in SIZES] for name in prices},
        x=("S", show_bytes),
        y=("", "{:g} x".format),
        marks=marks,
        lowest=1.0,
    )
    return to_svg(figure)
