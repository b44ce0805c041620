"""Every operator as a loop nest: its iteration space, which dims of its tensors run along which of it, what is summed.

    product       [A, B] x [B, C] -> [A, C]        B is in no output: along it, outputs are parts of a sum
    add           [A, B] + [B]    -> [A, B]
    softmax       [A, .]          -> [A, .]        a dim without a letter must be whole
    view          [A, .]          -> [A, ., .]     of dims that are folded or unfolded, the outermost can be split

A mesh axis along a letter splits every tensor dim with that letter, so one rule says how all operators can be split.
What has no rule here is done whole by every device, which is always right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from string import ascii_uppercase

import torch

from shoal.labs.autoshard.capture.graph import RESHAPES, Operator, Ref, overload

Dims = tuple[str, ...]
"""The letter of each dim of a tensor, "" for one that must be whole."""

LOOKUPS = ("embedding", "embedding_dense_backward")


@dataclass(frozen=True)
class IterationSpace:
    """What an operator runs over.

    Attributes:
        sizes: of each letter: what the devices along it must divide.
        operands: the dims of each tensor that it reads.
        out: and of the one that it makes.
        linear: operands that may be parts of a sum while the others are whole; then so is the output.
        together: it is linear in all operands at once, as an addition is.
        flops: of all of it.
    """

    sizes: dict[str, int]
    operands: tuple[Dims, ...]
    out: Dims
    linear: tuple[int, ...] = ()
    together: bool = False
    flops: float = 0.0

    @property
    def summed(self) -> set[str]:
        """Letters along which outputs are parts of a sum."""
        return set(self.sizes) - set(self.out)


def space_of(op: Operator, shapes: tuple[tuple[int, ...], ...]) -> IterationSpace | None:
    """The iteration space of an operator, None if nothing is known of it.

    Args:
        shapes: of its operands.
    """
    if op.op in RULES:
        return RULES[op.op](op, shapes)
    if op.op in RESHAPES:
        return _reshape(op, shapes)
    if op.target != "getitem.int" and torch.Tag.pointwise in overload(op.target).tags:
        return _pointwise(op, shapes)
    return None


def _letters(shape: tuple[int, ...], whole: tuple[int, ...] = ()) -> tuple[Dims, dict[str, int]]:
    """A letter for every dim that can be split, and their sizes."""
    dims = tuple(
        "" if n == 1 or d in whole else letter
        for d, (n, letter) in enumerate(zip(shape, ascii_uppercase, strict=False))
    )
    return dims, {letter: n for letter, n in zip(dims, shape, strict=True) if letter}


def _broadcast(dims: Dims, shape: tuple[int, ...], operand: tuple[int, ...]) -> Dims:
    """The letters of an operand that is stretched to a shape."""
    skipped = len(shape) - len(operand)
    return tuple("" if n != shape[skipped + d] else dims[skipped + d] for d, n in enumerate(operand))


LINEAR = {"mul": (0, 1), "div": (0,), "neg": (0,)}


def _pointwise(op: Operator, shapes: tuple[tuple[int, ...], ...]) -> IterationSpace:
    dims, sizes = _letters(op.shape)
    operands = tuple(_broadcast(dims, op.shape, shape) for shape in shapes)
    linear = tuple(i for i in LINEAR.get(op.op, ()) if i < len(shapes))
    if op.op == "div" and (not isinstance(op.args[0], Ref) or op.kwargs.get("rounding_mode")):
        linear = ()
    return IterationSpace(sizes, operands, dims, linear, op.op in ("add", "sub") and len(shapes) == 2)


def _product(op: Operator, shapes: tuple[tuple[int, ...], ...]) -> IterationSpace:
    """A product of matrices, with any number of dims that are batch, rows, summed, or columns."""
    inputs, out = op.args[2].split("->")
    letters = inputs.split(",")
    found = {letter: n for dims, shape in zip(letters, shapes, strict=True)
             for letter, n in zip(dims, shape, strict=True)}  # fmt: skip
    return IterationSpace(found, tuple(map(tuple, letters)), tuple(out), flops=2.0 * math.prod(found.values()))


def _reshape(op: Operator, shapes: tuple[tuple[int, ...], ...]) -> IterationSpace:
    """Dims folded into one or unfolded: of each group with the same elements before and after, the outermost."""
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


def _permute(op: Operator, shapes: tuple[tuple[int, ...], ...]) -> IterationSpace:
    dims, sizes = _letters(shapes[0])
    return IterationSpace(sizes, (dims,), tuple(dims[d] for d in op.args[1]), linear=(0,))


def _expand(op: Operator, shapes: tuple[tuple[int, ...], ...]) -> IterationSpace:
    dims, sizes = _letters(op.shape)
    return IterationSpace(sizes, (_broadcast(dims, op.shape, shapes[0]),), dims, linear=(0,))


def _sum(op: Operator, shapes: tuple[tuple[int, ...], ...]) -> IterationSpace:
    reduced, keep = _reduced(op, len(shapes[0]))
    dims, sizes = _letters(shapes[0])
    out = tuple("" if d in reduced else letter for d, letter in enumerate(dims) if keep or d not in reduced)
    return IterationSpace(sizes, (dims,), out, linear=(0,))


def _reduction(op: Operator, shapes: tuple[tuple[int, ...], ...]) -> IterationSpace:
    """One that is no sum: what it reduces must be whole."""
    reduced, keep = _reduced(op, len(shapes[0]))
    dims, sizes = _letters(shapes[0], tuple(reduced))
    return IterationSpace(sizes, (dims,), tuple(letter for d, letter in enumerate(dims) if keep or d not in reduced))


def _reduced(op: Operator, rank: int) -> tuple[set[int], bool]:
    given = op.args[1] if len(op.args) > 1 and op.target != "sum.default" else None
    given = [given] if isinstance(given, int) else given
    keep = bool(op.args[2]) if len(op.args) > 2 else bool(op.kwargs.get("keepdim"))
    return {d % rank for d in given} if given else set(range(rank)), keep


def _along(
    linear: tuple[int, ...], at: int
) -> Callable[[Operator, tuple[tuple[int, ...], ...]], IterationSpace | None]:
    """An operator along one dim, its argument number ``at``, of tensors that are alike in all others."""

    def rule(op: Operator, shapes: tuple[tuple[int, ...], ...]) -> IterationSpace | None:
        d = (op.args[at] if len(op.args) > at else 0) % max(1, len(op.shape))
        if any(shape[:d] + shape[d + 1 :] != op.shape[:d] + op.shape[d + 1 :] for shape in shapes):
            return None
        dims, sizes = _letters(op.shape, (d,))
        return IterationSpace(sizes, (dims,) * len(shapes), dims, linear)

    return rule


def _select(op: Operator, shapes: tuple[tuple[int, ...], ...]) -> IterationSpace:
    d = op.args[1] % len(shapes[0])
    dims, sizes = _letters(shapes[0], (d,))
    return IterationSpace(sizes, (dims,), dims[:d] + dims[d + 1 :], linear=(0,))


def _cat(op: Operator, shapes: tuple[tuple[int, ...], ...]) -> IterationSpace:
    d = (op.args[1] if len(op.args) > 1 else 0) % len(op.shape)
    dims, sizes = _letters(op.shape, (d,))
    return IterationSpace(sizes, (dims,) * len(shapes), dims, together=True)


def _triangle(op: Operator, shapes: tuple[tuple[int, ...], ...]) -> IterationSpace:
    dims, sizes = _letters(op.shape, (len(op.shape) - 2, len(op.shape) - 1))
    return IterationSpace(sizes, (dims,), dims, linear=(0,))


def _embedding(op: Operator, shapes: tuple[tuple[int, ...], ...]) -> IterationSpace:
    """Rows of a table; along V a device has some rows, and gives zeros for tokens of others (Shoeybi et al. 2019)."""
    table, tokens = shapes
    dims, sizes = _letters(tokens)
    return IterationSpace({**sizes, "V": table[0], "W": table[1]}, (("V", "W"), dims), (*dims, "W"))


def _embedding_backward(op: Operator, shapes: tuple[tuple[int, ...], ...]) -> IterationSpace | None:
    if op.args[4]:  # scaled by how often a token comes
        return None
    _, tokens = shapes
    dims, sizes = _letters(tokens)
    return IterationSpace({**sizes, "V": op.shape[0], "W": op.shape[1]}, ((*dims, "W"), dims), ("V", "W"))


RULES: dict[str, Callable[[Operator, tuple[tuple[int, ...], ...]], IterationSpace | None]] = {
    "product": _product, "permute": _permute, "expand": _expand, "sum": _sum,
    "amax": _reduction, "amin": _reduction, "any": _reduction, "all": _reduction,
    "_softmax": _along((), 1), "_log_softmax": _along((), 1), "_softmax_backward_data": _along((0,), 2),
    "gather": _along((0,), 1), "scatter": _along((), 1), "slice": _along((0,), 1),
    "select": _select, "cat": _cat, "tril": _triangle, "triu": _triangle,
    "embedding": _embedding, "embedding_dense_backward": _embedding_backward,
    "_to_copy": _pointwise, "full_like": _pointwise, "zeros_like": _pointwise, "ones_like": _pointwise,
}  # fmt: skip
"""Besides products, reshapes and all that works element by element."""
