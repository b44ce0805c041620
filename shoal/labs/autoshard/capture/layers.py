"""A forward pass cut into layers, and any run of them as a forward pass of its own.

Operators are clustered in their order (Zheng et al. 2022, section 5.2, equation 6): of all cuts into L layers, none of
which computes more than (1 + delta) of its share, those whose widest boundary carries the fewest bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, fx

from shoal.labs.autoshard.capture.forward import Forward, operand, schema_of
from shoal.labs.autoshard.capture.graph import OperatorGraph
from shoal.labs.autoshard.capture.trace import differentiated

DELTA = 0.5  # of a layer's share of the FLOPs that it may have more
CUTS = 150  # that are looked at: those that carry least


@dataclass
class Layers:
    """A forward pass in layers.

    Attributes:
        count: of layers wanted; fewer where there are fewer places to cut.
    """

    forward: Forward
    count: int

    @cached_property
    def live(self) -> set[fx.Node]:
        """What is computed from parameters or inputs, and these; the rest are constants, which every stage makes."""
        live: set[fx.Node] = set()
        for node in self.forward.module.graph.nodes:
            if node.op == "placeholder" or live.intersection(node.all_input_nodes):
                live.add(node)
        return live

    @cached_property
    def nodes(self) -> list[fx.Node]:
        """The operators that layers are made of, in order."""
        return [node for node in self.forward.module.graph.nodes if node in self.live and node.op == "call_function"]

    @cached_property
    def ends(self) -> list[int]:
        """Where each layer ends in `nodes`."""
        place = {node: i for i, node in enumerate(self.nodes)}
        carried = [0] * (len(self.nodes) + 1)  # bytes of what is made before a place and read behind it
        closed: set[int] = set()  # places over which several tensors would go as one value
        for node, i in place.items():
            last = max((place[user] for user in node.users if user in place), default=i)
            for cut in range(i + 1, last + 1):
                carried[cut] += _bytes(node)
            if not isinstance(node.meta.get("val"), Tensor):
                closed.update(range(i + 1, last + 1))
        work = [0.0]
        for node in self.nodes:
            work.append(work[-1] + _flops(node))
        open_ = [cut for cut in range(1, len(self.nodes)) if cut not in closed]
        inner = sorted(sorted(open_, key=lambda cut: carried[cut])[:CUTS])
        return _cut([0, *inner, len(self.nodes)], carried, work, self.count)

    def boundary(self, cut: int) -> int:
        """Bytes of elements of 8 that go from layers before a place to those behind it."""
        place = {node: i for i, node in enumerate(self.nodes)}
        at = self.ends[cut - 1] if cut else 0
        return sum(_bytes(node) for node in self.nodes[:at] if any(place.get(user, -1) >= at for user in node.users))

    def inside(self, first: int, last: int) -> list[fx.Node]:
        """The operators of some layers."""
        return self.nodes[self.ends[first - 1] if first else 0 : self.ends[last - 1]]

    def shares(self, first: int, last: int) -> bool:
        """Whether other layers read a parameter of these layers too."""
        mine = set(self.inside(first, last))
        read: dict[tuple[str, str], set[bool]] = {}  # by these, by others
        for node in self.forward.module.graph.nodes:
            if node.op == "placeholder":
                read.setdefault(self.forward.sources[node.name], set()).update(user in mine for user in node.users)
        return any(kind == "parameter" and len(by) > 1 for (kind, _), by in read.items())

    def part(self, first: int, last: int) -> Forward:
        """Some layers as a forward pass: what they read of others are boundaries, what others read are outputs."""
        inside, graph = self.inside(first, last), fx.Graph()
        mine, needed = set(inside), set(inside)
        for node in reversed(self.forward.module.graph.nodes):
            if node in mine or (node in needed and node not in self.live):
                needed.update(node.all_input_nodes)
        new: dict[fx.Node, fx.Node] = {}
        sources: dict[str, tuple[str, str]] = {}
        needed_nodes = [node for node in self.forward.module.graph.nodes if node in needed]
        outside = [node for node in needed_nodes if node in self.live and node not in mine]
        for node in outside:
            new[node] = graph.placeholder(node.name)
            boundary = ("boundary", node.name)
            sources[new[node].name] = self.forward.sources[node.name] if node.op == "placeholder" else boundary
        for node in needed_nodes:
            if node not in new:
                new[node] = graph.node_copy(node, lambda n: new[n])
            new[node].meta = dict(node.meta)
        graph.output(tuple(new[node] for node in inside if any(user not in mine for user in node.users)))
        return Forward(fx.GraphModule(torch.nn.Module(), graph), sources, self.forward.values)

    def graph(self, first: int, last: int) -> OperatorGraph:
        """A training step of some layers, with the gradients of their boundaries."""
        return differentiated(self.part(first, last))

    def like(self, first: int, last: int) -> tuple:
        """What makes two runs of layers the same problem: their operators, shapes and wiring, and whence tensors come:
        parameters and boundaries have gradients, frozen parameters and inputs have none."""
        number: dict[fx.Node, int] = {}
        seen: dict[tuple[str, str], int] = {}
        key = []
        part = self.part(first, last)
        for node in part.module.graph.nodes:
            number[node] = len(number)
            value = node.meta.get("val")
            shape = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
            args = fx.node.map_arg((node.args, node.kwargs), lambda n: number[n])
            what: tuple = (str(node.target),) if node.op == "call_function" else ()
            if node.op == "placeholder":
                kind, name = source = part.sources[node.name]
                trained = kind == "parameter" and part.values[name].requires_grad
                what = (kind, trained, seen.setdefault(source, len(seen)))
            key.append((node.op, what, repr(args), shape))
        return tuple(key)


def _cut(places: list[int], carried: list[int], work: list[float], count: int) -> list[int]:
    """Ends of so many layers: of the cuts whose widest boundary is narrowest, one whose heaviest layer is lightest."""
    count, last = min(count, len(places) - 1), places[-1]

    def carries(limit: float) -> Callable[[int, int], float]:
        return lambda start, end: carried[end] * (end < last) if work[end] - work[start] <= limit else math.inf

    limit = (1 + DELTA) * work[-1] / count
    wide, _ = _least_of_most(places, count, carries(limit))
    if wide == math.inf:  # one operator computes more than a layer's share
        limit = math.inf
        wide, _ = _least_of_most(places, count, carries(limit))
    narrow = [place for place in places if place in (places[0], last) or carried[place] <= wide]
    _, ends = _least_of_most(narrow, count, lambda start, end: (
        work[end] - work[start] if work[end] - work[start] <= limit else math.inf
    ))  # fmt: skip
    return ends


def _least_of_most(
    places: list[int], count: int, cost: Callable[[int, int], float]
) -> tuple[float, list[int]]:
    """Of all ways to cut into so many runs, the one whose dearest is cheapest, by dynamic programming: what that costs,
    and where its runs end."""
    best: dict[int, tuple[float, list[int]]] = {places[0]: (0.0, [])}
    for _ in range(count):
        step: dict[int, tuple[float, list[int]]] = {}
        for start, (most, ends) in best.items():
            for end in places:
                if end > start and (found := max(most, cost(start, end))) < step.get(end, (math.inf,))[0]:
                    step[end] = (found, [*ends, end])
        best = step
    return best.get(places[-1], (math.inf, []))


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    tensors = value if isinstance(value, (tuple, list)) else [value]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def _flops(node: fx.Node) -> float:
    """Of the products in an operator, forward."""
    schema = schema_of(node)
    name = schema.name.split("::")[1] if schema else ""
    if name in ("linear", "matmul", "mm", "bmm", "addmm"):
        return 2.0 * node.meta["val"].numel() * operand(node, 1 if name == "addmm" else 0).shape[-1]
    if name == "scaled_dot_product_attention":
        return 4.0 * node.meta["val"].numel() * operand(node, 1).shape[-2]
    return 0.0
