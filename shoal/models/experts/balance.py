"""What routers have counted in a step, and the biases that it moves."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shoal.models.experts.router import SUMS, Router


def routers_of(model: nn.Module) -> Iterator[Router]:
    """The routers of a model or a part of one, by layer."""
    return (module for module in model.modules() if isinstance(module, Router))


def begin(router: Router) -> None:
    """Have a router count from 0."""
    router.tally = torch.zeros(SUMS + router.experts.count, dtype=torch.float64, device=router.weight.device)


@torch.no_grad()
def rebalance(router: Router, loads: Tensor) -> None:
    """After a step, favour the experts that got fewer tokens than the mean (Wang et al. 2024, algorithm 1).

    Args:
        loads: [E], tokens that each got, of the whole batch.
    """
    if router.bias is not None:
        router.bias += router.experts.bias_update * torch.sign(loads.mean() - loads).to(router.bias)
