"""The sharding panel: an expression of sharded arrays, every legal route with its price, and a run of one of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import NonNegativeInt

from shoal.base.errors import UsageError
from shoal.base.section import Section
from shoal.engine.sharding.moves import Move
from shoal.engine.sharding.named_axes import Sharding
from shoal.labs.autoshard.notation.moves import count_sent
from shoal.labs.autoshard.notation.notation import list_holders
from shoal.labs.autoshard.notation.product import REMEDIES, classify, list_products
from shoal.labs.autoshard.notation.run import compare, compare_moves
from shoal.labs.autoshard.notation.search import Route, find_forward
from shoal.labs.explain.sharding import (
    ITEMSIZE,
    MOST_RANKS_RUN,
    TOPOLOGIES,
    ShardingOptions,
    ShardingStudy,
    find_moves,
    run_small,
    study_sharding,
)
from shoal.spec.catalog.accelerators import accelerators
from shoal.spec.catalog.clusters import links

EQUAL = 1e-9
"""Largest difference of float64 results that counts as rounding, as in `shoal verify`."""
MOST_DRAWN = 64  # devices whose blocks are drawn


class ShardingRequest(Section):
    """An expression on a mesh."""

    expression: str = "A[I, Jx] * B[Jx, K] -> C[I, K]"
    mesh: str = "x=4"
    sizes: str = ""
    """Elements of the dims: I=256,J=2048."""

    dtype: str = "bf16"
    topology: str = "full"
    link: str = "nvlink-4"
    accelerator: str = "h100-sxm"


class RunRequest(ShardingRequest):
    """A route to run on worker processes."""

    route: NonNegativeInt = 0
    """Its place in the list, the cheapest first."""


def find_routes(request: ShardingRequest) -> dict[str, Any]:
    """Find every legal route of a product, or the cheapest moves of one array.

    Returns:
        ``states``: for each array in each sharding that occurs, the devices that hold each block; ``routes``: the
        cheapest first, each with its steps, which name states. Times are in seconds, sizes in bytes.

    Raises:
        UsageError: a malformed expression, or a network or device that does not exist or fit.
    """
    study = _study(request)
    expression, search = study.expression, study.search
    if search.mesh.ranks > MOST_DRAWN:
        raise UsageError(f"mesh {request.mesh}: {search.mesh.ranks} devices; at most {MOST_DRAWN} are drawn.")
    answer = _Answer(study)
    shown = [*expression.arrays, *([expression.result] if expression.result else [])]
    cases: list[str] = []
    routes: list[dict[str, Any]] = []
    if expression.result is not None and len(expression.arrays) == 1:
        routes = [answer.describe_moves(expression.arrays[0].name, find_moves(study))]
    elif expression.result is not None:
        found = find_forward(expression, search)
        for route, product in zip(found[0][1], list_products(expression), strict=True):
            cases += [f"case {case}, {why}: {REMEDIES[case]}" for case, why in classify(product, route.a, route.b)]
        routes = [answer.describe_routes(each) for _, each in found]
    return {
        "ranks": search.mesh.ranks,
        "mesh": str(search.mesh),
        "network": study.network,
        "dims": dict(search.sizes),
        "arrays": [answer.add_state(array.name, array.sharding) for array in shown],
        "cases": cases,
        "routes": routes,
        "states": answer.states,
        "can_run": bool(routes) and search.mesh.ranks <= MOST_RANKS_RUN,
    }


def run_route(request: RunRequest) -> dict[str, Any]:
    """Run a route on real ranks, small and in float64, beside the plain product.

    Raises:
        UsageError: a route that does not exist, or more devices than processes are started for.
    """
    study = _study(request)
    mesh, sizes, expression = study.search.mesh, study.search.sizes, study.expression
    if mesh.ranks > MOST_RANKS_RUN:
        raise UsageError(f"mesh {request.mesh}: {mesh.ranks} devices, each a process; at most {MOST_RANKS_RUN} run.")
    if expression.result is None:
        raise UsageError(f"{request.expression}: nothing to run. Give a result, as -> A[I, J]")
    began = time.perf_counter()
    if len(expression.arrays) == 1:
        before, after = expression.arrays[0], expression.result.sharding
        errors, size = run_small(mesh, sizes, compare_moves, find_moves(study), before, after)
    else:
        found = find_forward(expression, study.search)
        if request.route >= len(found):
            raise UsageError(f"route {request.route}: there are {len(found)}, from 0.")
        errors, size = run_small(mesh, sizes, compare, found[request.route][1], None, expression)
    return {
        "errors": errors,
        "equal": max(errors.values()) <= EQUAL,
        "limit": EQUAL,
        "ranks": mesh.ranks,
        "size": size,
        "seconds": time.perf_counter() - began,
    }


def _study(request: ShardingRequest) -> ShardingStudy:
    options = ShardingOptions(**request.model_dump(exclude={"expression", "route"}))
    return study_sharding(request.expression, options)


class _Answer:
    """Collects the states of arrays, so that steps name each once."""

    def __init__(self, study: ShardingStudy):
        self.search = study.search
        self.states: dict[str, dict[str, Any]] = {}

    def add_state(self, name: str, sharding: Sharding) -> str:
        """Add an array in a sharding; return the name of the state."""
        mesh, state = self.search.mesh, f"{name}{sharding}"
        if state not in self.states:
            *rest, (_, last) = sharding.dims
            self.states[state] = {
                "array": name,
                "down": mesh.size("".join(axes for _, axes in rest)),
                "right": mesh.size(last),
                "holders": list(list_holders(sharding, mesh).values()),
                "bytes": sharding.local_numel(self.search.sizes, mesh) * self.search.itemsize,
            }
        return state

    def describe_moves(self, name: str, moves: Sequence[Move]) -> dict[str, Any]:
        return self._total(0.0, moves, [self._move(name, move) for move in moves], [])

    def describe_routes(self, routes: Sequence[Route]) -> dict[str, Any]:
        """Describe the routes of all products of an expression, as one list of steps."""
        steps: list[dict[str, Any]] = []
        moves: list[Move] = []
        for route in routes:
            left, right, out = route.names
            a, b = route.multiplied
            product = {
                "what": "multiply", "array": out, "before": [self.add_state(left, a), self.add_state(right, b)],
                "after": self.add_state(out, route.local), "algorithm": "", "sent": 0, "seconds": route.compute,
            }  # fmt: skip
            steps += [self._move(name, move) if move else product for name, move in route.steps]
            moves += route.moves
        multiplied = ["{} * {} -> {}".format(*route.multiplied, route.local) for route in routes]
        return self._total(sum(route.compute for route in routes), moves, steps, multiplied)

    def _move(self, name: str, move: Move) -> dict[str, Any]:
        return {
            "what": str(move), "array": name, "before": [self.add_state(name, move.before)],
            "after": self.add_state(name, move.after), "algorithm": move.algorithm,
            "sent": self._sent([move]), "seconds": move.seconds,
        }  # fmt: skip

    def _sent(self, moves: Sequence[Move]) -> int:
        return count_sent(moves, self.search.mesh, self.search.sizes)[0] * self.search.itemsize

    def _total(
        self, compute: float, moves: Sequence[Move], steps: list[dict[str, Any]], multiplied: list[str]
    ) -> dict[str, Any]:
        moving = sum(move.seconds for move in moves)
        return {
            "multiplied": multiplied,
            "collectives": [f"{step['array']}: {step['what']}" for step in steps if step["algorithm"]],
            "compute": compute,
            "moving": moving,
            "seconds": compute + moving,
            "sent": self._sent(moves),
            "steps": steps,
        }


EXAMPLES = {
    "contracted dim sharded in both": ("A[I, Jx] * B[Jx, K] -> C[I, K]", "x=4"),
    "contracted dim sharded in one": ("A[I, Jx] * B[J, K] -> C[I, K]", "x=4"),
    "tensor parallelism of an MLP": ("X[B, D] * W[D, Fx] * V[Fx, D] -> Y[B, D]", "x=4"),
    "FSDP and tensor parallelism": ("X[Bx, D] * W[Dx, Fy] -> Y[Bx, Fy]", "x=2,y=2"),
    "the same axis on both outputs": ("A[Ix, J] * B[J, Kx] -> C[Ix, K]", "x=4"),
    "an array resharded": ("A[Ix, J] -> A[I, Jx]", "x=4"),
}
"""Expressions with a mesh, by what they show."""


def list_sharding_choices() -> dict[str, Any]:
    """List the topologies, links and number formats, and some expressions."""
    return {
        "topologies": list(TOPOLOGIES),
        "links": list(links()),
        "accelerators": [name for name, each in accelerators().items() if "bf16" in each.peak_flops],
        "dtypes": list(ITEMSIZE),
        "examples": [[name, *example] for name, example in EXAMPLES.items()],
    }


def record_requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the requests of a saved page: the examples."""
    yield "sharding-choices", {}
    for expression, mesh in EXAMPLES.values():
        yield "sharding", ShardingRequest(expression=expression, mesh=mesh).model_dump()
