"""The number formats of each precision as torch's dtypes: of weights kept and computed with, gradients and states."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.precision.formats import FORMATS


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
    name: Policy(*(getattr(torch, held.name) for held in vars(formats).values())) for name, formats in FORMATS.items()
}
