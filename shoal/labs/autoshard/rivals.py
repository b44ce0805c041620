"""The splits that people write by hand, as restrictions of the same problem: what is left free is chosen as well as can
be, so each of them is priced at its best.

A split by hand says of each weight how it is kept, how it is multiplied, and how its optimizer state is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.engine.parallel.linear import ColumnLinear, RowLinear, VocabularyEmbedding
from shoal.engine.parallel.tensor import TENSOR_PARALLEL, matches
from shoal.labs.autoshard.capture.graph import Operator
from shoal.labs.autoshard.intra.choices import OperatorSplit, lies, sizes_of, states, whole
from shoal.labs.autoshard.intra.problem import UPDATE, Builder, ShardingProblem
from shoal.labs.autoshard.notation.notation import Sharding
from shoal.spec.layout import Layout, ZeroStage


@dataclass(frozen=True)
class Pin:
    """How one weight is split by hand.

    Attributes:
        kept: the ways in which it may be kept.
        used: the one in which it is multiplied.
        state: the ways in which its optimizer's state may be kept.
        gradient: whether its gradient is made as the weight is multiplied; else in any way.
    """

    kept: frozenset[Sharding]
    used: Sharding
    state: frozenset[Sharding]
    gradient: bool = True


@dataclass(frozen=True)
class Rival:
    """A split by hand.

    Attributes:
        problem: with only the choices that keep to it.
        layout: of shoal's own models, of which `shoal train` does the same; None if it has tensor-parallel ranks
            elsewhere in the mesh.
    """

    problem: ShardingProblem
    layout: Layout | None


def rivals(builder: Builder, problem: ShardingProblem) -> dict[str, Rival]:
    """The problem under each split by hand that this graph and mesh allow."""
    mesh, weights = builder.mesh, builder.graph.parameters
    found: dict[str, dict[str, Pin]] = {
        "data parallel": {op.name: _replicated(op) for op in weights},
        "data parallel, ZeRO-1": {op.name: _zero1(op, builder) for op in weights},
        "FSDP (ZeRO-3)": {op.name: _sharded(op, builder) for op in weights},
    }
    stages: tuple[ZeroStage, ...] = (0, 1, 3)
    layouts = {name: Layout(dp=mesh.ranks, zero=zero) for name, zero in zip(found, stages, strict=True)}
    columns = {op.name: _megatron(op.name) for op in weights}
    if any(at is not None for at in columns.values()):
        for axis in [*mesh.axes, *([mesh.axes] if len(mesh.axes) > 1 else [])]:
            rest = "".join(other for other in mesh.axes if other not in axis)
            over = f"Megatron over {axis}"
            name = over + (f", data parallel over {rest}" if rest else "")
            found[name] = {op.name: _split(op, builder, columns[op.name], axis) for op in weights}
            if mesh.axes.endswith(axis):  # neighbours in rank are neighbours in tp
                layouts[name] = Layout(tp=mesh.size(axis), dp=mesh.size(rest))
            if rest:
                sharded = f"{over}, FSDP over {rest}"
                found[sharded] = {op.name: _split(op, builder, columns[op.name], axis, rest) for op in weights}
                if name in layouts:
                    layouts[sharded] = layouts[name].model_copy(update={"zero": 3})
    restricted = {}
    for name, pins in found.items():
        try:
            restricted[name] = Rival(problem.restricted(_allowed(builder, pins)), layouts.get(name))
        except ValueError:
            continue  # a weight that does not come out even, so that split cannot be
    return restricted


def _allowed(builder: Builder, pins: dict[str, Pin]) -> Callable[[dict[str, OperatorSplit]], bool]:
    """Whether a choice keeps to the pins."""
    reads: dict[str, Sharding] = {}  # from a tensor that is a weight but for views, to how it must be read
    for name, pin in pins.items():
        followed = builder.followed(name, OperatorSplit((), pin.used, pin.used))
        reads.update({member: split.out for member, split in followed.items()})
    gradients = {gradient: pins[name] for name, gradient in builder.graph.gradients.items() if name in pins}

    def allowed(choice: dict[str, OperatorSplit]) -> bool:
        for name, split in choice.items():
            if name in pins and split.out not in pins[name].kept:
                return False
            if name.startswith(UPDATE) and split.out not in pins[name.removeprefix(UPDATE)].state:
                return False
            pin = gradients.get(name)
            if pin is not None and pin.gradient and split.out.dims != pin.used.dims:
                return False
            for operand, how in zip(builder.ops[name].operands, split.operands, strict=True):
                if operand in reads and operand not in choice and how != reads[operand]:
                    return False
        return True

    return allowed


def _replicated(op: Operator) -> Pin:
    everywhere = whole(len(op.shape))
    return Pin(frozenset({everywhere}), everywhere, frozenset({everywhere}))


def _zero1(op: Operator, builder: Builder) -> Pin:
    everywhere = whole(len(op.shape))
    return Pin(frozenset({everywhere}), everywhere, frozenset(states(op.shape, builder.mesh)), gradient=False)


def _sharded(op: Operator, builder: Builder) -> Pin:
    """Kept in as many parts as come out even, gathered before it is multiplied."""
    found = states(op.shape, builder.mesh)
    most = max(len(state.used) for state in found)
    kept = frozenset(state for state in found if len(state.used) == most)
    return Pin(kept, whole(len(op.shape)), kept, gradient=False)


def _split(op: Operator, builder: Builder, dim: int | None, axis: str, fsdp: str = "") -> Pin:
    """Megatron's: one dim over an axis; with ``fsdp`` kept over those axes too."""
    dims = ["" for _ in op.shape]
    if dim is not None and dim < len(dims):
        dims[dim] = axis
    used = lies(tuple(dims))
    if not used.fits(sizes_of(op.shape), builder.mesh):
        used = whole(len(op.shape))
    kept = {used}
    if fsdp:
        more = {state for state in states(op.shape, builder.mesh) if _within(used, state)}
        most = max(len(state.used) for state in more)
        kept = {state for state in more if len(state.used) == most}
    return Pin(frozenset(kept), used, frozenset(kept), gradient=not fsdp)


def _within(used: Sharding, state: Sharding) -> bool:
    """Whether a state only splits further what another has."""
    return all(finer.startswith(axes) for (_, axes), (_, finer) in zip(used.dims, state.dims, strict=True))


def _megatron(name: str) -> int | None:
    """The dim of a weight of shoal's own models that tensor parallelism splits."""
    module, _, part = name.rpartition(".")
    for pattern, style in TENSOR_PARALLEL.items():
        if matches(pattern, module) and isinstance(style, type):
            if issubclass(style, (ColumnLinear, VocabularyEmbedding)):
                return 0
            if issubclass(style, RowLinear):
                return 1 if part == "weight" else None
    return None
