"""Token counts and bias updates of routers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shoal.engine.models.experts.router import SUMS, Router


def routers_of(model: nn.Module) -> Iterator[Router]:
    """Yield the routers of a model or of a part of it, in layer order."""
    return (module for module in model.modules() if isinstance(module, Router))


def begin(router: Router) -> None:
    """Reset a router's training counts to 0."""
    router.tally = _zeros(router)


def begin_validation(router: Router) -> None:
    """Reset a router's validation counts to 0; they count forward passes without a backward."""
    router.validated = _zeros(router)


def _zeros(router: Router) -> Tensor:
    return torch.zeros(SUMS + router.experts.count, dtype=torch.float64, device=router.weight.device)


def drop_nothing(model: nn.Module) -> None:
    """Remove the capacity limit of all experts, for inference.

    Capacity is a fraction of a full sequence, and a sequence being generated is not complete. Gale et al. 2023 drop no
    tokens in training either.
    """
    for router in routers_of(model):
        router.experts = router.experts.model_copy(update={"capacity_factor": 0.0})


@torch.no_grad()
def rebalance(router: Router, loads: Tensor) -> None:
    """Raise the bias of experts with fewer tokens than the mean (Wang et al. 2024, algorithm 1); call once a step.

    Args:
        loads: [E] tokens per expert in the global batch.
    """
    if router.bias is not None:
        router.bias += router.experts.bias_update * torch.sign(loads.mean() - loads).to(router.bias)
