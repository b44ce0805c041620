"""Dims that were folded into one are unfolded again, so that each can be split by itself.

ATen multiplies matrices of two dims, or batches of them of three: [b, s, h] becomes [b s, h], heads [b, a, s, d] become
[b a, s, d]. Of a folded dim only the outermost part can be split in blocks; heads behind a batch could not be. Here
each tensor is kept as the dims that it was folded from, products run over all of them (as `torch.einsum` does), and
views that only fold or unfold such dims are gone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import mul
from string import ascii_letters

import torch

from shoal.labs.autoshard.capture.graph import RESHAPES, Operator, OperatorGraph, Ref, overload, phased

Form = tuple[tuple[int, ...], ...]
"""For each dim of a tensor the sizes that it is kept as; none for a dim of 1."""

ALONG = {"_softmax": 1, "_log_softmax": 1, "_softmax_backward_data": 2, "slice": 1, "cat": 1, "gather": 1, "scatter": 1}
"""Operators along one dim, with the place of its number among their arguments."""


def unfolded(graph: OperatorGraph) -> OperatorGraph:
    """The same operators on tensors that are kept unfolded; what comes from outside and is given back is as it was."""
    return _Unfolding(graph).graph()


def regrouped(sizes: tuple[int, ...], shape: tuple[int, ...]) -> Form | None:
    """Sizes in groups whose products are a shape, or None.

    >>> regrouped((2, 3, 5), (6, 1, 5))
    ((2, 3), (), (5,))
    """
    groups, left = [], list(sizes)
    for n in shape:
        group: list[int] = []
        while math.prod(group) < n and left:
            group.append(left.pop(0))
        if math.prod(group) != n:
            return None
        groups.append(tuple(group))
    if math.prod(left) != 1 or (left and not groups):
        return None
    if left:
        groups[-1] += tuple(left)
    return tuple(groups)


def refinement(*splits: tuple[int, ...]) -> tuple[int, ...] | None:
    """The coarsest sizes that all of some splits of one dim can be grouped from, without ones; None if there are none.

    >>> refinement((4, 6), (8, 3)), refinement((2, 3), (3, 2))
    ((4, 2, 3), None)
    """
    cuts = sorted({cut for sizes in splits for cut in accumulate((n for n in sizes if n > 1), mul)} | {1})
    if any(b % a for a, b in pairwise(cuts)):
        return None
    return tuple(b // a for a, b in pairwise(cuts))


class _Unfolding:
    def __init__(self, graph: OperatorGraph):
        self.old = graph
        self.ops: dict[str, Operator] = {}
        self.name: dict[str, str] = {}  # from an operator's name to that of the tensor that is kept for it
        self.form: dict[str, Form] = {}

    def graph(self) -> OperatorGraph:
        for op in self.old.ops.values():
            if op.kind != "call":
                self._keep(op, tuple((n,) for n in op.shape))
            elif not self._done(op):
                new = {name: Ref(self._plain(name)) for name in op.operands}
                self._keep(_with(op, new), tuple((n,) for n in op.shape))
        outputs = tuple(self._plain(name) for name in self.old.outputs)
        gradients = {name: self._plain(gradient) for name, gradient in self.old.gradients.items()}
        return phased(self.ops, outputs, gradients)

    def _done(self, op: Operator) -> bool:
        """Do an operator on what is kept; False if it needs its operands as they were."""
        if not op.operands:
            return False
        if op.op in RESHAPES:
            return self._reshape(op)
        if op.op == "permute":
            return self._permute(op)
        if op.op in ("mm", "bmm"):
            return self._product(op)
        if op.op == "expand":
            return self._expand(op)
        if op.target == "sum.dim_IntList":
            return self._sum(op)
        if op.op in ALONG:
            return self._along(op)
        if (op.target != "getitem.int" and torch.Tag.pointwise in overload(op.target).tags) or op.op == "_to_copy":
            return self._pointwise(op)
        return False

    # ---- what is kept ------------------------------------------------------------------------------------------------

    def _keep(self, op: Operator, form: Form) -> None:
        self.ops[op.name] = replace(op, shape=sum(form, ()))
        self.name[op.name], self.form[op.name] = op.name, form

    def _stored(self, name: str) -> tuple[int, ...]:
        return self.ops[self.name[name]].shape

    def _shown(self, name: str, sizes: tuple[int, ...]) -> str:
        """A view of what is kept, by its name."""
        kept = self.ops[self.name[name]]
        if kept.shape == sizes:
            return kept.name
        called = f"{kept.name} as {'x'.join(map(str, sizes)) or 'scalar'}"
        if called not in self.ops:
            self.ops[called] = Operator(
                called, "call", "view.default", sizes, kept.dtype, (Ref(kept.name), list(sizes))
            )
        return called

    def _plain(self, name: str) -> str:
        """As it was."""
        return self._shown(name, self.old.ops[name].shape)

    # ---- operators ---------------------------------------------------------------------------------------------------

    def _reshape(self, op: Operator) -> bool:
        (name,), stored = op.operands, self._stored(op.operands[0])
        form = regrouped(stored, op.shape)
        if form is None:
            finer = refinement(stored, op.shape)
            if finer is None:
                return False
            form = regrouped(finer, op.shape)
            assert form is not None, "a refinement can be grouped into what it refines"
            self.name[op.name] = self._shown(name, finer)
        else:
            self.name[op.name] = self.name[name]
        self.form[op.name] = form
        return True

    def _permute(self, op: Operator) -> bool:
        (name,) = op.operands
        form = self.form[name]
        order = [d % len(form) for d in op.args[1]]
        starts = list(accumulate((len(group) for group in form), initial=0))
        stored = [starts[d] + i for d in order for i in range(len(form[d]))]
        x = Ref(self.name[name])
        self._keep(_with(op, {name: x}, (x, stored)), tuple(form[d] for d in order))
        return True

    def _product(self, op: Operator) -> bool:
        left, right = op.operands
        a, b = self.form[left], self.form[right]
        found = [refinement(p, q) for p, q in zip(a[:-2], b[:-2], strict=True)]
        batch = [sizes for sizes in found if sizes is not None]
        between = refinement(a[-1], b[-2])
        if between is None or len(batch) < len(found):
            return False
        rows, columns = refinement(a[-2]) or (), refinement(b[-1]) or ()
        letters = iter(ascii_letters)
        e, i, j, k = ("".join(next(letters) for _ in group)
                      for group in (sum(batch, ()), rows, between, columns))  # fmt: skip
        x = Ref(self._shown(left, (*sum(batch, ()), *rows, *between)))
        y = Ref(self._shown(right, (*sum(batch, ()), *between, *columns)))
        self._keep(replace(op, target="product.einsum", args=(x, y, f"{e}{i}{j},{e}{j}{k}->{e}{i}{k}")),
                   (*batch, rows, columns))  # fmt: skip
        return True

    def _pointwise(self, op: Operator) -> bool:
        form = self._joined(op, ())
        if form is None:
            return False
        self._keep(_with(op, self._aligned(op, form)), form)
        return True

    def _along(self, op: Operator) -> bool:
        at = ALONG[op.op]
        d = (op.args[at] if len(op.args) > at else 0) % len(op.shape)
        form = self._joined(op, (d,))
        if form is None:
            return False
        args = (*op.args[:at], sum(map(len, form[:d])), *op.args[at + 1 :])
        self._keep(_with(op, self._aligned(op, form, d), args), form)
        return True

    def _joined(self, op: Operator, whole: tuple[int, ...]) -> Form | None:
        """How the output can be kept: every dim as fine as that of any operand, those in ``whole`` as they are."""
        form = []
        for d, n in enumerate(op.shape):
            found: list[tuple[int, ...]] = [(n,)] if n > 1 else []
            for name in op.operands:
                shape = self.old.ops[name].shape
                own = d - len(op.shape) + len(shape)
                if own >= 0 and shape[own] == n and d not in whole:
                    found.append(self.form[name][own])
                elif d not in whole and own >= 0 and shape[own] != 1:
                    return None
            finer = (n,) if d in whole else refinement(*found)
            if finer is None:
                return None
            form.append(finer)
        return tuple(form)

    def _aligned(self, op: Operator, form: Form, whole: int | None = None) -> dict[str, Ref]:
        """The operands, kept as an output of this form needs them to be broadcast."""
        refs = {}
        for name in op.operands:
            shape = self.old.ops[name].shape
            skipped = len(op.shape) - len(shape)
            sizes: list[int] = []
            for own, n in enumerate(shape):
                group = form[own + skipped]
                if own + skipped == whole:
                    sizes.append(n)
                else:
                    sizes += group if n == op.shape[own + skipped] else [1] * len(group)
            refs[name] = Ref(self._shown(name, tuple(sizes)))
        return refs

    def _sum(self, op: Operator) -> bool:
        (name,) = op.operands
        form = tuple(refinement(group) or () for group in self.form[name])
        given = op.args[1] or range(len(form))
        dims, keep = {d % len(form) for d in given}, bool(op.args[2]) if len(op.args) > 2 else False
        starts = list(accumulate(map(len, form), initial=0))
        stored = [starts[d] + i for d in sorted(dims) for i in range(len(form[d]))]
        if not stored:
            return False
        x = Ref(self._shown(name, sum(form, ())))
        new = [(1,) * len(group) if d in dims else group for d, group in enumerate(form) if keep or d not in dims]
        self._keep(_with(op, {name: x}, (x, stored, *op.args[2:])), tuple(new))
        return True

    def _expand(self, op: Operator) -> bool:
        (name,) = op.operands
        shape, skipped = self.old.ops[name].shape, len(op.shape) - len(self.old.ops[name].shape)
        form: list[tuple[int, ...]] = [(n,) for n in op.shape[:skipped]]
        sizes: list[int] = []
        for n, m, group in zip(shape, op.shape[skipped:], self.form[name], strict=True):
            sizes += group if n == m else [1]
            form.append(group if n == m else (m,))
        x = Ref(self._shown(name, tuple(sizes)))
        self._keep(_with(op, {name: x}, (x, list(sum(form, ())))), tuple(form))
        return True


def _with(op: Operator, new: dict[str, Ref], args: tuple | None = None) -> Operator:
    """An operator on other tensors; arguments that are tensors already are left."""

    def put(value):
        if isinstance(value, Ref):
            return new.get(value.name, value)
        if isinstance(value, (tuple, list)):
            return type(value)(put(v) for v in value)
        return value

    given = op.args if args is None else args
    return replace(op, args=put(given), kwargs={key: put(value) for key, value in op.kwargs.items()})
