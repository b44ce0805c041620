"""Unfold dims that were folded into one, so that each can be split by itself.

ATen multiplies matrices of two dims, or batches of them of three: [b, s, h] becomes [b s, h], heads [b, a, s, d] become
[b a, s, d]. Of a folded dim only the outermost part can be split in blocks; heads inside a batch could not be. Here
each tensor keeps the dims that it was folded from, products run over all of them (as `torch.einsum` does), and views
that only fold or unfold such dims are removed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import mul
from string import ascii_letters

from torch.utils._pytree import tree_map_only

from shoal.engine.sharding.graph import RESHAPES, Operator, OperatorGraph, Ref, assign_phases
from shoal.planning.auto.intra.spaces import ALONG, find_dim, is_pointwise

Form = tuple[tuple[int, ...], ...]
"""The sizes into which each dim of a tensor is unfolded; none for a dim of 1."""


def unfold(graph: OperatorGraph) -> OperatorGraph:
    """Rewrite operators for unfolded tensors; inputs, parameters, outputs and gradients keep their shapes."""
    return _Unfolding(graph).graph()


def regroup(sizes: tuple[int, ...], shape: tuple[int, ...]) -> Form | None:
    """Group sizes so that the products are a shape; None if that is impossible.

    >>> regroup((2, 3, 5), (6, 1, 5))
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


def refine(*splits: tuple[int, ...]) -> tuple[int, ...] | None:
    """Find the coarsest common refinement of some splits of one dim, without ones; None if none exists.

    >>> refine((4, 6), (8, 3)), refine((2, 3), (3, 2))
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
        self.name: dict[str, str] = {}  # from an operator's name to that of its unfolded tensor
        self.form: dict[str, Form] = {}

    def graph(self) -> OperatorGraph:
        for op in self.old.ops.values():
            if op.kind != "call":
                self._keep(op, tuple((n,) for n in op.shape))
            elif not self._rewrite(op):
                new = {name: Ref(self._plain(name)) for name in op.operands}
                self._keep(_with(op, new), tuple((n,) for n in op.shape))
        outputs = tuple(self._plain(name) for name in self.old.outputs)
        gradients = {name: self._plain(gradient) for name, gradient in self.old.gradients.items()}
        return assign_phases(self.ops, outputs, gradients)

    def _rewrite(self, op: Operator) -> bool:
        """Rewrite an operator for unfolded operands; False if it needs them as they were."""
        if not op.operands:
            return False
        rules = {"permute": self._permute, "mm": self._product, "bmm": self._product, "expand": self._expand,
                 "sum.dim_IntList": self._sum, "_to_copy": self._pointwise,
                 **dict.fromkeys(RESHAPES, self._reshape), **dict.fromkeys(ALONG, self._along)}  # fmt: skip
        if rule := rules.get(op.target, rules.get(op.op)):
            return rule(op)
        return is_pointwise(op) and self._pointwise(op)

    # ---- unfolded tensors --------------------------------------------------------------------------------------------

    def _keep(self, op: Operator, form: Form) -> None:
        self.ops[op.name] = replace(op, shape=sum(form, ()))
        self.name[op.name], self.form[op.name] = op.name, form

    def _stored(self, name: str) -> tuple[int, ...]:
        return self.ops[self.name[name]].shape

    def _shown(self, name: str, sizes: tuple[int, ...]) -> str:
        """Return the name of an unfolded tensor's view in some sizes."""
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
        """Return the name of a tensor in its original shape."""
        return self._shown(name, self.old.ops[name].shape)

    # ---- operators ---------------------------------------------------------------------------------------------------

    def _reshape(self, op: Operator) -> bool:
        (name,), stored = op.operands, self._stored(op.operands[0])
        form = regroup(stored, op.shape)
        if form is None:
            finer = refine(stored, op.shape)
            if finer is None:
                return False
            form = regroup(finer, op.shape)
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
        found = [refine(p, q) for p, q in zip(a[:-2], b[:-2], strict=True)]
        batch = [sizes for sizes in found if sizes is not None]
        between = refine(a[-1], b[-2])
        if between is None or len(batch) < len(found):
            return False
        rows, columns = refine(a[-2]) or (), refine(b[-1]) or ()
        letters = iter(ascii_letters)
        e, i, j, k = ("".join(next(letters) for _ in group)
                      for group in (sum(batch, ()), rows, between, columns))  # fmt: skip
        x = Ref(self._shown(left, (*sum(batch, ()), *rows, *between)))
        y = Ref(self._shown(right, (*sum(batch, ()), *between, *columns)))
        self._keep(replace(op, target="product.einsum", args=(x, y, f"{e}{i}{j},{e}{j}{k}->{e}{i}{k}")),
                   (*batch, rows, columns))  # fmt: skip
        return True

    def _pointwise(self, op: Operator) -> bool:
        form = self._join_forms(op, ())
        if form is None:
            return False
        self._keep(_with(op, self._align(op, form)), form)
        return True

    def _along(self, op: Operator) -> bool:
        at, d = ALONG[op.op], find_dim(op)
        form = self._join_forms(op, (d,))
        if form is None:
            return False
        args = (*op.args[:at], sum(map(len, form[:d])), *op.args[at + 1 :])
        self._keep(_with(op, self._align(op, form, d), args), form)
        return True

    def _join_forms(self, op: Operator, plain: tuple[int, ...]) -> Form | None:
        """Find the output's form: each dim as fine as that of any operand, those in ``plain`` not unfolded."""
        form = []
        for d, n in enumerate(op.shape):
            found: list[tuple[int, ...]] = [(n,)] if n > 1 else []
            for name in op.operands:
                shape = self.old.ops[name].shape
                own = d - len(op.shape) + len(shape)
                if own >= 0 and shape[own] == n and d not in plain:
                    found.append(self.form[name][own])
                elif d not in plain and own >= 0 and shape[own] != 1:
                    return None
            finer = (n,) if d in plain else refine(*found)
            if finer is None:
                return None
            form.append(finer)
        return tuple(form)

    def _align(self, op: Operator, form: Form, plain: int | None = None) -> dict[str, Ref]:
        """View the operands so that they broadcast to an output of a form."""
        refs = {}
        for name in op.operands:
            shape = self.old.ops[name].shape
            skipped = len(op.shape) - len(shape)
            sizes: list[int] = []
            for own, n in enumerate(shape):
                group = form[own + skipped]
                if own + skipped == plain:
                    sizes.append(n)
                else:
                    sizes += group if n == op.shape[own + skipped] else [1] * len(group)
            refs[name] = Ref(self._shown(name, tuple(sizes)))
        return refs

    def _sum(self, op: Operator) -> bool:
        (name,) = op.operands
        form = tuple(refine(group) or () for group in self.form[name])
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
    """Replace an operator's tensors; arguments that are new already stay."""
    given = (op.args if args is None else args, op.kwargs)
    args, kwargs = tree_map_only(Ref, lambda ref: new.get(ref.name, ref), given)
    return replace(op, args=args, kwargs=kwargs)
