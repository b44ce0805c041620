"""FLOPs of the operators of a model of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils.flop_counter import FlopCounterMode


def _count_attention(q: torch.Size, k: torch.Size, v: torch.Size, *_: object, **__: object) -> int:
    """Count two products, of shapes [b, a, s, d]; keys and values may have fewer heads."""
    return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])


def _count_backward(_: object, q: torch.Size, k: torch.Size, v: torch.Size, *__: object, **___: object) -> int:
    """Count five products: one of the forward again, and the gradients of weights, queries, keys and values."""
    return 2 * q[0] * q[1] * q[2] * k[2] * (3 * q[3] + 2 * v[3])


ON_THE_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _count_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _count_backward,
}
"""FLOPs of operators that torch counts on accelerators alone. Functions of torch 2.11 refuse fewer key heads."""


@contextmanager
def count_flops() -> Iterator[FlopCounterMode]:
    """Count the FLOPs of matrix products in the context."""
    before = torch.backends.mkldnn.set_flags(_enabled=False)  # recurrent layers as one operator are not counted
    try:
        with FlopCounterMode(display=False, custom_mapping=ON_THE_CPU) as counter:
            yield counter
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before[0])
