"""Cut a forward pass into layers, and make any run of layers a forward pass of its own.

Operators are clustered in their order (Zheng et al. 2022, section 5.2, equation 6): of all cuts into L layers with at
most (1 + delta) of the mean FLOPs each, take one whose widest boundary carries the fewest bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, fx

from shoal.planning.auto.capture.forward import Forward, get_schema, operand

DELTA = 0.5  # a layer may have this part of the mean FLOPs more than the mean
CUTS = 150  # candidates for cuts: the places that carry the fewest bytes


@dataclass
class Layers:
    """A forward pass in layers."""

    forward: Forward
    count: int  # of layers; fewer if the graph has fewer places to cut

    @cached_property
    def live(self) -> set[fx.Node]:
        """Parameters, inputs and what is computed from them; the rest are constants, which every stage computes."""
        live: set[fx.Node] = set()
        for node in self.forward.module.graph.nodes:
            if node.op == "placeholder" or live.intersection(node.all_input_nodes):
                live.add(node)
        return live

    @cached_property
    def nodes(self) -> list[fx.Node]:
        """The operators of all layers, in order."""
        return [node for node in self.forward.module.graph.nodes if node in self.live and node.op == "call_function"]

    @cached_property
    def ends(self) -> list[int]:
        """Where each layer ends in `nodes`."""
        place = {node: i for i, node in enumerate(self.nodes)}
        carried = [0] * (len(self.nodes) + 1)  # bytes that are made before a place and read after it
        closed: set[int] = set()  # places that a tuple of tensors crosses
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
        """Return the bytes, in the traced float64, that layers before a place send to those after it."""
        place = {node: i for i, node in enumerate(self.nodes)}
        at = self.ends[cut - 1] if cut else 0
        return sum(_bytes(node) for node in self.nodes[:at] if any(place.get(user, -1) >= at for user in node.users))

    def inside(self, first: int, last: int) -> list[fx.Node]:
        """Return the operators of layers [first, last)."""
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
        """Make some layers a forward pass: tensors of other layers are boundaries, those that others read outputs."""
        inside, graph = self.inside(first, last), fx.Graph()
        mine, needed = set(inside), set(inside)
        for node in reversed(self.forward.module.graph.nodes):
            if node in mine or (node in needed and node not in self.live):
                needed.update(node.all_input_nodes)
        new: dict[fx.Node, fx.Node] = {}
        sources: dict[str, tuple[str, str]] = {}
        needed_nodes = [node for node in self.forward.module.graph.nodes if node in needed]
        for node in needed_nodes:
            if node in self.live and node not in mine:
                new[node] = graph.placeholder(node.name)
                sources[new[node].name] = self.forward.sources.get(node.name, ("boundary", node.name))
        for node in needed_nodes:
            if node not in new:
                new[node] = graph.node_copy(node, lambda n: new[n])
            new[node].meta = dict(node.meta)
        graph.output(tuple(new[node] for node in inside if any(user not in mine for user in node.users)))
        return Forward(fx.GraphModule(torch.nn.Module(), graph), sources, self.forward.values)

    def key(self, first: int, last: int) -> tuple:
        """Make a key that is equal for layers with the same problem: operators, shapes, wiring and kinds of sources."""
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
    """Find the ends of ``count`` layers: the narrowest widest boundary, then the lightest heaviest layer."""
    count, last = min(count, len(places) - 1), places[-1]

    def carries(limit: float) -> Callable[[int, int], float]:
        return lambda start, end: carried[end] * (end < last) if work[end] - work[start] <= limit else math.inf

    limit = (1 + DELTA) * work[-1] / count
    wide, _ = _minimise_maximum(places, count, carries(limit))
    if wide == math.inf:  # one operator computes more than a layer's share
        limit = math.inf
        wide, _ = _minimise_maximum(places, count, carries(limit))
    narrow = [place for place in places if place in (places[0], last) or carried[place] <= wide]
    _, ends = _minimise_maximum(narrow, count, lambda start, end: (
        work[end] - work[start] if work[end] - work[start] <= limit else math.inf
    ))  # fmt: skip
    return ends


def _minimise_maximum(
    places: list[int], count: int, cost: Callable[[int, int], float]
) -> tuple[float, list[int]]:
    """Cut into ``count`` runs with the least maximal cost, by dynamic programming: return it, and the ends of runs."""
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
    """Count the forward FLOPs of an operator's products."""
    schema = get_schema(node)
    name = schema.name.split("::")[1] if schema else ""
    if name in ("linear", "matmul", "mm", "bmm", "addmm"):
        return 2.0 * node.meta["val"].numel() * operand(node, 1 if name == "addmm" else 0).shape[-1]
    if name == "scaled_dot_product_attention":
        return 4.0 * node.meta["val"].numel() * operand(node, 1).shape[-2]
    return 0.0
