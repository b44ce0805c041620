"""Fused GPU kernels: each file has one operation, as a plain PyTorch reference and as a custom operator.

On CUDA the operator launches its Triton program (`shoal.engine.kernels.programs`). Operators have fake and autograd
registrations, so that they work under `torch.compile`, on fake tensors and in dry runs. Operators that
every layer calls are made by `shoal.engine.operators`, whose call costs the host less than torch's.

A module's function ``examples()`` yields one `Example` or more of each of its operators. The suite compares them with
the reference in float64 on the CPU, and `shoal bench gpu --part 2` on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def launch(module: str, function: str) -> Callable[..., Any]:
    """Return the function that launches a program; its module needs Triton and is imported at the first call."""
    return lambda *inputs, **options: getattr(import_module(f"{__name__}.programs.{module}"), function)(
        *inputs, **options
    )


def use_fused(x: Tensor) -> bool:
    """Return whether an operation on x takes its fused operator: on CUDA, unless in float64, which programs round.

    A choice between operations of torch that differ only in speed on a device (attention backends, layouts in memory, a
    sort or several maxima) asks `Tensor.is_cuda` instead, in every format. Programs that compute in float64, too, ask
    for either. A dry run replaces this function, to count on the CPU what CUDA would do.
    """
    return x.is_cuda and x.dtype != torch.float64
