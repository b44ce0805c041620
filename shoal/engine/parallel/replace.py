"""How a parallelism changes what a plain module computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Have one module, and not its class, compute by another function."""
    module.forward = forward
