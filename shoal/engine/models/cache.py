"""What attention keeps of the tokens it has seen, so that a sequence can be computed a slice at a time.

Generation is the well-known use: each new token is a slice of one. Training pipelines slices of a sequence over the
stages of a model (Li et al. 2021, "TeraPipe"): there gradients flow back through what is kept, from later slices to
earlier ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Slice:
    """One slice of some sequences: the keys and values that it finds, and those that it leaves to the next.

    What a slice finds are leaves of autograd, so that its backward ends there, whatever the slices before it still
    have to do. Backward takes the slices from the last to the first, each from its own output and from what it left::

        torch.autograd.backward([loss, *last.left()], [None, *last.gradients()])
        torch.autograd.backward([loss, *first.left()], [None, *first.gradients()])

    Args:
        before: the slice before, computed by the same modules; None for the first.

    Attributes:
        start, stop: its tokens, counted in the whole sequence (``stop`` once a model is given them).
        found: by attention module, keys and values of the tokens before, [b, k, start, d] each; of fewer tokens where
            not all pass through its layer.
    """

    def __init__(self, before: Slice | None = None):
        self.start: int = before.stop if before else 0
        self.stop: int = self.start
        self.found: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._left: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._next: Slice | None = None
        if before:
            before._next = self
            for attention, (k, v) in (before.found | before._left).items():  # a layer may have had nothing to compute
                self.found[attention] = _leaf(k), _leaf(v)

    def extend(self, attention: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of all tokens up to the slice's end that passed here, [b, k, start + s, d] each.

        Args:
            attention: who asks.
            k, v: of the slice's own tokens, [b, k, s, d] each.
        """
        if attention in self.found:
            past_k, past_v = self.found[attention]
            k, v = torch.cat((past_k, k), dim=2), torch.cat((past_v, v), dim=2)
        # A layer that is computed again, in backward, leaves nothing anew.
        self._left.setdefault(attention, (k, v))
        return k, v

    def kept(self, attention: nn.Module) -> int:
        """Of how many tokens before this slice it has keys and values."""
        return self.found[attention][0].shape[2] if attention in self.found else 0

    def left(self) -> list[Tensor]:
        """What later slices found of this one, where backward starts besides the output; none for the last slice."""
        return [x for pair in self._left.values() for x in pair] if self._next else []

    def gradients(self) -> list[Tensor | None]:
        """The gradients of `left`, once the next slice's backward is done; None for what it has none of."""
        return [x.grad for pair in self._next.found.values() for x in pair] if self._next else []


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)
