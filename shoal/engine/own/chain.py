"""Pipeline stages of a model of one's own, along a chain of its modules.

Each module of the chain takes the output of the one before. A stage computes some of them. It runs the definition's
loss, in which the modules of other stages compute nothing: those before return zeros, the first of its own gets the
tensor that the stage before has sent, and at the first module of the next stage the run ends.

One run on fake tensors finds what a stage needs: the graph of autograd between two modules of the chain leads to the
parameters that are used there, and to the inputs of modules before, if the modules are no chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from shoal.base.errors import UsageError
from shoal.engine.models.initial import stream_key
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


@dataclass(frozen=True)
class Chain:
    """What a run of the full module has shown of a chain.

    Attributes:
        names: its modules, in the order of the forward.
        inputs: shape and dtype of the input of each.
        outputs: shape, dtype and length of the tuple of each output; 0 for a tensor alone.
        parts: index of the first module that a parameter is used in, or of the last before, for each use; -1 is before
            the first module.
        places: the same of each module outside of the chain, when it first ran.
        metrics: names of the metrics of the loss.
        flops: of the forward of each, with what runs between it and the next; the first with all before it.
    """

    names: tuple[str, ...]
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    outputs: tuple[tuple[tuple[int, ...], torch.dtype, int], ...]
    parts: dict[str, frozenset[int]]
    places: dict[str, int]
    metrics: tuple[str, ...]
    flops: tuple[int, ...]

    def assign(self, program: Program) -> list[range]:
        """Return the modules of each stage: as set by the layout, or balanced by their FLOPs.

        Raises:
            UsageError: there are more stages than modules.
        """
        modules, stages = len(self.names), program.depth
        if stages > modules:
            raise UsageError(f"model.module: its pipeline has {modules} modules, and the layout {stages} stages."
                             "\n  Lower parallel.pp or virtual_stages, or name more modules.")
        work = self.flops if any(self.flops) else [1] * len(self.flops)
        return read_layers(program) or split_work(work, program.depth)

    def find_shared(self, stages: Sequence[range]) -> frozenset[str]:
        """Return the parameters that both the first and the last stage use.

        Raises:
            UsageError: other stages share a parameter.
        """
        shared, last = set(), len(stages) - 1
        for name, places in self.parts.items():
            used = {next((i for i, stage in enumerate(stages) if place in stage), 0) for place in places}
            if len(used) > 1 and used != {0, last}:
                raise UsageError(f"model.module: the stages {', '.join(map(str, sorted(used)))} of its pipeline use "
                                 f"{name}; only the first and the last may share one.\n  Lower parallel.pp, or "
                                 "leave modules that use it out of the pipeline.")
            if len(used) > 1:
                shared.add(name)
        return frozenset(shared)

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
    """A run of the full module, with a new leaf of autograd as the input of each module of the chain."""

    def __init__(self, module: nn.Module, names: Sequence[str], counter: FlopCounterMode):
        self.names, self.entered, self.counter = names, 0, counter
        self.counted: list[int] = []  # FLOPs before each
        self.inputs: list[Tensor] = []  # as computed
        self.leaves: list[Tensor] = []
        self.outputs: list[tuple[tuple[int, ...], torch.dtype, int]] = []
        self.places: dict[str, int] = {}
        for i, name in enumerate(names):
            link = module.get_submodule(name)
            link.register_forward_pre_hook(self._watch(i), with_kwargs=True)
            link.register_forward_hook(self._leave)
        for name, each in module.named_modules():
            each.register_forward_pre_hook(lambda _, args, name=name: self._note(name))

    def _note(self, name: str) -> None:
        self.places.setdefault(name, self.entered - 1)

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
            others = [value for value in tree_leaves((args, kwargs)) if value is not x]
            if any(isinstance(value, Tensor) and value.requires_grad for value in others):
                raise UsageError(f"model.module: {name!r} of its pipeline has two inputs with a gradient, and stages "
                                 "send one.\n  Leave it out.")
            self.entered += 1
            self.counted.append(self.counter.get_total_flops())
            self.inputs.append(x)
            self.leaves.append(x.detach().requires_grad_())
            return set_input(args, kwargs, self.leaves[-1])

        return enter

    def _leave(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor):
            raise UsageError(f"model.module: {self.names[self.entered - 1]!r} of its pipeline returns no tensor, and "
                             "no tuple that begins with one.\n  Leave it out.")
        self.outputs.append((tuple(first.shape), first.dtype, len(output) if isinstance(output, tuple) else 0))


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
    named = {id(p): name for name, p in module.named_parameters()}
    earlier = {id(leaf): i for i, leaf in enumerate(trace.leaves)}
    parts: dict[str, set[int]] = {}
    for i, end in enumerate([*trace.inputs, loss], start=-1):
        for leaf in _reach(end):
            if (before := earlier.get(id(leaf), i)) < i:
                raise UsageError(f"model.module: {names[i]!r} of its pipeline, or what follows it, uses more than its "
                                 f"input: what was computed from the input of {names[before]!r}.\n  Name modules that "
                                 "only pass on their output, or fewer.")
            if id(leaf) in named:
                parts.setdefault(named[id(leaf)], set()).add(i)
    counted = [0, *trace.counted[1:], counter.get_total_flops()]
    return Chain(
        names, tuple((tuple(x.shape), x.dtype) for x in trace.inputs), tuple(trace.outputs),
        {name: frozenset(found) for name, found in parts.items()}, trace.places, tuple(sorted(metrics)),
        tuple(after - before for before, after in pairwise(counted)),
    )


def _reach(end: Tensor) -> list[Tensor]:
    """Return the leaves of a tensor's graph of autograd."""
    found, seen, todo = list[Tensor](), set[Any](), [end.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.append(leaf)
        todo += [following for following, _ in node.next_functions]
    return found


# ---- a stage -------------------------------------------------------------------------------------------------------


class _Cut(BaseException):
    """End of a stage's part of a forward, with its output."""

    def __init__(self, output: Tensor):
        super().__init__()
        self.output = output


class StageLinks:
    """The modules of a chain as one stage computes them; see the module's docstring.

    Args:
        part: indices of the stage's modules.
        module: the full module, of which the parameters of others are freed.
        dtype, device: of the freed parameters, which are zeros without memory.

    Attributes:
        absent: parameters that the stage does not use.
        hidden: input of the stage for the micro-batch that runs forward or backward, which may compute it again.
    """

    def __init__(self, chain: Chain, part: range, module: nn.Module, dtype: torch.dtype, device: torch.device):
        self.chain, self.part = chain, part
        self.hidden: Tensor | None = None
        self.absent = {
            name for name, p in module.named_parameters() if p.requires_grad and not chain.uses(name, part)
        }
        for name in self.absent:
            full = module.get_parameter(name)
            empty = nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(full.shape), requires_grad=False)
            for each in module.modules():
                for key, held in each._parameters.items():
                    if held is full:
                        each._parameters[key] = empty
        for i, name in enumerate(chain.names):
            link = module.get_submodule(name)
            if i < part.start:
                link.forward = self._passing(i)
        if part.start:
            first = module.get_submodule(chain.names[part.start])
            first.register_forward_pre_hook(self._receive, with_kwargs=True, prepend=True)
        if part.stop < len(chain.names):
            after = module.get_submodule(chain.names[part.stop])
            after.register_forward_pre_hook(self._end, with_kwargs=True, prepend=True)

    @property
    def is_last(self) -> bool:
        """Whether the stage computes the loss."""
        return self.part.stop == len(self.chain.names)

    def keeps(self, name: str) -> bool:
        """Return whether the stage saves a buffer or a parameter that is not trained."""
        place = self.chain.place(name)
        return place in self.part or (place < 0 and not self.part.start)

    def run(self, loss: Callable[[], Any], hidden: Tensor | None) -> Any:
        """Return the loss, or on an earlier stage the tensor for the next one."""
        self.hidden = hidden
        try:
            return loss()
        except _Cut as cut:
            return cut.output

    def _passing(self, i: int) -> Callable[..., Any]:
        shape, dtype, length = self.chain.outputs[i]

        def passing(*args: Any, **kwargs: Any) -> Any:
            x = get_input(args, kwargs)
            zeros = torch.zeros(shape, dtype=dtype, device=x.device)
            return (zeros, *[None] * (length - 1)) if length else zeros

        return passing

    def _receive(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        return set_input(args, kwargs, self.hidden) if self.hidden is not None else None

    def _end(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        x = get_input(args, kwargs)
        shape, dtype = self.chain.inputs[self.part.stop]
        if (tuple(x.shape), x.dtype) != (shape, dtype):
            raise UsageError(f"model.module: {self.chain.names[self.part.stop]!r} of its pipeline gets {list(x.shape)} "
                             f"of {x.dtype}, and of the first batch {list(shape)} of {dtype}.\n  Make batches of one "
                             "size, such as by padding in collate.")
        raise _Cut(x)


class LinkSeeds:
    """Seeds of torch's generators at each module of a chain, so that a stage draws what one device would.

    Attributes:
        first: index of the first sample of the micro-batch that runs forward or backward.
    """

    def __init__(self, own: OwnModel, module: nn.Module, seed: int):
        self.seed, self.first = seed, 0
        for i, name in enumerate(own.name_links(module)):
            module.get_submodule(name).register_forward_pre_hook(lambda _, args, i=i: self._draw(i))

    def _draw(self, i: int) -> None:
        torch.manual_seed(stream_key(self.seed, f"batch {self.first} module {i}") & (1 << 63) - 1)
