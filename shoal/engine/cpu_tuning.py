"""What a process is set to before it computes on the CPU: the allocator, and who multiplies."""

from __future__ import annotations

from shoal.engine.cpu_allocator import tune_allocator
from shoal.engine.models.products import tune_products


def tune_process(*, products: bool = True) -> None:
    """Set both (or the allocator alone) for what is allocated and multiplied from now on, each where it helps."""
    tune_allocator()
    if products:
        tune_products()
