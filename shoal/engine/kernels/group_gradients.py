"""Accumulation of the weight gradients of a grouped product, whose kernel leaves an empty group undefined."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.library import custom_op

from shoal.engine.kernels import launch
from shoal.engine.kernels.example import Example


@custom_op("shoal::add_group_gradients", mutates_args=("total",))
def add_group_gradients(total: Tensor, products: Tensor, ends: Tensor, fresh: bool) -> None:
    """Add the product of each group with rows to ``total`` in place; ``fresh`` overwrites, with 0 for other groups.

    Args:
        total, products: [E, n, k], of any two formats.
        ends: [E] int32, the end of each group's rows.
    """
    empty = ends.diff(prepend=ends.new_zeros(1)) == 0
    products = products.masked_fill(empty.view(-1, 1, 1), 0)
    (total.copy_ if fresh else total.add_)(products)


add_group_gradients.register_kernel("cuda", launch("group_gradients", "add_group_gradients"))


def examples() -> Iterator[Example]:
    """Yield an accumulation into zeros and one into a sum, with an empty group."""
    def add(total: Tensor, products: Tensor, ends: Tensor, fresh: bool) -> Tensor:
        total = total.clone()
        add_group_gradients(total, products, ends, fresh)
        return total

    def reference(total: Tensor, products: Tensor, ends: Tensor, fresh: bool) -> Tensor:
        return torch.stack([
            (0 if fresh else total[e]) + products[e] * (ends[e] > (ends[e - 1] if e else 0)) for e in range(len(ends))
        ])

    for fresh in (True, False):
        inputs = torch.randn(3, 70, 33), torch.randn(3, 70, 33), torch.tensor([4, 4, 9], dtype=torch.int32), fresh
        yield Example(f"gradients of groups, fresh {fresh}", add, reference, inputs, gradients=())
