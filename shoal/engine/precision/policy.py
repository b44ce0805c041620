"""Torch dtypes of each precision: of master weights, computation, gradients and optimizer states."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.spec.number_formats import FORMATS, Formats


@dataclass(frozen=True)
class Policy:
    """The dtypes of one precision.

    Attributes:
        storage: weights that the optimizer updates.
        compute: weights and activations in forward and backward.
        reduce: gradients, summed over micro-batches and ranks.
        state: the optimizer's moments.
    """

    formats: Formats
    storage: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    state: torch.dtype

    @staticmethod
    def from_formats(formats: Formats) -> Policy:
        held = (formats.storage, formats.compute, formats.reduce, formats.state)
        return Policy(formats, *(getattr(torch, each.name) for each in held))


POLICIES = {name: Policy.from_formats(formats) for name, formats in FORMATS.items()}
