"""Chain of the modules of a model of one's own, along which a pipeline cuts it into stages.

Each module of the chain takes the output of the one before. A stage (`shoal.engine.own.links`) computes some of them.
It runs the definition's loss, in which the modules of other stages compute nothing: those before return what the stage
before has sent, or zeros, and at the first module of the next stage the run ends.

One run on fake tensors finds what a stage needs: edges of autograd's graph between two modules of the chain lead to the
parameters that are used there, and to tensors that were computed earlier. Besides the input of a stage's first module,
these may be outputs of modules, such as of an encoder or for a skip connection.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_structure
from torch.utils.flop_counter import FlopCounterMode

from shoal.base.errors import UsageError
from shoal.engine.own.definition import OwnModel
from shoal.engine.own.flops import count_flops
from shoal.engine.own.formats import autocast
from shoal.engine.own.samples import OwnBatch
from shoal.engine.own.trial import run_first
from shoal.engine.precision.policy import Policy
from shoal.pipeline.partition import read_layers, split_work
from shoal.pipeline.program import Program

HIDDEN = "hidden_states"
"""Name of the input, if a module of the chain does not take it by position."""


Place = tuple[str, int]
"""A module, and the index of a tensor in its output, flattened."""

Key = tuple[Any, int]
"""A tensor in a run: its node of autograd and the index in the node's outputs; without a gradient itself."""


@dataclass(frozen=True)
class Crossing:
    """A tensor that stages before a cut compute and stages after it use.

    Attributes:
        places: outputs of modules that are it, before the cut.
        trained: whether its gradient is sent back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    places: tuple[Place, ...] = ()
    trained: bool = True

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Chain:
    """What a run of the full module has shown of a chain.

    Attributes:
        names: its modules, in the order of the forward.
        crossings: of a cut before each; first the input of the module.
        blocked: why there can be no cut before a module, by its index.
        outputs: shape, dtype and structure of each output, of whose tensors the first is meant.
        parts: index of the first module that a parameter is used in, or of the last before, for each use; -1 is before
            the first module.
        places: the same of each module outside of the chain, when it first ran.
        metrics: names of the metrics of the loss.
        flops: of the forward of each, with what runs between it and the next; the first with all before it.
    """

    names: tuple[str, ...]
    crossings: tuple[tuple[Crossing, ...], ...]
    blocked: dict[int, str]
    outputs: tuple[tuple[tuple[int, ...], torch.dtype, TreeSpec], ...]
    parts: dict[str, frozenset[int]]
    places: dict[str, int]
    metrics: tuple[str, ...]
    flops: tuple[int, ...]

    def assign(self, program: Program, *, sequence_parallel: bool = False) -> list[range]:
        """Return the modules of each stage: as set by the layout, or balanced by their FLOPs.

        Raises:
            UsageError: there are more stages than modules, or a tensor cannot be sent between two; with sequence
                parallelism, only one tensor is sent, as ranks may have parts of the others.
        """
        modules, stages, given = len(self.names), program.depth, read_layers(program)
        starts = [i for i in range(modules) if i not in self.blocked]
        blocked = [each.start for each in given if each.start in self.blocked] or [*self.blocked]
        if stages > len(starts) or any(each.start in self.blocked for each in given):
            reason = f" {self.blocked[blocked[0]]}" if blocked else ""
            raise UsageError(f"model.module: its pipeline has {modules} modules, and the layout {stages} stages."
                             f"{reason}\n  Lower parallel.pp or virtual_stages, or name more modules.")
        work = self.flops if any(self.flops) else [1] * len(self.flops)
        ends = [*starts[1:], modules]
        found = split_work([sum(work[a:b]) for a, b in zip(starts, ends, strict=True)], stages)
        parts = given or [range(starts[each.start], ends[each.stop - 1]) for each in found]
        if sequence_parallel and any(len(self.crossings[each.start]) > 1 for each in parts[1:]):
            raise UsageError("parallel.sequence_parallel with a pipeline of model.module whose stages send several "
                             "tensors.\n  Leave sequence_parallel out.")
        return parts

    def find_shared(self, stages: Sequence[range]) -> tuple[frozenset[str], tuple[int, ...]]:
        """Return the parameters that several stages use, and these stages.

        Raises:
            UsageError: other stages share others.
        """
        shared, holders = set(), tuple[int, ...]()
        for name, places in self.parts.items():
            used = tuple(sorted({next((i for i, stage in enumerate(stages) if p in stage), 0) for p in places}))
            if len(used) > 1 and holders not in ((), used):
                these, others = (", ".join(map(str, each)) for each in (used, holders))
                raise UsageError(f"model.module: the stages {these} of its pipeline use {name}, and the stages "
                                 f"{others} share others.\n  Lower parallel.pp, or leave modules that use it out of "
                                 "the pipeline.")
            if len(used) > 1:
                shared.add(name)
                holders = used
        return frozenset(shared), holders

    def uses(self, name: str, part: range) -> bool:
        """Return whether a stage of these modules computes with a parameter; an unused one belongs to that of its
        module."""
        places = self.parts.get(name) or {self.place(name)}
        return any(place in part or (place < 0 and not part.start) for place in places)

    def place(self, name: str) -> int:
        """Return the index of the module of the chain that a parameter or buffer belongs to, or runs after."""
        for i, link in enumerate(self.names):
            if name.startswith(f"{link}."):
                return i
        return self.places.get(name.rpartition(".")[0], -1)


class _Trace:
    """A run of the full module, with a view as the input of each module of the chain.

    Attributes:
        inputs: of each, as computed.
        before: number of nodes of autograd that exist when it begins.
        views: the node of each view, and its module.
        found: outputs of modules that run once and are not a part of another of the chain: the place of each, and the
            index of the last module of the chain that had begun.
        passed: for tensors without a gradient, the last module that takes an earlier one's output, and this one.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], counter: FlopCounterMode):
        self.names, self.entered, self.counter = names, 0, counter
        self.counted: list[int] = []  # FLOPs before each
        self.inputs: list[Tensor] = []
        self.before: list[int] = []
        self.views: dict[Any, int] = {}
        self.outputs: list[tuple[tuple[int, ...], torch.dtype, TreeSpec]] = []
        self.places: dict[str, int] = {}
        self.runs: Counter[str] = Counter()
        self.found: dict[Key, list[tuple[Place, int, Tensor]]] = defaultdict(list)
        self.passed: dict[Key, tuple[int, int]] = {}
        for i, name in enumerate(names):
            link = module.get_submodule(name)
            link.register_forward_pre_hook(self._watch(i), with_kwargs=True)
            link.register_forward_hook(self._leave)
        inside = tuple(f"{name}." for name in names)
        for name, each in module.named_modules():
            each.register_forward_pre_hook(partial(self._note, name))
            if not name.startswith(inside):
                each.register_forward_hook(partial(self._find, name))

    def find_part(self, node: Any) -> int:
        """Return the index of the last module that had begun when a node was made."""
        return bisect_right(self.before, node._sequence_nr()) - 1

    def _note(self, name: str, *_: Any) -> None:
        self.places.setdefault(name, self.entered - 1)

    def _find(self, name: str, _: nn.Module, args: Any, output: Any) -> None:
        self.runs[name] += 1
        for i, value in enumerate(tree_leaves(output)):
            if isinstance(value, Tensor):
                self.found[make_key(value)].append(((name, i), self.entered - 1, value))

    def _watch(self, i: int) -> Callable[..., Any]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name = self.names[i]
            if i != self.entered:
                raise UsageError(f"model.module: {name!r} of its pipeline does not run as number {i + 1}, or runs "
                                 "twice.\n  Name modules that run once in each forward, in this order.")
            x = get_input(args, kwargs)
            if not isinstance(x, Tensor) or not x.is_floating_point():
                raise UsageError(f"model.module: {name!r} of its pipeline gets no tensor of floats as its first input."
                                 "\n  Name modules whose first input is the output of the one before.")
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and value is not x and not value.requires_grad:
                    self._pass(make_key(value), i)
            self.entered += 1
            self.counted.append(self.counter.get_total_flops())
            self.inputs.append(x)
            mark = torch.zeros((), requires_grad=True).view(1).grad_fn
            self.before.append(mark._sequence_nr())  # type: ignore[union-attr]
            view = x.view_as(x)
            if view.grad_fn is not None:
                self.views[view.grad_fn] = i
            return set_input(args, kwargs, view)

        return enter

    def _pass(self, key: Key, taken: int) -> None:
        """Note that a module takes a tensor without a gradient, if one before it made it."""
        maker = self.found[key][0][0][0] if key in self.found else ""
        if maker in self.names:
            self.passed[key] = self.names.index(maker), taken

    def _leave(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor):
            raise UsageError(f"model.module: {self.names[self.entered - 1]!r} of its pipeline returns no tensor, and "
                             "no tuple that begins with one.\n  Leave it out.")
        self.outputs.append((tuple(first.shape), first.dtype, tree_structure(output)))

    def find_crossings(self, end: Tensor) -> tuple[list[list[Crossing]], dict[int, str], dict[Any, set[int]]]:
        """Return the crossings of each cut, why there can be none, and the parts that use each parameter's node."""
        needed: list[dict[Key, int]] = [{} for _ in self.names]  # and the part that uses it
        parts: dict[Any, set[int]] = defaultdict(set)
        for node, part, child, number in self._edges(end):
            if hasattr(child, "variable"):
                parts[child].add(part)
                continue
            made, taken = self.find_part(child), part
            if self.views.get(node) == part:  # the first crossing of the cut before it
                taken = part - 1
            if made < 0 and not self._places((child, number), 0) and taken > made:
                for leaf in _reach(child):  # a function of parameters that each stage computes
                    parts[leaf].add(part)
                continue
            for cut in range(made + 1, taken + 1):
                needed[cut].setdefault((child, number), part)
        for key, (made, taken) in self.passed.items():
            for cut in range(made + 1, taken + 1):
                needed[cut].setdefault(key, taken)
        crossings, blocked = list[list[Crossing]](), dict[int, str]()
        for cut, (x, others) in enumerate(zip(self.inputs, needed, strict=True)):
            first = make_key(x)
            crossings.append([])
            for key, part in {first: cut, **others}.items():
                places = self._places(key, cut) if key in others else []
                if key in others and not places:
                    blocked[cut] = (f"Before {self.names[cut]!r} there is none: {self.names[part]!r}, or what follows "
                                    "it, uses a tensor that was computed earlier, and is no output of a module that "
                                    "runs once. Make it one, such as of an nn.Identity.")
                    continue
                value = x if key == first else places[0][2]
                crossings[-1].append(Crossing(
                    tuple(value.shape), value.dtype, tuple(place for place, _, _ in places),
                    value.requires_grad or key == first,
                ))
        return crossings, blocked, parts

    def _places(self, key: Key, cut: int) -> list[tuple[Place, int, Tensor]]:
        """Return the outputs of modules that are a tensor, before a cut."""
        return [each for each in self.found.get(key, ()) if each[1] < cut and self.runs[each[0][0]] == 1]

    def _edges(self, end: Tensor) -> Iterator[tuple[Any, int, Any, int]]:
        """Yield the edges of a tensor's graph: node, its part, the node before and the index of its output."""
        seen, todo = set[Any](), [end.grad_fn]
        while todo:
            node = todo.pop()
            if node in seen or hasattr(node, "variable"):
                continue
            seen.add(node)
            part = self.find_part(node)
            for child, number in node.next_functions:  # type: ignore[union-attr]
                if child is not None:
                    yield node, part, child, number
                    todo.append(child)


def make_key(tensor: Tensor) -> Key:
    """Return what a tensor and its aliases of autograd have in common."""
    return (tensor, 0) if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


def get_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the first input of a module."""
    return args[0] if args else kwargs.get(HIDDEN)


def set_input(args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the first input of a module."""
    return ((x, *args[1:]), kwargs) if args else (args, kwargs | {HIDDEN: x})


def find_chain(own: OwnModel, policy: Policy, seed: int, batch: OwnBatch) -> Chain:
    """Find the chain of a definition by a run of its first micro-batch in the formats of a policy; see `run_first`.

    Raises:
        UsageError: the modules are no chain, or the loss fails.
    """
    found, _ = run_first(own, policy, seed, batch, partial(_trace, own, policy))
    return found


def _trace(own: OwnModel, policy: Policy, module: nn.Module, batch: OwnBatch) -> Chain:
    names = own.name_links(module)
    with count_flops() as counter, autocast(policy, torch.device("cpu")):
        trace = _Trace(module, names, counter)
        loss, _, metrics = own.compute(module, batch.values)
    if trace.entered < len(names):
        raise UsageError(f"model.module: {names[trace.entered]!r} of its pipeline does not run in the forward.")
    named = {p: name for name, p in module.named_parameters()}
    crossings, blocked, leaves = trace.find_crossings(loss)
    parts = {named[node.variable]: frozenset(used) for node, used in leaves.items() if node.variable in named}
    counted = [0, *trace.counted[1:], counter.get_total_flops()]
    return Chain(
        names, tuple(map(tuple, crossings)), blocked, tuple(trace.outputs), parts, trace.places, tuple(sorted(metrics)),
        tuple(after - before for before, after in pairwise(counted)),
    )


def _reach(node: Any) -> set[Any]:
    """Return the nodes of the leaves of a graph of autograd."""
    seen, todo = set[Any](), [node]
    while todo:
        if (node := todo.pop()) is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return {each for each in seen if hasattr(each, "variable")}
