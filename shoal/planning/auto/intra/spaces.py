"""Operators as loop nests: the iteration space, the dims of tensors that run along its letters, and sums over them.

    product       [A, B] x [B, C] -> [A, C]        the output lacks B: along it, outputs are terms of a sum
    add           [A, B] + [B]    -> [A, B]
    softmax       [A, .]          -> [A, .]        a dim without a letter is not split
    view          [A, .]          -> [A, ., .]     of dims that are folded or unfolded, the outermost can be split

A mesh axis along a letter splits every tensor dim with that letter: one rule for all operators. An operator without an
iteration space is computed in full by every device, which is always correct.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from string import ascii_uppercase

import torch

from shoal.engine.sharding.graph import RESHAPES, Operator, Ref, overload

Dims = tuple[str, ...]
"""The letter of each dim of a tensor, "" for one that is not split."""

Shapes = tuple[tuple[int, ...], ...]

ALONG = {"_softmax": 1, "_log_softmax": 1, "_softmax_backward_data": 2, "slice": 1, "cat": 1, "gather": 1, "scatter": 1}
"""Operators along one dim, with the position of this dim among their arguments."""

LOOKUPS = ("embedding", "embedding_dense_backward")


@dataclass(frozen=True)
class IterationSpace:
    """The loops of an operator."""

    sizes: dict[str, int]  # of each letter; the number of devices along it must divide it
    # operands, out: the dims of each tensor that it reads, and of its output
    operands: tuple[Dims, ...]
    out: Dims
    # operands that may be unreduced while the others are not; then the output is unreduced
    linear: tuple[int, ...] = ()
    together: bool = False  # it is linear in all operands together, as an addition is
    flops: float = 0.0  # of all devices together

    @property
    def summed(self) -> set[str]:
        """Letters along which outputs are terms of a sum."""
        return set(self.sizes) - set(self.out)


def build_space(op: Operator, shapes: Shapes) -> IterationSpace | None:
    """Build the iteration space of an operator, given the shapes of its operands; None if it has no rule."""
    if op.op in RULES:
        return RULES[op.op](op, shapes)
    if op.op in RESHAPES:
        return _reshape(op, shapes)
    return _pointwise(op, shapes) if is_pointwise(op) else None


def is_pointwise(op: Operator) -> bool:
    return op.target != "getitem.int" and torch.Tag.pointwise in overload(op.target).tags


def _name_dims(shape: tuple[int, ...], unsplit: Collection[int] = ()) -> tuple[Dims, dict[str, int]]:
    """Give a letter to every dim that can be split; return all letters, and their sizes."""
    dims = tuple(
        "" if n == 1 or d in unsplit else letter
        for d, (n, letter) in enumerate(zip(shape, ascii_uppercase, strict=False))
    )
    return dims, {letter: n for letter, n in zip(dims, shape, strict=True) if letter}


def _broadcast(dims: Dims, shape: tuple[int, ...], operand: tuple[int, ...]) -> Dims:
    """Return the letters of an operand that is broadcast to a shape."""
    skipped = len(shape) - len(operand)
    return tuple("" if n != shape[skipped + d] else dims[skipped + d] for d, n in enumerate(operand))


LINEAR = {"mul": (0, 1), "div": (0,), "neg": (0,)}


def _pointwise(op: Operator, shapes: Shapes) -> IterationSpace:
    dims, sizes = _name_dims(op.shape)
    operands = tuple(_broadcast(dims, op.shape, shape) for shape in shapes)
    linear = tuple(i for i in LINEAR.get(op.op, ()) if i < len(shapes))
    if op.op == "div" and (not isinstance(op.args[0], Ref) or op.kwargs.get("rounding_mode")):
        linear = ()
    return IterationSpace(sizes, operands, dims, linear, op.op in ("add", "sub") and len(shapes) == 2)


def _product(op: Operator, shapes: Shapes) -> IterationSpace:
    """Multiply matrices, with any number of dims that are batch, rows, contracted, or columns."""
    inputs, out = op.args[2].split("->")
    letters = inputs.split(",")
    found = {letter: n for dims, shape in zip(letters, shapes, strict=True)
             for letter, n in zip(dims, shape, strict=True)}  # fmt: skip
    return IterationSpace(found, tuple(map(tuple, letters)), tuple(out), flops=2.0 * math.prod(found.values()))


def _reshape(op: Operator, shapes: Shapes) -> IterationSpace:
    """Fold dims into one or unfold them: of each group with the same elements before and after, split the outermost."""
    (before,), after = shapes, op.shape
    sizes: dict[str, int] = {}
    ins, outs = [""] * len(before), [""] * len(after)
    i = o = 0
    for letter in ascii_uppercase:
        while i < len(before) and before[i] == 1:
            i += 1
        while o < len(after) and after[o] == 1:
            o += 1
        if i == len(before) or o == len(after):
            break
        n, m, i_end, o_end = before[i], after[o], i + 1, o + 1
        while n != m:
            if n < m:
                n, i_end = n * before[i_end], i_end + 1
            else:
                m, o_end = m * after[o_end], o_end + 1
        if (common := math.gcd(before[i], after[o])) > 1:
            ins[i] = outs[o] = letter
            sizes[letter] = common
        i, o = i_end, o_end
    return IterationSpace(sizes, (tuple(ins),), tuple(outs), linear=(0,))


def _permute(op: Operator, shapes: Shapes) -> IterationSpace:
    dims, sizes = _name_dims(shapes[0])
    return IterationSpace(sizes, (dims,), tuple(dims[d] for d in op.args[1]), linear=(0,))


def _expand(op: Operator, shapes: Shapes) -> IterationSpace:
    dims, sizes = _name_dims(op.shape)
    return IterationSpace(sizes, (_broadcast(dims, op.shape, shapes[0]),), dims, linear=(0,))


def _reduce(op: Operator, shapes: Shapes, *, is_sum: bool) -> IterationSpace:
    """Reduce over dims, which can be split only if it is a sum."""
    given = op.args[1] if len(op.args) > 1 and op.target != "sum.default" else None
    given = [given] if isinstance(given, int) else given
    keep = bool(op.args[2]) if len(op.args) > 2 else bool(op.kwargs.get("keepdim"))
    ndim = len(shapes[0])
    reduced = {d % ndim for d in given} if given else set(range(ndim))
    dims, sizes = _name_dims(shapes[0], () if is_sum else reduced)
    out = tuple("" if d in reduced else letter for d, letter in enumerate(dims) if keep or d not in reduced)
    return IterationSpace(sizes, (dims,), out, linear=(0,) if is_sum else ())


def find_dim(op: Operator) -> int:
    """Return the dim that an operator of `ALONG` works along."""
    at = ALONG[op.op]
    return (op.args[at] if len(op.args) > at else 0) % max(1, len(op.shape))


def _along_dim(op: Operator, shapes: Shapes) -> IterationSpace | None:
    """Work along one dim, on tensors of equal shapes in all other dims."""
    d = find_dim(op)
    if any(shape[:d] + shape[d + 1 :] != op.shape[:d] + op.shape[d + 1 :] for shape in shapes):
        return None
    dims, sizes = _name_dims(op.shape, (d,))
    linear = (0,) if op.op in ("gather", "slice", "_softmax_backward_data") else ()
    return IterationSpace(sizes, (dims,) * len(shapes), dims, linear, op.op == "cat")


def _select(op: Operator, shapes: Shapes) -> IterationSpace:
    d = op.args[1] % len(shapes[0])
    dims, sizes = _name_dims(shapes[0], (d,))
    return IterationSpace(sizes, (dims,), dims[:d] + dims[d + 1 :], linear=(0,))


def _triangle(op: Operator, shapes: Shapes) -> IterationSpace:
    dims, sizes = _name_dims(op.shape, (len(op.shape) - 2, len(op.shape) - 1))
    return IterationSpace(sizes, (dims,), dims, linear=(0,))


def _embedding(op: Operator, shapes: Shapes) -> IterationSpace:
    """Read rows of a table; a device has some rows along V, and returns 0 for other tokens (Shoeybi et al. 2019)."""
    table, tokens = shapes
    dims, sizes = _name_dims(tokens)
    return IterationSpace({**sizes, "V": table[0], "W": table[1]}, (("V", "W"), dims), (*dims, "W"))


def _embedding_backward(op: Operator, shapes: Shapes) -> IterationSpace | None:
    if op.args[4]:  # scaled by the frequency of tokens
        return None
    _, tokens = shapes
    dims, sizes = _name_dims(tokens)
    return IterationSpace({**sizes, "V": op.shape[0], "W": op.shape[1]}, ((*dims, "W"), dims), ("V", "W"))


RULES: dict[str, Callable[[Operator, Shapes], IterationSpace | None]] = {
    "product": _product, "permute": _permute, "expand": _expand, "sum": partial(_reduce, is_sum=True),
    **dict.fromkeys(("amax", "amin", "any", "all"), partial(_reduce, is_sum=False)),
    **dict.fromkeys(ALONG, _along_dim), "select": _select, "tril": _triangle, "triu": _triangle,
    "embedding": _embedding, "embedding_dense_backward": _embedding_backward,
    "_to_copy": _pointwise, "full_like": _pointwise, "zeros_like": _pointwise, "ones_like": _pointwise,
}  # fmt: skip
"""Rules by operator; reshapes and element-wise operators have general ones."""
