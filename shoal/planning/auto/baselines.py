"""Splits that people write by hand, as restrictions of the same problem, each priced with the best of the free choices.

A split by hand gives for each weight the sharding in which it is kept, in which it is multiplied, and in which its
optimizer state is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.engine.parallel.embedding import VocabularyEmbedding
from shoal.engine.parallel.linear import ColumnLinear, RowLinear
from shoal.engine.parallel.tensor import TENSOR_PARALLEL, matches
from shoal.engine.sharding.graph import Operator
from shoal.engine.sharding.named_axes import NamedMesh, Sharding, by_position, replicated
from shoal.engine.sharding.plan import UPDATE, OperatorSplit
from shoal.planning.auto.intra.choices import list_shardings
from shoal.planning.auto.intra.problem import Builder, ShardingProblem
from shoal.spec.layout import Layout, ZeroStage


@dataclass(frozen=True)
class Pin:
    """How one weight is split by hand."""

    kept: frozenset[Sharding]  # the shardings in which it may be kept
    used: Sharding  # the one in which it is multiplied
    state: frozenset[Sharding]  # the same of its optimizer state
    gradient: bool  # whether its gradient is made in the sharding `used`; else in any


def restrict_to_baselines(
    builder: Builder, problem: ShardingProblem
) -> dict[str, tuple[ShardingProblem, Layout | None]]:
    """Restrict a problem to each split by hand that its graph and mesh allow.

    Returns:
        By the name of the split: the problem, and the layout with which `shoal train` splits shoal's own models so;
        None where tensor-parallel ranks are not neighbours in the mesh.
    """
    mesh = builder.mesh
    tensor_dims = {op.name: _find_tensor_parallel_dim(op.name) for op in builder.graph.parameters}
    candidates: list[tuple[str, str, ZeroStage]] = [
        ("data parallel", "", 0), ("data parallel, ZeRO-1", "", 1), ("FSDP (ZeRO-3)", "", 3),
    ]  # fmt: skip
    if any(dim is not None for dim in tensor_dims.values()):
        for axes in [*mesh.axes, *([mesh.axes] if len(mesh.axes) > 1 else [])]:
            rest = _other_axes(mesh, axes)
            over = f"Megatron over {axes}"
            candidates.append((over + (f", data parallel over {rest}" if rest else ""), axes, 0))
            if rest:
                candidates.append((f"{over}, FSDP over {rest}", axes, 3))
    found = {}
    for name, axes, zero in candidates:
        pins = {op.name: _pin(op, mesh, tensor_dims[op.name], axes, zero) for op in builder.graph.parameters}
        try:
            restricted = problem.restricted(_allow(builder, pins))
        except ValueError:  # an axis does not divide a weight
            continue
        is_layout = mesh.axes.endswith(axes)  # tp ranks are neighbours
        dp = mesh.size(_other_axes(mesh, axes))
        found[name] = restricted, Layout(tp=mesh.size(axes), dp=dp, zero=zero) if is_layout else None
    return found


def _other_axes(mesh: NamedMesh, axes: str) -> str:
    return "".join(axis for axis in mesh.axes if axis not in axes)


def _allow(builder: Builder, pins: dict[str, Pin]) -> Callable[[dict[str, OperatorSplit]], bool]:
    reads: dict[str, Sharding] = {}  # the sharding in which a weight, or a view of it, must be read
    for name, pin in pins.items():
        views = builder.follow_root(name, OperatorSplit((), pin.used, pin.used))
        reads.update({member: split.out for member, split in views.items()})
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
            for operand, read in zip(builder.ops[name].operands, split.operands, strict=True):
                if operand in reads and operand not in choice and read != reads[operand]:
                    return False
        return True

    return allowed


def _pin(op: Operator, mesh: NamedMesh, dim: int | None, axes: str, zero: ZeroStage) -> Pin:
    """Split a dim of a weight over some axes as Megatron does, and states (ZeRO-1) or all (ZeRO-3) over the others."""
    split = ["" for _ in op.shape]
    if dim is not None and dim < len(split):
        split[dim] = axes
    used = by_position(tuple(split))
    if not used.fits(op.sizes, mesh):
        used = replicated(len(op.shape))
    finer = [sharding for sharding in list_shardings(op.sizes, mesh) if all(
        fine.startswith(coarse) for (_, coarse), (_, fine) in zip(used.dims, sharding.dims, strict=True)
    )]  # fmt: skip
    kept = frozenset({used})
    if zero == 3:
        most = max(len(sharding.used) for sharding in finer)
        kept = frozenset(sharding for sharding in finer if len(sharding.used) == most)
    return Pin(kept, used, frozenset(finer) if zero == 1 else kept, gradient=zero == 0)


def _find_tensor_parallel_dim(name: str) -> int | None:
    module, _, part = name.rpartition(".")
    for pattern, style in TENSOR_PARALLEL.items():
        if matches(pattern, module) and isinstance(style, type):
            if issubclass(style, (ColumnLinear, VocabularyEmbedding)):
                return 0
            if issubclass(style, RowLinear):
                return 1 if part == "weight" else None
    return None
