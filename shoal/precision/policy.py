"""One table of number formats: for weights kept, weights computed with, gradient sums, and optimizer states."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Policy:
    """The dtypes of one precision.

    Attributes:
        storage: the weights that the optimizer updates.
        compute: weights and activations in forward and backward.
        reduce: gradients, summed over micro-batches and ranks.
        state: the optimizer's moments.
    """

    storage: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    state: torch.dtype


POLICIES = {
    "fp32": Policy(torch.float32, torch.float32, torch.float32, torch.float32),
    # Micikevicius et al. 2018, section 3.1, with bfloat16, which needs no loss scaling (Kalamkar et al. 2019)
    "bf16": Policy(torch.float32, torch.bfloat16, torch.float32, torch.float32),
    "fp64": Policy(torch.float64, torch.float64, torch.float64, torch.float64),
}
