"""Capture a module's training step: its forward pass, differentiated by autograd, in ATen operators.

The forward pass (or a part of it, for a stage) is traced together with its gradients: products of matrices,
element-wise operators, sums, views. So the backward pass consists of operators like the forward one, and its
collectives need no rules of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from operator import getitem
from string import ascii_uppercase
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from shoal.base.errors import UsageError
from shoal.engine.sharding.graph import Operator, OperatorGraph, Ref, assign_phases
from shoal.planning.auto.capture.forward import Forward, export_forward, operand, writes
from shoal.planning.auto.capture.unfold import unfold

aten = torch.ops.aten
SAME = {"alias", "detach", "clone", "lift_fresh_copy", "contiguous", "lift"}
"""Operators that at most copy: blocks need not be contiguous."""
KEPT_OPS = ("embedding", "embedding_dense_backward", "_softmax", "_softmax_backward_data", "_log_softmax")
"""Operators that are not decomposed."""


# ---- from a forward pass ---------------------------------------------------------------------------------------------


def capture_graph(module: nn.Module, inputs: tuple) -> OperatorGraph:
    """Capture the operators of a training step of a module, on example inputs, of which only the shapes count."""
    return differentiate(export_forward(module, inputs))


def differentiate(forward: Forward, *, draws: bool = False) -> OperatorGraph:
    """Add the gradients of trained parameters and of a stage's floating-point boundaries to a forward pass.

    Args:
        draws: whether it may draw random numbers, which every device draws in full, in the order of the graph.

    Raises:
        UsageError: it draws random numbers, or a tensor is empty or has too many dims.
    """
    sources: list[tuple[str, str]] = []  # of each placeholder
    values: dict[tuple[str, str], Tensor] = {}
    for node in forward.module.graph.nodes:
        if node.op == "placeholder":
            sources.append(forward.sources[node.name])
            if isinstance(value := node.meta.get("val"), Tensor):
                values.setdefault(sources[-1], value)

    def is_learned(source: tuple[str, str]) -> bool:
        kind, name = source
        trained = kind == "parameter" and forward.values[name].requires_grad
        return (trained or kind == "boundary") and values[source].is_floating_point()

    learned = [source for source in values if is_learned(source)]
    fakes = next(value for value in values.values() if isinstance(value, FakeTensor)).fake_mode
    with fakes:
        examples = [torch.empty_like(value) for value in values.values()]

    def outputs(tensors: Sequence[Tensor]) -> tuple[dict, list[Tensor]]:
        given = dict(zip(values, tensors, strict=True))
        for source in learned:
            given[source] = given[source].detach().requires_grad_()
        outs = fx.Interpreter(forward.module).run(*map(given.get, sources))
        return given, forward.drop_repeated([out for out in outs if isinstance(out, Tensor)])

    def step(tensors: list[Tensor], gradients: list[Tensor]):
        given, outs = outputs(tensors)
        trained = [out for out in outs if out.requires_grad]
        if not trained:
            return outs, []
        leaves = [given[source] for source in learned]
        return outs, list(torch.autograd.grad(trained, leaves, grad_outputs=gradients, allow_unused=True))

    with sdpa_kernel(SDPBackend.MATH), fakes:
        # Ask autograd which outputs have a gradient: not those that depend on inputs or buffers alone.
        _, outs = outputs(examples)
        learning = [node for node, out in zip(forward.outputs, outs, strict=True) if out.requires_grad]
        gradients = [torch.empty_like(node.meta["val"]) for node in learning]
        traced = make_fx(step, decomposition_table=_decompositions(), tracing_mode="fake")
        joint = traced(examples, gradients)
        if any(map(writes, joint.graph.nodes)):  # formulas of autograd and decompositions do so
            again = make_fx(functionalize(joint), decomposition_table=_decompositions(), tracing_mode="fake")
            joint = again(examples, gradients)
    kinds = [*values, *(("gradient", node.name) for node in learning)]
    names = [name if kind == "parameter" else f"{kind} {name}" for kind, name in learned] if learning else []
    graph = _read_trace(joint, kinds, names, draws=draws)
    users = graph.users()
    if empty := next((op for op in graph.ops.values() if op.numel == 0 and op.kind != "call" and users[op.name]), None):
        raise UsageError(
            f"{empty.name} has the shape {list(empty.shape)}: it has no elements to split.\n"
            "  Plan without tensors that have a dim of 0."
        )
    graph = unfold(graph)
    if deep := next((op for op in graph.ops.values() if len(op.shape) > len(ascii_uppercase)), None):
        raise UsageError(
            f"{deep.name} has {len(deep.shape)} dims, and shardings have letters for {len(ascii_uppercase)}.\n"
            "  Fold some of them together."
        )
    return graph


@cache
def _decompositions() -> dict:
    from torch._decomp import core_aten_decompositions, get_decompositions

    table = dict(core_aten_decompositions())
    table.update(get_decompositions([aten.native_layer_norm_backward]))
    table[aten.native_layer_norm.default] = _layer_norm
    table[aten.addmm.default] = table[aten.baddbmm.default] = table[aten.addmv.default] = _add_product
    table[aten.native_dropout.default] = _dropout
    table[aten.mean.dim] = _mean
    table[aten.mean.default] = lambda x, dtype=None: _mean(x, list(range(x.dim())), dtype=dtype)
    table[aten.var_mean.correction] = _var_mean
    table[aten.var.correction] = lambda *args, **options: _var_mean(*args, **options)[0]
    for name in KEPT_OPS:
        for kind in getattr(aten, name).overloads():
            table.pop(getattr(getattr(aten, name), kind), None)
    return table


def _mean(x: Tensor, dim=None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    dims = list(range(x.dim())) if not dim else list(dim)
    return aten.sum.dim_IntList(x, dims, keepdim, dtype=dtype) / math.prod(x.shape[d] for d in dims)


def _dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Draw as torch does on a CPU, but from a shape alone."""
    if train is False or p == 0:
        return x.clone(), aten.full.default(x.shape, True, dtype=torch.bool, device=x.device)
    mask = aten.bernoulli.p(aten.empty.memory_format(x.shape, dtype=x.dtype, device=x.device), 1 - p)
    return x * (mask / (1 - p)), mask.bool()


def _var_mean(x: Tensor, dim=None, *, correction=None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = list(range(x.dim())) if not dim else list(dim)
    mean = _mean(x, dims, True)
    count = math.prod(x.shape[d] for d in dims) - (1 if correction is None else correction)
    var = aten.sum.dim_IntList((x - mean) ** 2, dims, keepdim) / count
    return var, mean if keepdim else aten.squeeze.dims(mean, dims)


def _layer_norm(x: Tensor, shape, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    var, mean = _var_mean(x, list(range(x.dim() - len(shape), x.dim())), correction=0, keepdim=True)
    inverse = (var + eps).rsqrt()
    out = (x - mean) * inverse
    out = out if weight is None else out * weight
    return out if bias is None else out + bias, mean, inverse


def _add_product(x: Tensor, a: Tensor, b: Tensor, *, beta=1, alpha=1) -> Tensor:
    product = aten.bmm(a, b) if a.dim() == 3 else aten.mv(a, b) if b.dim() == 1 else aten.mm(a, b)
    return (product if alpha == 1 else product * alpha) + (x if beta == 1 else x * beta)


# ---- from a trace ----------------------------------------------------------------------------------------------------


def _read_trace(
    joint: fx.GraphModule, kinds: list[tuple[str, str]], learned: list[str], *, draws: bool
) -> OperatorGraph:
    """Read a traced graph into plain data, without operators that only rename tensors."""
    new: dict[fx.Node, Any] = {}
    ops: dict[str, Operator] = {}
    places = iter(kinds)
    outputs: tuple[str, ...] = ()
    gradients: dict[str, str] = {}
    constants: set[str] = set()  # depend on nothing from outside

    def rename(value: Any) -> Any:
        return tree_map_only(fx.Node, new.__getitem__, value)

    for node in joint.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            kind, name = next(places)
            called = name if kind == "parameter" else f"{kind} {name}"
            ops[called] = Operator(called, kind, name, tuple(value.shape), value.dtype)
            new[node] = Ref(called)
        elif node.op == "output":
            first = len(node.args[0]) - len(learned)
            found, outputs = node.args[0][first:], tuple(rename(out).name for out in node.args[0][:first])
            gradients = {
                name: rename(gradient).name
                for name, gradient in zip(learned, found, strict=True) if gradient is not None
            }
        elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            namespace, name = node.target._schema.name.split("::")
            if name == "_assert_tensor_metadata":
                continue
            constant = all(new[read].name in constants for read in node.all_input_nodes)
            if torch.Tag.nondeterministic_seeded in node.target.tags and not (draws and constant):
                raise UsageError(
                    f"{node.target}: each device would draw its own random numbers.\n  "
                    + ("Draw them by dropout." if draws else "Plan without dropout: p = 0.")
                )
            if name in SAME or (
                name in ("expand", "view", "_to_copy") and _describe(operand(node, 0)) == _describe(value)
            ):
                new[node] = rename(node.args[0])
                continue
            if name == "cat":  # leaves out the empty tensors that caches of keys begin with
                parts = [part for part in node.args[0] if part.meta["val"].shape != (0,)]
                node.args = (parts, *node.args[1:])
                if len(parts) == 1:
                    new[node] = rename(parts[0])
                    continue
            target = f"{'' if namespace == 'aten' else namespace + '::'}{name}.{node.target._overloadname}"
            args, kwargs = rename((node.args, dict(node.kwargs)))
            ops[node.name] = Operator(node.name, "call", target, *_describe(value), args, kwargs)
            new[node] = Ref(node.name)
            if constant:
                constants.add(node.name)
        elif node.target is getitem:  # of an operator with several outputs
            many, index = ops[new[node.args[0]].name], node.args[1]
            target = "getitem.int"
            args = (Ref(many.name), index)
            if many.op == "split_with_sizes":
                x, sizes, dim = (*many.args, 0)[:3]
                target, args = "slice.Tensor", (x, dim, sum(sizes[:index]), sum(sizes[: index + 1]))
            ops[node.name] = Operator(node.name, "call", target, *_describe(value), args)
            new[node] = Ref(node.name)
        else:
            raise UsageError(f"{node.op} {node.target}: operators that contain graphs (torch.cond) are not supported")
    return assign_phases(ops, outputs, gradients)


def _describe(value: Any) -> tuple[tuple[int, ...], torch.dtype]:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    return (), torch.uint8  # a tuple of tensors, which only getitem reads
