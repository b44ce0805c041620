"""`shoal explain "A[I, Jx] * B[Jx, K] -> C[I, K]" --mesh x=4,y=2`: who holds what, every route and its price, a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pydantic import PositiveInt
from rich import box
from rich.console import Console
from rich.table import Table

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.files import check_writable
from shoal.base.options import reject_unused
from shoal.base.section import Section
from shoal.base.units import show_bytes, show_seconds
from shoal.labs.autoshard.notation.cost.chains import forward, with_backward
from shoal.labs.autoshard.notation.cost.network import MOST_RANKS, Links, Network, Rings
from shoal.labs.autoshard.notation.cost.routes import Planner
from shoal.labs.autoshard.notation.notation import Array, Expression, NamedMesh, parse, parse_mesh, parse_sizes
from shoal.labs.autoshard.notation.product import REMEDIES, cases, products
from shoal.labs.autoshard.notation.route import Route, RoutedMove, elements_of
from shoal.labs.collectives import topology as networks
from shoal.labs.explain.blocks import memory, pictures
from shoal.labs.explain.collective import CollectiveOptions, network, wire_of, wire_words
from shoal.labs.explain.figures.blocks import Stage, State, figure
from shoal.spec.catalog.accelerators import accelerator

TOPOLOGIES = ("full", "ring", "torus", "fat-tree", "islands", "rings")
OF_TOPOLOGY = {"inside": ("islands",), "per_node": ("fat-tree", "islands")}  # options, with those that read them
ITEMSIZE = {"fp8": 1, "bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}
SIZE = 4096  # of a dim that is given none
MOST_RANKS_RUN = 16


class ShardingOptions(Section):
    """A product of sharded matrices: its case, who holds what, every legal route and its price."""

    mesh: str = ""
    """The devices along each mesh axis: x=4,y=2. Rank r is at r // 2, r % 2: the last axis varies fastest."""

    sizes: str = ""
    """Elements of the dims: I=256,J=2048. All others have 4096."""

    dtype: str = "bf16"
    """Of the elements: fp8, bf16, fp16, tf32, fp32."""

    topology: str = ""
    """full, ring, torus (of the mesh's shape), fat-tree, islands; or rings: a ring for each mesh axis, bytes over
    bandwidth, as "How to Scale Your Model" has it. Left out: full, of more than 64 devices rings."""

    link: str = "nvlink-4"
    """Between devices, or of a NIC: a name of the catalog, such as ici-v5p."""

    alpha: str = ""
    """Latency of that link instead of the catalog's: 5us."""

    bandwidth: str = ""
    """Its bandwidth instead of the catalog's, in one direction: 45GB/s."""

    inside: str = "nvlink-4"
    """The link inside an island: a name of the catalog."""

    per_node: PositiveInt | None = None
    """Devices of a node or of a leaf switch (default: the largest divisor of their number up to 8)."""

    accelerator: str = "h100-sxm"
    """The devices: a name of the catalog."""

    routes: PositiveInt = 6
    """How many routes are listed."""

    backward: bool = False
    """Also the gradient of every factor, which lies as the factor does. A chain of products always shows them."""

    run: bool = False
    """Run the cheapest route on real ranks, small and in float64, beside the plain product; of one array, its moves."""

    out: Path | None = None
    """Also draw who holds what, step by step, to this file, .svg."""


def explain(text: str, options: ShardingOptions, console: Console) -> int:
    """Print the explanation and draw it.

    Raises:
        UsageError: a malformed expression, or bad options.
    """
    if not options.mesh:
        raise UsageError("--mesh: which devices are there? Give each mesh axis its number, as --mesh x=4,y=2")
    mesh = parse_mesh(options.mesh)
    expression, sizes = parse(text, mesh, parse_sizes(options.sizes), SIZE)
    _check(expression, options, mesh)
    options = options.model_copy(update={"topology": _topology(options, mesh)})
    itemsize = ITEMSIZE[options.dtype]
    plan = Planner(mesh, sizes, itemsize, _network(options, mesh), _peak(options))
    shown = _arrays(expression)
    dims = ", ".join(f"{letter} = {size}" for letter, size in sizes.items())
    console.print(f"[bold]{_plain(text)}[/] on {mesh.ranks} devices, {mesh}; {dims}; {options.dtype}", highlight=False)
    console.print(memory(shown, mesh, sizes, itemsize))
    console.print(pictures(shown, mesh))
    if expression.result is None:
        return _drawn(text, options, [([(shown[0], "")], [], [], "")], plan, console)
    if len(expression.arrays) == 1:
        return _reshard(expression, options, plan, console)
    return _product(expression, options, plan, console)


def _topology(options: ShardingOptions, mesh: NamedMesh) -> str:
    return options.topology or ("full" if mesh.ranks <= MOST_RANKS else "rings")


def _check(expression: Expression, options: ShardingOptions, mesh: NamedMesh) -> None:
    if options.dtype not in ITEMSIZE:
        raise UsageError(f"--dtype {options.dtype}: {did_you_mean(options.dtype, ITEMSIZE)}")
    topology = _topology(options, mesh)
    if topology not in TOPOLOGIES:
        raise UsageError(f"--topology {options.topology}: {did_you_mean(options.topology, TOPOLOGIES)}")
    check_writable(options.out, "--out", ".svg")
    if options.run and mesh.ranks > MOST_RANKS_RUN:
        raise UsageError(f"--run: {mesh.ranks} processes, one for each device; at most {MOST_RANKS_RUN} are started")
    if len(expression.arrays) == 1:
        reject_unused(options, ("routes", "backward"), "of a product, not of one array")
    if expression.result is None:
        network = ("topology", "link", "alpha", "bandwidth", "inside", "per_node", "accelerator")
        reject_unused(options, ("run", *network), "one array stays where it is; give what it becomes, as -> A[I, Jx]")
    for name, known in OF_TOPOLOGY.items():
        if topology not in known:
            reject_unused(options, (name,), f"of --topology {' or '.join(known)}, not of {topology}")


def _network(options: ShardingOptions, mesh: NamedMesh) -> Network:
    common = options.model_dump(include={"link", "alpha", "bandwidth", "inside", "per_node", "accelerator"})
    same = CollectiveOptions(ranks=mesh.ranks, topology=options.topology, **common)
    if options.topology == "rings":
        return Rings(mesh, wire_of(same))
    if options.topology == "torus":
        gamma = 3 / accelerator(options.accelerator).memory_bandwidth
        return Links(mesh, networks.torus(mesh.shape, wire_of(same), gamma))
    return Links(mesh, network(same))


def _where(options: ShardingOptions, plan: Planner) -> str:
    common = options.model_dump(include={"link", "alpha", "bandwidth"})
    wire = wire_words(CollectiveOptions(**common))
    name = plan.network.topology.name if isinstance(plan.network, Links) else "rings, both directions of each"
    return f"{name}, {wire}; {options.accelerator}"


def _peak(options: ShardingOptions) -> float:
    device = accelerator(options.accelerator)
    if options.dtype not in device.peak_flops:
        known = ", ".join(device.peak_flops)
        raise UsageError(f"--dtype {options.dtype}: the catalog has no speed of {device.name} for it; it has {known}")
    return device.peak_flops[options.dtype]


def _arrays(expression: Expression) -> list[Array]:
    return [*expression.arrays, *([expression.result] if expression.result else [])]


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


# ---- one array -----------------------------------------------------------------------------------------------------


def _reshard(expression: Expression, options: ShardingOptions, plan: Planner, console: Console) -> int:
    assert expression.result is not None
    before, after = expression.arrays[0], expression.result
    if sorted(before.sharding.letters) != sorted(after.sharding.letters):
        letter = next(iter({*after.sharding.letters} ^ {*before.sharding.letters}))
        at = 1 if letter in after.sharding.letters else 0
        raise expression.refuse(at, letter, f"dim {letter} is in one of the two alone; a product is needed for that")
    if before.sharding.letters != after.sharding.letters:
        raise expression.refuse(1, after.sharding.letters[0], "the dims have another order: that is a transpose")
    moves = plan.reshard(before.sharding, after.sharding)
    console.print(f"\nthe cheapest moves on {_where(options, plan)}:")
    table = _steps_table()
    for transfer in moves:
        _add_transfer(table, before.name, transfer, plan)
    console.print(table if moves else "  none: it lies so already")
    if options.run:
        from shoal.labs.autoshard.notation.check import compare_moves

        console.print(_run("array", plan, compare_moves, moves, before, after.sharding), highlight=False)
    stage: Stage = ([(Array(before.name, before.sharding), ""), *_states(before.name, moves, plan)], [], [], "")
    return _drawn(expression.text, options, [stage], plan, console)


# ---- products ------------------------------------------------------------------------------------------------------


def _product(expression: Expression, options: ShardingOptions, plan: Planner, console: Console) -> int:
    found = forward(expression, plan)
    steps = products(expression)
    best = found[0][1]
    console.print()
    for route, product in zip(best, steps, strict=True):
        given = (route.a, route.b)
        title = f"{route.names[2]} = {route.names[0]}{given[0]} * {route.names[1]}{given[1]}: "
        for finding in cases(product, *given):
            console.print(f"{_plain(title)}[bold]case {finding.case}[/], {finding.words}: {REMEDIES[finding.case]}",
                          highlight=False)
    several = "legal ways to take the last product, each after the cheapest way to it,"
    what = "legal routes" if len(steps) == 1 else several
    console.print(f"\n{len(found)} {what} on {_where(options, plan)}, the cheapest first:", highlight=False)
    console.print(_routes(found[: options.routes], plan))
    if len(found) > options.routes:
        console.print(f"and {len(found) - options.routes} more (--routes {len(found)})", highlight=False)
    chain = with_backward(expression, best, plan) if options.backward or len(steps) > 1 else None
    console.print(f"\n{'the cheapest, forward' if chain else 'the cheapest, step by step'}:")
    console.print(_steps(best, plan))
    console.print(_total(best, plan), highlight=False)
    if chain:
        console.print("\nbackward:")
        console.print(_steps(chain.backward, plan))
        console.print(_total(chain.backward, plan), highlight=False)
    if options.run:
        from shoal.labs.autoshard.notation.check import compare

        console.print(_run("product", plan, compare, best, chain, expression), highlight=False)
    drawn = [_stage(route, plan) for route in (*best, *(chain.backward if chain else ()))]
    return _drawn(expression.text, options, drawn, plan, console)


def _routes(found: list[tuple[float, tuple[Route, ...]]], plan: Planner) -> Table:
    """One line for each route."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("#", justify="right")
    table.add_column("multiplied as", overflow="fold")
    table.add_column("collectives", overflow="fold")
    for column in ("compute", "moves", "together", "each sends"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for number, (_, routes) in enumerate(found, 1):
        transfers = tuple(t for route in routes for t in route.transfers)
        compute, moving = sum(r.compute for r in routes), sum(t.seconds for t in transfers)
        device, _ = elements_of(transfers, plan.mesh, plan.sizes)
        table.add_row(
            str(number), "\n".join(_multiplied(route) for route in routes),
            "\n".join(f"{array}: {t.move}" for route in routes for array, t in _sent(route)) or "none",
            show_seconds(compute), show_seconds(moving), show_seconds(compute + moving),
            show_bytes(device * plan.itemsize),
            "compute" if compute >= moving else "moves", style="bold" if number == 1 else "",
        )  # fmt: skip
    return table


def _multiplied(route: Route) -> str:
    a, b = route.multiplied
    return _plain(f"{a} * {b} -> {route.local}")


def _sent(route: Route) -> list[tuple[str, RoutedMove]]:
    """The moves that send something, each with its array."""
    parts = zip(route.names, (route.left, route.right, route.after), strict=True)
    return [(name, t) for name, transfers in parts for t in transfers if t.algorithm]


def _steps_table() -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    for column in ("step", "from", "to", "by"):
        table.add_column(column)
    table.add_column("sent by a device", justify="right")
    table.add_column("time", justify="right")
    return table


def _steps(routes: tuple[Route, ...], plan: Planner) -> Table:
    """Each step of some routes."""
    table = _steps_table()
    for route in routes:
        left, right, out = route.names
        for transfer in route.left:
            _add_transfer(table, left, transfer, plan)
        for transfer in route.right:
            _add_transfer(table, right, transfer, plan)
        a, b = route.multiplied
        table.add_row("[bold]multiply[/]", _plain(f"{left}{a} * {right}{b}"), _plain(f"{out}{route.local}"), "", "",
                      show_seconds(route.compute))
        for transfer in route.after:
            _add_transfer(table, out, transfer, plan)
    return table


def _add_transfer(table: Table, name: str, transfer: RoutedMove, plan: Planner) -> None:
    device, _ = elements_of((transfer,), plan.mesh, plan.sizes)
    table.add_row(
        str(transfer.move), _plain(f"{name}{transfer.before}"), _plain(f"{name}{transfer.after}"), transfer.algorithm,
        show_bytes(device * plan.itemsize), show_seconds(transfer.seconds),
    )  # fmt: skip


def _total(routes: tuple[Route, ...], plan: Planner) -> str:
    compute, moving = sum(r.compute for r in routes), sum(r.communication for r in routes)
    device, total = elements_of(tuple(t for r in routes for t in r.transfers), plan.mesh, plan.sizes)
    bound = "compute" if compute >= moving else "communication"
    return (
        f"  together {show_seconds(compute + moving)}: compute {show_seconds(compute)}, communication "
        f"{show_seconds(moving)}; {bound}-bound, so {show_seconds(max(compute, moving))} if they overlap; "
        f"{show_bytes(device * plan.itemsize)} sent by a device, {show_bytes(total * plan.itemsize)} by all"
    )


# ---- drawing and running -------------------------------------------------------------------------------------------


def _states(name: str, transfers: tuple[RoutedMove, ...], plan: Planner) -> list[State]:
    """What an array becomes, each state with the words for how it got there."""
    found = []
    for transfer in transfers:
        device, _ = elements_of((transfer,), plan.mesh, plan.sizes)
        cost = f": {show_bytes(device * plan.itemsize)} each, {show_seconds(transfer.seconds)}" if device else ""
        found.append((Array(name, transfer.after), f"{transfer.move}{cost}"))
    return found


def _stage(route: Route, plan: Planner) -> Stage:
    left, right, out = route.names
    return (
        [(Array(left, route.a), ""), *_states(left, route.left, plan)],
        [(Array(right, route.b), ""), *_states(right, route.right, plan)],
        [(Array(out, route.local), f"multiply: {show_seconds(route.compute)}"), *_states(out, route.after, plan)],
        f"{out} = {left} * {right}",
    )


def _drawn(text: str, options: ShardingOptions, stages: list[Stage], plan: Planner, console: Console) -> int:
    if options.out:
        title = f"{text} on {plan.mesh.ranks} devices, {plan.mesh}"
        options.out.write_text(figure(stages, title, plan.mesh, plan.sizes, plan.itemsize))
        console.print(f"drawn: {options.out}")
    return 0


def _run(what: str, plan: Planner, comparison: Callable[..., dict[str, float]], *run: object) -> str:
    """What a comparison with the plain product or array finds on real ranks."""
    from shoal.launch.worker_pool import Pool

    small = dict.fromkeys(plan.sizes, 2 * plan.mesh.ranks)  # comes out even over all axes together
    with Pool(plan.mesh.ranks) as pool:
        results = pool.run(comparison, plan.mesh.ranks, *run, plan.mesh, small)
    worst = {name: max(errors[name] for errors in results) for name in results[0]}
    errors = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
    return (
        f"\nrun on {plan.mesh.ranks} ranks in float64, every dim {2 * plan.mesh.ranks}; largest difference from the "
        f"plain {what}: {errors}"
    )
