"""FLOPs of the operators of a model of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

ON_THE_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(g, q, k, v),
}  # fmt: skip
"""FLOPs of operators that torch counts on accelerators alone, from shapes."""


@contextmanager
def count_flops() -> Iterator[FlopCounterMode]:
    """Count the FLOPs of matrix products in the context."""
    before = torch.backends.mkldnn.set_flags(_enabled=False)  # recurrent layers as one operator are not counted
    try:
        with FlopCounterMode(display=False, custom_mapping=ON_THE_CPU) as counter:
            yield counter
    finally:
        torch.backends.mkldnn.set_flags(_enabled=before[0])
