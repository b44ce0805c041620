"""Dropout between split layers that is the same on every layout: a rank draws for all, and takes its part.

Two runs on the meta device, of the full module and of one rank's part, show by their shapes which calls of dropout see
a part, and of which dim. The attention of `F.scaled_dot_product_attention` draws inside, for a rank's heads alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.engine.own.definition import OwnModel, drawing
from shoal.engine.own.samples import OwnBatch
from shoal.engine.own.tensor.layers import SplitRanks
from shoal.engine.own.tensor.table import apply_table
from shoal.engine.sharding.loss import LossPlan
from shoal.spec.layout import Layout

Part = tuple[int, int]
"""Dim that ranks split, and the number of its parts; 1 if they do not."""

Draw = Callable[[int, Tensor, float], Tensor]
"""Replacement of dropout in a module, from (number of the call in its forward, input, probability)."""


def split_draws(module: nn.Module, ranks: SplitRanks, parts: Mapping[str, Sequence[Part]]) -> None:
    """Make a split module draw dropout as one device does, in place.

    Args:
        parts: see `find_parts`.
    """
    for name, each in parts.items():
        _replace_dropout(module.get_submodule(name), partial(_draw_part, ranks, each))


def find_parts(own: OwnModel, layout: Layout, batch: OwnBatch) -> dict[str, list[Part]]:
    """Return what ranks see in each call of dropout, by the module whose forward has it.

    Empty if all see all, or if the module cannot run on the meta device.
    """
    if isinstance(own.tensor_parallel, LossPlan):
        return {}
    module, ranks = own.build_empty().train(), SplitRanks.alone(layout)
    if ranks is None or not all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return {}
    values = batch.map(lambda tensor: tensor.to("meta")).values
    runs: list[dict[str, list[tuple[int, ...]]]] = []
    try:
        for _ in range(2):
            with drawing(0), torch.device("meta"), _recorded(module) as shapes:
                own.compute(module, values)
            runs.append(shapes)
            if len(runs) == 1:
                apply_table(module, own.tensor_parallel, ranks, experts=own.expert_parallel)
    except Exception:  # many operators need values
        return {}
    full, mine = runs
    found = {name: [_compare(*pair) for pair in zip(full[name], mine.get(name, []), strict=False)] for name in full}
    return found if any(parts > 1 for each in found.values() for _, parts in each) else {}


def _compare(full: tuple[int, ...], mine: tuple[int, ...]) -> Part:
    split = [dim for dim, (n, part) in enumerate(zip(full, mine, strict=False)) if n != part]
    if len(full) != len(mine) or len(split) != 1 or full[split[0]] % mine[split[0]]:
        return 0, 1
    return split[0], full[split[0]] // mine[split[0]]


@contextmanager
def _recorded(module: nn.Module) -> Iterator[dict[str, list[tuple[int, ...]]]]:
    """Note the shapes that the calls of dropout in each module's forward see, in the context."""
    shapes: dict[str, list[tuple[int, ...]]] = {}

    def note(name: str, call: int, x: Tensor, p: float) -> Tensor:
        del shapes.setdefault(name, [])[call:]  # of an earlier forward of the module
        shapes[name].append(tuple(x.shape))
        return x

    # Leaves without parameters, such as nn.Dropout, may be called in several places: their calls are the caller's.
    callers = {name: each for name, each in module.named_modules()
               if each is module or [*each.children(), *each.parameters()]}
    changed = [(each, each.__dict__.get("forward")) for each in callers.values()]
    for name, each in callers.items():
        _replace_dropout(each, partial(note, name))
    try:
        yield shapes
    finally:
        for each, forward in changed:
            del each.forward
            if forward is not None:
                each.forward = forward


def _replace_dropout(module: nn.Module, draw: Draw) -> None:
    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _ReplaceDropout(draw):
            return forward(*args, **kwargs)

    module.forward = partial(run, module.forward)


class _ReplaceDropout(TorchFunctionMode):
    """Replaces dropout in a module's forward, but for that in modules with a mode of their own."""

    def __init__(self, draw: Draw):
        self.draw, self.calls = draw, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is F.dropout:
            x, p, training, inplace = _read(*args, **given)
            if training and p:
                self.calls += 1
                y = self.draw(self.calls - 1, x, p)
                return x.copy_(y) if inplace else y
        return func(*args, **given)


def _read(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple:
    return input, p, training, inplace


def _draw_part(ranks: SplitRanks, parts: Sequence[Part], call: int, x: Tensor, p: float) -> Tensor:
    """Return what one device would make of this rank's part of a tensor."""
    dim, number = parts[call] if call < len(parts) else (0, 1)
    shape = list(x.shape)
    shape[dim] *= number
    order = sorted(range(x.dim()), key=lambda each: -x.stride()[each])  # in which the mask of such a tensor is drawn
    drawn = torch.dropout(x.new_ones(prod(shape)), p, True).bool().view([shape[each] for each in order])
    kept = drawn.permute([order.index(each) for each in range(x.dim())])
    mine = kept.narrow(dim, ranks.rank * number // ranks.size * x.shape[dim], x.shape[dim]).clone()  # frees the rest
    return x * mine * (1 / (1 - p) if p < 1 else 0.0)
