"""Several linear layers applied to one input."""

from __future__ import annotations

from torch import Tensor, nn


def project(x: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """Apply several linear layers to one input: [.., in] -> [.., out] of each.

    Replacements of torch's layers may combine the products (`shoal.engine.parallel.linear`).
    """
    together = getattr(linears[0], "together", None)
    return tuple(linear(x) for linear in linears) if together is None else together(x, linears)
