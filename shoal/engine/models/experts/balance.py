"""What routers have counted in a step, and the biases that it moves."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shoal.engine.models.experts.router import SUMS, Router


def routers_of(model: nn.Module) -> Iterator[Router]:
    """The routers of a model or a part of one, by layer."""
    return (module for module in model.modules() if isinstance(module, Router))


def begin(router: Router) -> None:
    """Have a router count from 0."""
    router.tally = _zeros(router)


def begin_validation(router: Router) -> None:
    """Have a router count from 0 what passes forward alone."""
    router.validated = _zeros(router)


def _zeros(router: Router) -> Tensor:
    return torch.zeros(SUMS + router.experts.count, dtype=torch.float64, device=router.weight.device)


def drop_nothing(model: nn.Module) -> None:
    """Have every expert take all tokens that it is chosen for.

    A capacity is a part of a whole sequence, which a text that is being written is not yet; inference goes without
    (as Gale et al. 2023 do in training too).
    """
    for router in routers_of(model):
        router.experts = router.experts.model_copy(update={"capacity_factor": 0.0})


@torch.no_grad()
def rebalance(router: Router, loads: Tensor) -> None:
    """After a step, favour the experts that got fewer tokens than the mean (Wang et al. 2024, algorithm 1).

    Args:
        loads: [E], tokens that each got, of the whole batch.
    """
    if router.bias is not None:
        router.bias += router.experts.bias_update * torch.sign(loads.mean() - loads).to(router.bias)
