"""`shoal explain "A[I, Jx] * B[Jx, K] -> C[I, K]" --mesh x=4,y=2`: blocks of each device, routes with prices, a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pydantic import PositiveInt
from rich.columns import Columns
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.options import reject_unused
from shoal.base.units import show_bytes, show_seconds
from shoal.engine.sharding.moves import Move
from shoal.engine.sharding.named_axes import NamedMesh, Sizes
from shoal.labs.autoshard.notation.moves import count_sent
from shoal.labs.autoshard.notation.network import MOST_RANKS, Links, Rings
from shoal.labs.autoshard.notation.notation import Array, Expression, parse, parse_mesh, parse_sizes
from shoal.labs.autoshard.notation.product import REMEDIES, classify, list_products
from shoal.labs.autoshard.notation.search import Route, RouteSearch, add_backward, find_forward
from shoal.labs.explain.blocks import Stage, State, draw_array, figure, make_memory_table
from shoal.labs.explain.network import NetworkOptions, build_network, check_network
from shoal.labs.explain.options import FigureOptions
from shoal.report.tables import text_table
from shoal.spec.catalog.accelerators import accelerator

TOPOLOGIES = ("full", "ring", "torus", "fat-tree", "islands", "rings")
STEP = ("step", "from", "to", "by", "sent by a device", "time")
ITEMSIZE = {"fp8": 1, "bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}
SIZE = 4096  # default size of a dim
MOST_RANKS_RUN = 16


class ShardingOptions(NetworkOptions, FigureOptions):
    """A product of sharded matrices: case, routes and prices.

    Who holds what, and every legal route.
    """

    mesh: str = ""
    """The devices along each mesh axis: x=4,y=2. Rank r is at r // 2, r % 2: the last axis varies fastest."""

    sizes: str = ""
    """Elements of the dims: I=256,J=2048. All others have 4096."""

    dtype: str = "bf16"
    """Number format of the elements: fp8, bf16, fp16, tf32, fp32."""

    topology: str = ""
    """full, ring, torus (of the mesh's shape), fat-tree, islands; or rings: a ring for each mesh axis, bytes over
    bandwidth, as "How to Scale Your Model" has it. Left out: full, of more than 64 devices rings."""

    accelerator: str = "h100-sxm"
    """Device: a name of the catalog."""

    routes: PositiveInt = 6
    """Number of routes to list. Those with the fewest collectives, a textbook's, are listed besides."""

    backward: bool = False
    """Also show the gradient of every factor, which is sharded as the factor is. A chain always shows them."""

    run: bool = False
    """Run the cheapest route on real ranks, small and in float64, beside the plain product; of one array, its moves."""


@dataclass(frozen=True)
class ShardingStudy:
    """An expression with the search for its moves and routes.

    Attributes:
        options: as given, with the topology chosen.
    """

    expression: Expression
    options: ShardingOptions
    search: RouteSearch

    @property
    def network(self) -> str:
        """Description of the network and the device."""
        network = self.search.network
        name = network.topology.name if isinstance(network, Links) else "rings, both directions of each"
        return f"{name}, {self.options.describe_wire()}; {self.options.accelerator}"


def study_sharding(text: str, options: ShardingOptions) -> ShardingStudy:
    """Parse an expression, check the options, and build the network.

    Raises:
        UsageError: a malformed expression, or bad options.
    """
    if not options.mesh:
        raise UsageError("--mesh: missing. Give the number of devices along each mesh axis, as --mesh x=4,y=2")
    mesh = parse_mesh(options.mesh)
    expression, sizes = parse(text, mesh, parse_sizes(options.sizes), SIZE)
    _check(expression, options, mesh)
    if not options.topology:
        options = options.model_copy(update={"topology": "full" if mesh.ranks <= MOST_RANKS else "rings"})
    check_network(options, TOPOLOGIES, {"per_node": ("fat-tree", "islands")})
    rings = options.topology == "rings"
    network = Rings(mesh, options.wire) if rings else Links(mesh, build_network(options, mesh.ranks, mesh.shape))
    search = RouteSearch(mesh, sizes, ITEMSIZE[options.dtype], network, peak_flops=_peak(options))
    return ShardingStudy(expression, options, search)


def explain(text: str, options: ShardingOptions, console: Console) -> Callable[[], str]:
    """Print the explanation. Returns a function that draws it."""
    study = study_sharding(text, options)
    expression, plan = study.expression, study.search
    mesh, sizes = plan.mesh, plan.sizes
    shown = [*expression.arrays, *([expression.result] if expression.result else [])]
    dims = ", ".join(f"{letter} = {size}" for letter, size in sizes.items())
    console.print(f"[bold]{escape(text)}[/] on {mesh.ranks} devices, {mesh}; {dims}; {options.dtype}", highlight=False)
    console.print(make_memory_table(shown, mesh, sizes, plan.itemsize))
    console.print(Columns([draw_array(array, mesh) for array in shown], padding=(0, 3)))
    if expression.result is None:
        return _draw(text, [([(shown[0], "")], [], [], "")], plan)
    if len(expression.arrays) == 1:
        return _reshard(study, console)
    return _product(study, console)


def _check(expression: Expression, options: ShardingOptions, mesh: NamedMesh) -> None:
    if options.dtype not in ITEMSIZE:
        raise UsageError(f"--dtype {options.dtype}: {did_you_mean(options.dtype, ITEMSIZE)}")
    if options.run and mesh.ranks > MOST_RANKS_RUN:
        raise UsageError(f"--run: one process for each of {mesh.ranks} devices; at most {MOST_RANKS_RUN} are started")
    if len(expression.arrays) == 1:
        reject_unused(options, ("routes", "backward"), "only for a product, not for one array")
    if expression.result is None:
        network = ("topology", *NetworkOptions.model_fields)
        reject_unused(options, ("run", *network), "a single array is not moved; give its target, as -> A[I, Jx]")


def _peak(options: ShardingOptions) -> float:
    device = accelerator(options.accelerator)
    if options.dtype not in device.peak_flops:
        known = ", ".join(device.peak_flops)
        raise UsageError(f"--dtype {options.dtype}: the catalog has no speed of {device.name} for it; it has {known}")
    return device.peak_flops[options.dtype]


# ---- one array -----------------------------------------------------------------------------------------------------


def find_moves(study: ShardingStudy) -> tuple[Move, ...]:
    """Find the cheapest moves from one array to the result of its expression.

    Raises:
        UsageError: the two differ in more than their sharding.
    """
    expression = study.expression
    assert expression.result is not None
    before, after = expression.arrays[0], expression.result
    if sorted(before.sharding.letters) != sorted(after.sharding.letters):
        letter = min({*after.sharding.letters} ^ {*before.sharding.letters})
        at = 1 if letter in after.sharding.letters else 0
        raise expression.refuse(at, letter, f"dim {letter} is in only one of the two; only a product changes dims")
    if before.sharding.letters != after.sharding.letters:
        raise expression.refuse(1, after.sharding.letters[0], "another order of dims; transposes are not supported")
    return study.search.reshard(before.sharding, after.sharding)


def _reshard(study: ShardingStudy, console: Console) -> Callable[[], str]:
    expression, plan, moves = study.expression, study.search, find_moves(study)
    assert expression.result is not None
    before, after = expression.arrays[0], expression.result
    console.print(f"\nthe cheapest moves on {study.network}:")
    if moves:
        console.print(text_table(STEP, [_move_row(before.name, move, plan) for move in moves], words=range(4), gap=1))
    else:
        console.print("  none: it has this sharding already")
    if study.options.run:
        from shoal.labs.autoshard.notation.run import compare_moves

        console.print(_run("array", plan, compare_moves, moves, before, after.sharding), highlight=False)
    stage: Stage = ([(Array(before.name, before.sharding), ""), *_states(before.name, moves, plan)], [], [], "")
    return _draw(expression.text, [stage], plan)


# ---- products ------------------------------------------------------------------------------------------------------


def _product(study: ShardingStudy, console: Console) -> Callable[[], str]:
    expression, options, plan = study.expression, study.options, study.search
    found = find_forward(expression, plan)
    steps = list_products(expression)
    best = found[0][1]
    console.print()
    for route, product in zip(best, steps, strict=True):
        title = "{2} = {0}{a} * {1}{b}: ".format(*route.names, a=route.a, b=route.b)
        for case, why in classify(product, route.a, route.b):
            console.print(f"{escape(title)}[bold]case {case}[/], {why}: {REMEDIES[case]}", highlight=False)
    several = "legal ways to take the last product, each after the cheapest way to it,"
    what = "legal routes" if len(steps) == 1 else several
    console.print(f"\n{len(found)} {what} on {study.network}, the cheapest first:", highlight=False)
    sent = [sum(len(_sent(route)) for route in routes) for _, routes in found]
    shown = [i for i, count in enumerate(sent) if i < options.routes or count == min(sent)]
    console.print(_routes({i + 1: found[i][1] for i in shown}, plan))
    if len(found) > len(shown):
        console.print(f"and {len(found) - len(shown)} more (--routes {len(found)})", highlight=False)
    chain = add_backward(expression, best, plan) if options.backward or len(steps) > 1 else None
    passes = {f"the cheapest, {'forward' if chain else 'step by step'}": best}
    if chain:
        passes["backward"] = chain.backward
    for heading, routes in passes.items():
        console.print(f"\n{heading}:")
        console.print(_steps(routes, plan))
        console.print(_total(routes, plan), highlight=False)
    if options.run:
        from shoal.labs.autoshard.notation.run import compare

        console.print(_run("product", plan, compare, best, chain, expression), highlight=False)
    return _draw(expression.text, [_stage(route, plan) for routes in passes.values() for route in routes], plan)


def _routes(found: dict[int, tuple[Route, ...]], plan: RouteSearch) -> Table:
    rows = []
    for number, routes in found.items():
        moves = tuple(move for route in routes for move in route.moves)
        compute, moving = sum(r.compute for r in routes), sum(move.seconds for move in moves)
        row = (
            str(number), "\n".join("{} * {} -> {}".format(*route.multiplied, route.local) for route in routes),
            "\n".join(f"{array}: {move}" for route in routes for array, move in _sent(route)) or "none",
            show_seconds(compute), show_seconds(moving), show_seconds(compute + moving), _sent_bytes(moves, plan),
            "compute" if compute >= _on_own_links(moves, plan) else "moves",
        )  # fmt: skip
        rows.append([Text(cell, "bold" if number == 1 else "") for cell in row])
    headings = ("#", "multiplied as", "collectives", "compute", "moves", "together", "each sends", "bound by")
    return text_table(headings, rows, words=(1, 2, 7), gap=1)


def _sent(route: Route) -> list[tuple[str, Move]]:
    return [(name, move) for name, move in route.steps if move and move.algorithm]


def _steps(routes: tuple[Route, ...], plan: RouteSearch) -> Table:
    rows = []
    for route in routes:
        (left, right, out), (a, b), time = route.names, route.multiplied, show_seconds(route.compute)
        product = (Text("multiply", "bold"), f"{left}{a} * {right}{b}", f"{out}{route.local}", "", "", time)
        rows += [_move_row(name, move, plan) if move else product for name, move in route.steps]
    return text_table(STEP, rows, words=range(4), gap=1)


def _move_row(name: str, move: Move, plan: RouteSearch) -> tuple[str | Text, ...]:
    return (
        str(move), f"{name}{move.before}", f"{name}{move.after}", move.algorithm,
        _sent_bytes((move,), plan), show_seconds(move.seconds),
    )  # fmt: skip


def _sent_bytes(moves: tuple[Move, ...], plan: RouteSearch) -> str:
    device, _ = count_sent(moves, plan.mesh, plan.sizes)
    return show_bytes(device * plan.itemsize)


def _total(routes: tuple[Route, ...], plan: RouteSearch) -> str:
    compute, moving = sum(r.compute for r in routes), sum(r.communication for r in routes)
    moves = tuple(move for r in routes for move in r.moves)
    _, total = count_sent(moves, plan.mesh, plan.sizes)
    busiest = _on_own_links(moves, plan)
    axes = f" ({show_seconds(busiest)} on the busiest axis)" if busiest < moving else ""
    bound = "compute" if compute >= busiest else "communication"
    return (
        f"  together {show_seconds(compute + moving)}: compute {show_seconds(compute)}, communication "
        f"{show_seconds(moving)}{axes}; {bound}-bound, so {show_seconds(max(compute, busiest))} if they overlap; "
        f"{_sent_bytes(moves, plan)} sent by a device, {show_bytes(total * plan.itemsize)} by all"
    )


def _on_own_links(moves: tuple[Move, ...], plan: RouteSearch) -> float:
    """Return the seconds of moves that overlap where they can: on rings each mesh axis has links of its own."""
    if not isinstance(plan.network, Rings):
        return sum(move.seconds for move in moves)
    return max(sum(move.seconds for move in moves if axis in move.axes) for axis in plan.mesh.axes)


# ---- drawing and running -------------------------------------------------------------------------------------------


def _states(name: str, moves: tuple[Move, ...], plan: RouteSearch) -> list[State]:
    return [
        (Array(name, move.after), f"{move}: {_sent_bytes((move,), plan)} each, {show_seconds(move.seconds)}"
         if move.algorithm else f"{move}")
        for move in moves
    ]  # fmt: skip


def _stage(route: Route, plan: RouteSearch) -> Stage:
    left, right, out = route.names
    return (
        [(Array(left, route.a), ""), *_states(left, route.left, plan)],
        [(Array(right, route.b), ""), *_states(right, route.right, plan)],
        [(Array(out, route.local), f"multiply: {show_seconds(route.compute)}"), *_states(out, route.after, plan)],
        f"{out} = {left} * {right}",
    )


def _draw(text: str, stages: list[Stage], plan: RouteSearch) -> Callable[[], str]:
    title = f"{text} on {plan.mesh.ranks} devices, {plan.mesh}"
    return partial(figure, stages, title, plan.mesh, plan.sizes, plan.itemsize)


def _run(what: str, plan: RouteSearch, comparison: Callable[..., dict[str, float]], *run: object) -> str:
    worst, size = run_small(plan.mesh, plan.sizes, comparison, *run)
    errors = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
    return (
        f"\nrun on {plan.mesh.ranks} ranks in float64, every dim {size}; largest difference from the "
        f"plain {what}: {errors}"
    )


def run_small(
    mesh: NamedMesh, sizes: Sizes, comparison: Callable[..., dict[str, float]], *run: object
) -> tuple[dict[str, float], int]:
    """Compare with the plain product or array on worker processes, one for each device, in float64.

    Args:
        comparison: `compare` or `compare_moves` of `shoal.labs.autoshard.notation.run`.
        run: its first arguments.

    Returns:
        The largest difference over all ranks by array, and the size of every dim.
    """
    from shoal.launch.worker_pool import Pool

    size = 2 * mesh.ranks  # divisible by all axes together
    with Pool(mesh.ranks) as pool:
        results = pool.run(comparison, mesh.ranks, *run, mesh, dict.fromkeys(sizes, size))
    return {name: max(errors[name] for errors in results) for name in results[0]}, size
