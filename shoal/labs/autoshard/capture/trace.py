"""A module's graph: its forward pass, differentiated by autograd, in ATen operators.

The forward pass (or a part of it, for a stage) is traced together with its gradients: products of matrices,
element-wise operators, sums, views. So the backward pass is operators like the forward one, and what it communicates
needs no rules of its own.
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

from shoal.base.errors import UsageError
from shoal.labs.autoshard.capture.forward import Forward, forward_of, operand, writes
from shoal.labs.autoshard.capture.graph import Operator, OperatorGraph, Ref, phased
from shoal.labs.autoshard.capture.unfold import unfolded

aten = torch.ops.aten
SAME = {"alias", "detach", "clone", "lift_fresh_copy", "contiguous", "lift"}
"""Operators that copy at most: what blocks hold need not be contiguous."""
WHOLE_OPS = ("embedding", "embedding_dense_backward", "_softmax", "_softmax_backward_data", "_log_softmax")
"""What is not taken apart."""


# ---- from a forward pass ---------------------------------------------------------------------------------------------


def graph_of(module: nn.Module, inputs: tuple, *, input_gradients: bool = False) -> OperatorGraph:
    """The operators of a training step of a module.

    Args:
        inputs: examples, whose shapes count and whose values do not.
        input_gradients: make the gradients of floating-point inputs as well, as a layer among others does.
    """
    return differentiated(forward_of(module, inputs), input_gradients=input_gradients)


def differentiated(forward: Forward, *, input_gradients: bool = False) -> OperatorGraph:
    """A forward pass with its gradients: of trained parameters and of the boundaries of a stage.

    Args:
        input_gradients: also of inputs; of them and of boundaries those that are floating-point numbers.

    Raises:
        UsageError: it draws random numbers, or a tensor is empty or has too many dims.
    """
    places: list[tuple[fx.Node, str, str, Tensor | None]] = []
    learned: list[tuple[fx.Node, str, str, Tensor]] = []
    for node in forward.module.graph.nodes:
        if node.op == "placeholder":
            kind, name = forward.sources[node.name]
            value = node.meta.get("val")
            tensor = value if isinstance(value, Tensor) else None
            trained = kind == "parameter" and forward.values[name].requires_grad
            asked = trained or kind == "boundary" or (kind == "input" and input_gradients)
            seen = (kind, name) in [(k, n) for _, k, n, _ in learned]
            places.append((node, kind, name, tensor))
            if asked and not seen and tensor is not None and tensor.is_floating_point():
                learned.append((node, kind, name, tensor))
    fakes = next(tensor for *_, tensor in places if isinstance(tensor, FakeTensor)).fake_mode
    once: dict[tuple[str, str], Tensor] = {}
    with fakes:
        for _, kind, name, tensor in places:
            if tensor is not None and (kind, name) not in once:
                once[kind, name] = torch.empty_like(tensor)
    keys = list(once)

    def outputs(tensors: Sequence[Tensor]) -> tuple[dict, list[Tensor]]:
        given = dict(zip(keys, tensors, strict=True))
        for _, kind, name, _ in learned:
            given[kind, name] = given[kind, name].detach().requires_grad_()
        flat = [given.get((kind, name)) for _, kind, name, _ in places]
        outs = fx.Interpreter(forward.module).run(*flat)
        return given, forward.each([out for out in outs if isinstance(out, Tensor)])

    def step(tensors: list[Tensor], gradients: list[Tensor]):
        given, outs = outputs(tensors)
        trained = [out for out in outs if out.requires_grad]
        if not trained:
            return outs, []
        leaves = [given[kind, name] for _, kind, name, _ in learned]
        return outs, list(torch.autograd.grad(trained, leaves, grad_outputs=gradients, allow_unused=True))

    with sdpa_kernel(SDPBackend.MATH), fakes:
        # Autograd knows best which outputs have a gradient: not those that depend on inputs or buffers alone.
        _, outs = outputs(list(once.values()))
        learning = [node for node, out in zip(forward.outputs, outs, strict=True) if out.requires_grad]
        gradients = [torch.empty_like(node.meta["val"]) for node in learning]
        traced = make_fx(step, decomposition_table=_decompositions(), tracing_mode="fake")
        joint = traced(list(once.values()), gradients)
        if any(map(writes, joint.graph.nodes)):  # formulas of autograd and decompositions do so
            again = make_fx(functionalize(joint), decomposition_table=_decompositions(), tracing_mode="fake")
            joint = again(list(once.values()), gradients)
    kinds = [(kind, name) for kind, name in keys]
    kinds += [("gradient", node.name) for node in learning]
    names = [name if kind == "parameter" else f"{kind} {name}" for _, kind, name, _ in learned] if learning else []
    return _splittable(_read(joint, kinds, names))


def _splittable(graph: OperatorGraph) -> OperatorGraph:
    """Unfolded.

    Raises:
        UsageError: a tensor that is given and read has no elements, or one more dims than the notation has letters.
    """
    users = graph.users()
    if empty := next((op for op in graph.ops.values() if op.numel == 0 and op.kind != "call" and users[op.name]), None):
        raise UsageError(
            f"{empty.name} has the shape {list(empty.shape)}: there is nothing in it to split.\n"
            "  Plan without tensors that have a dim of 0."
        )
    graph = unfolded(graph)
    if deep := next((op for op in graph.ops.values() if len(op.shape) > len(ascii_uppercase)), None):
        raise UsageError(
            f"{deep.name} has {len(deep.shape)} dims, and shardings have a letter for {len(ascii_uppercase)}.\n"
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
    table[aten.mean.dim] = _mean
    table[aten.mean.default] = lambda x, dtype=None: _mean(x, list(range(x.dim())), dtype=dtype)
    table[aten.var.correction], table[aten.var_mean.correction] = _var, _var_mean
    for name in WHOLE_OPS:
        for kind in getattr(aten, name).overloads():
            table.pop(getattr(getattr(aten, name), kind), None)
    return table


def _mean(x: Tensor, dim=None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    dims = list(range(x.dim())) if not dim else list(dim)
    return aten.sum.dim_IntList(x, dims, keepdim, dtype=dtype) / math.prod(x.shape[d] for d in dims)


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


def _var(x: Tensor, dim=None, *, correction=None, keepdim: bool = False) -> Tensor:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


# ---- from a trace ----------------------------------------------------------------------------------------------------


def _read(joint: fx.GraphModule, kinds: list[tuple[str, str]], learned: list[str]) -> OperatorGraph:
    """Plain data from the traced graph; what only renames tensors goes."""
    new: dict[fx.Node, Any] = {}
    ops: dict[str, Operator] = {}
    places = iter(kinds)
    outputs: tuple[str, ...] = ()
    gradients: dict[str, str] = {}

    def of(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return new[value]
        if isinstance(value, (tuple, list)):
            return type(value)(of(v) for v in value)
        if isinstance(value, dict):
            return {key: of(v) for key, v in value.items()}
        return value

    for node in joint.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            kind, name = next(places)
            called = name if kind == "parameter" else f"{kind} {name}"
            ops[called] = Operator(called, kind, name, tuple(value.shape), value.dtype)
            new[node] = Ref(called)
        elif node.op == "output":
            first = len(node.args[0]) - len(learned)
            found, outputs = node.args[0][first:], tuple(of(out).name for out in node.args[0][:first])
            gradients = {
                name: of(gradient).name for name, gradient in zip(learned, found, strict=True) if gradient is not None
            }
        elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            room, name = node.target._schema.name.split("::")
            if name == "_assert_tensor_metadata":
                continue
            if torch.Tag.nondeterministic_seeded in node.target.tags:
                raise UsageError(
                    f"{node.target}: every device would draw random numbers of its own.\n  Plan without dropout: p = 0."
                )
            if name in SAME or (name in ("expand", "view", "_to_copy") and _unchanged(node)):
                new[node] = of(node.args[0])
                continue
            target = f"{'' if room == 'aten' else room + '::'}{name}.{node.target._overloadname}"
            ops[node.name] = Operator(node.name, "call", target, *_made(value), of(node.args), of(dict(node.kwargs)))
            new[node] = Ref(node.name)
        elif node.target is getitem:  # of an operator with several outputs
            many, index = ops[new[node.args[0]].name], node.args[1]
            target = "getitem.int"
            args: tuple[Any, ...] = (Ref(many.name), index)
            if many.op == "split_with_sizes":
                x, sizes, dim = (*many.args, 0)[:3]
                target, args = "slice.Tensor", (x, dim, sum(sizes[:index]), sum(sizes[: index + 1]))
            ops[node.name] = Operator(node.name, "call", target, *_made(value), args)
            new[node] = Ref(node.name)
        else:
            raise UsageError(f"{node.op} {node.target}: graphs inside of operators, as torch.cond has, are not planned")
    return phased(ops, outputs, gradients)


def _made(value: Any) -> tuple[tuple[int, ...], torch.dtype]:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    return (), torch.uint8  # a tuple of tensors, which only getitem reads


def _unchanged(node: fx.Node) -> bool:
    before, after = operand(node, 0), node.meta["val"]
    return before.shape == after.shape and before.dtype == after.dtype
