"""Key/value cache that lets a model compute a sequence one slice at a time.

In generation each new token is a slice. Training can pipeline slices of a sequence over the stages of a model
(Li et al. 2021, "TeraPipe"): gradients then flow through the cache from later slices to earlier ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Slice:
    """Cached keys and values of one slice of some sequences.

    Keys and values from earlier slices are autograd leaves, so the backward of a slice ends there. Run backward from
    the last slice to the first, each from its own output and from the keys and values it passed on::

        torch.autograd.backward([loss, *last.roots()], [None, *last.root_gradients()])
        torch.autograd.backward([loss, *first.roots()], [None, *first.root_gradients()])

    Args:
        before: the previous slice, computed by the same modules; None for the first.

    Attributes:
        start, stop: token range in the full sequence (``stop`` is set by the model's forward).
        past: keys and values of earlier tokens by attention module, [b, k, start, d] each; fewer tokens in layers
            that some tokens skip.
    """

    def __init__(self, before: Slice | None = None):
        self.start: int = before.stop if before else 0
        self.stop: int = self.start
        self.past: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._present: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._next: Slice | None = None
        if before:
            before._next = self
            for attention, (k, v) in (before.past | before._present).items():  # a layer may compute nothing
                self.past[attention] = _leaf(k), _leaf(v)

    def extend(self, attention: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the slice's keys and values, [b, k, s, d], to the cached ones; return both, [b, k, start + s, d]."""
        if attention in self.past:
            past_k, past_v = self.past[attention]
            k, v = torch.cat((past_k, k), dim=2), torch.cat((past_v, v), dim=2)
        # Recomputation in backward must not replace the stored tensors.
        self._present.setdefault(attention, (k, v))
        return k, v

    def roots(self) -> list[Tensor]:
        """Return the tensors passed to the next slice, which are extra roots of backward; empty for the last slice."""
        return [x for pair in self._present.values() for x in pair] if self._next else []

    def root_gradients(self) -> list[Tensor | None]:
        """Return the gradients of `roots` after the next slice's backward; None where a tensor has none."""
        return [x.grad for pair in self._next.past.values() for x in pair] if self._next else []


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)
