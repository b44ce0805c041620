"""Layers that only some tokens of a sequence pass through (Raposo et al. 2024, "Mixture-of-Depths").

A router scores every token of the residual stream, and the k highest of a sequence pass through the layer: attention,
among each other alone, and the feed-forward block. With the score r of a token and f what the layer adds (equation 1)

    x <- x + r f(x)   of the k highest,        x <- x   of the others

So k is known before anything is computed, and the router learns by r. But whether a token is among the k highest
depends on those after it, so that no text could be written by this rule. A small network learns to foresee it from
the token alone, behind a stop of the gradient (section 3.5): where a sequence comes in slices, a token passes if it
says so.

Shapes: b sequences, s tokens, k of them chosen, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engine.models.attention import Mask, causal_mask, rotary_table
from shoal.engine.models.cache import Slice
from shoal.engine.models.context import Context
from shoal.engine.models.experts.gates import ALIKE
from shoal.engine.models.experts.router import TokenPlaces, WithLoss
from shoal.spec.catalog import ModelShape

COUNTS = 3
"""Numbers of a `MixtureOfDepths.tally` before the predictor's loss: tokens that it was right of, those of them that
were chosen, and those that it expected to be."""


class ResidualLayer(Protocol):
    """A layer that adds something to the residual stream."""

    @property
    def attention(self) -> nn.Module:
        """By which slices keep what they have seen."""

    def residual_update(self, x: Tensor, context: Context) -> Tensor:
        """What the layer adds: [b, s, h] -> [b, s, h]."""


def highest(scores: Tensor, k: int) -> Tensor:
    """The places of each sequence's k highest scores, in their order: [b, s] -> [b, k] int64.

    Scores that agree to `ALIKE` count as equal, and of equal ones the earlier is taken: two tokens that have seen the
    same differ by rounding alone, which no two layouts have alike.
    """
    order = (scores / ALIKE).round().argsort(dim=1, descending=True, stable=True)
    return order[:, :k].sort(dim=1).values


class TokenRoute(NamedTuple):
    """The way of the chosen tokens of some sequences to where they are computed, and back.

    Attributes:
        chosen: [m], which of the b s tokens that are here are.
        there: from these, [m, h], to those that are computed here, [b, k, h].
        back: the other way.
    """

    chosen: Tensor
    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


class ChosenPlaces(TokenPlaces):
    """Which tokens, and which of the chosen ones, this process has: all of them, unless it is one of several."""

    def attending(self, taken: Tensor) -> Tensor:
        """Which of the chosen tokens attention is given here, in its order."""
        return taken

    def route(self, taken: Tensor, s: int) -> TokenRoute:
        """The way of the chosen tokens.

        Args:
            taken: [b, k], their places.
            s: tokens of each sequence that are here.
        """
        b, k = taken.shape
        chosen = (taken + s * torch.arange(b, device=taken.device).unsqueeze(1)).flatten()
        return TokenRoute(chosen, lambda rows: rows.view(b, k, -1), lambda rows: rows.flatten(0, 1))


class MixtureOfDepths(nn.Module):
    """Decides which tokens pass through a layer, and adds what it makes of them to the residual stream.

    Attributes:
        router: [h], scores a token.
        predictor_up, predictor_down: [p, h] and [p], foresee whether it is chosen.
        mask: of the chosen tokens, as those of a shorter sequence.
        places: which of them are here.
        highest: the function of this name, which may be replaced where scores have no numbers.
        tally: [`COUNTS` + 1] float64, what backward has counted, and the predictor's loss; None where nobody asks.
        counts: whether its tally counts: of several ranks that have the same tokens one does.
    """

    def __init__(self, shape: ModelShape, layer: int):
        super().__init__()
        assert shape.depths is not None
        self.depths, self.layer = shape.depths, layer
        self.rotary = (shape.head_dim, shape.rope_theta) if shape.family == "llama" else None
        self.router = nn.Parameter(torch.empty(shape.hidden))
        self.predictor_up = nn.Parameter(torch.empty(shape.depths.predictor, shape.hidden))
        self.predictor_down = nn.Parameter(torch.empty(shape.depths.predictor))
        self.mask, self.places = Mask(), ChosenPlaces()
        self.highest = highest
        self.tally: Tensor | None = None
        self.counts = True

    def forward(self, x: Tensor, context: Context, block: ResidualLayer) -> Tensor:
        """The residual stream behind the layer.

        Args:
            x: [b, s, h].
            block: the layer, whose ``residual_update`` is f.
        """
        rows = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        scores = rows @ self.router.to(rows)  # [b, s]
        foreseen = F.gelu(F.linear(rows.detach(), self.predictor_up.to(rows))) @ self.predictor_down.to(rows)
        if context.part is not None:
            return self._foreseen(x, scores, foreseen, context, context.part, block)
        whole = self.places.gather(scores.detach())
        taken = self.highest(whole, self.depths.taken(whole.shape[1]))  # [b, k]
        weights = self._learning(self._weights(scores), foreseen, taken, whole, context)
        route = self.places.route(taken, x.shape[1])
        y = block.residual_update(
            route.there(x.flatten(0, 1).index_select(0, route.chosen)), self._among(taken, x, context)
        )
        return _added(x, route.back(y), weights, route.chosen)

    def _foreseen(
        self, x: Tensor, scores: Tensor, foreseen: Tensor, context: Context, part: Slice, block: ResidualLayer
    ) -> Tensor:
        """A slice of one sequence, each token decided by itself."""
        if len(x) != 1 or context.documents is not None:
            raise ValueError("in slices not as many tokens of each sequence pass: one sequence and document only")
        index = (foreseen[0] > 0).nonzero().squeeze(1)  # [n]
        if not len(index):
            return x
        n, before = len(index), part.kept(block.attention)
        mask = causal_mask(n, before + n, x.device)[None, None] if before else None
        rotary = self._rotary((part.start + index).unsqueeze(0), x.dtype)
        y = block.residual_update(x[:, index], context._replace(rotary=rotary, mask=mask))
        return _added(x, y.flatten(0, 1), self._weights(scores), index)

    def _weights(self, scores: Tensor) -> Tensor:
        return scores.sigmoid() if self.depths.weight == "sigmoid" else scores

    def _learning(self, weights: Tensor, foreseen: Tensor, taken: Tensor, whole: Tensor, context: Context) -> Tensor:
        """The weights, whose backward also begins that of the predictor's loss (binary cross-entropy, a mean over the
        tokens of all sequences) and counts how often it was right."""
        chosen = torch.zeros_like(whole, dtype=torch.bool).scatter_(1, taken, True)
        chosen = self.places.own(chosen)  # [b, s]
        losses = F.binary_cross_entropy_with_logits(foreseen, chosen.to(foreseen), reduction="sum") / whole.shape[1]
        counted = None
        if torch.is_grad_enabled():
            expected = foreseen.detach() > 0
            counts = [(expected == chosen).sum(), (expected & chosen).sum(), expected.sum(), losses.detach()]
            counted = torch.stack([count.double() for count in counts]) * self.counts
        return WithLoss.apply(weights, losses / context.routing.sequences, counted, self)

    def _among(self, taken: Tensor, x: Tensor, context: Context) -> Context:
        """What the chosen tokens share: their own places in the sequence, and none but each other to attend to."""
        here = self.places.attending(taken)
        documents = None if context.documents is None else context.documents.gather(1, taken)
        mask = self.mask(0, here.shape[1], documents, x.device)
        return context._replace(rotary=self._rotary(here, x.dtype), mask=mask, documents=documents)

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """cos and sin of [b, n] positions, each [b, 1, n, d/2]."""
        if self.rotary is None:
            return None
        cos, sin = rotary_table(positions.flatten(), *self.rotary, dtype)
        return cos.view(*positions.shape, -1).unsqueeze(1), sin.view(*positions.shape, -1).unsqueeze(1)


def _added(x: Tensor, y: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """x with weight x row added to some of its tokens: [b, s, h] and [m, h], of the tokens ``index``, [m]."""
    weight = weights.flatten().index_select(0, index).to(y.dtype).unsqueeze(-1)
    return x.flatten(0, 1).index_add(0, index, weight * y).view_as(x)


def depths_of(model: nn.Module) -> Iterator[MixtureOfDepths]:
    """Those of a model or a part of one, by layer."""
    return (module for module in model.modules() if isinstance(module, MixtureOfDepths))


def begin(depths: MixtureOfDepths) -> None:
    """Have one count from 0."""
    depths.tally = torch.zeros(COUNTS + 1, dtype=torch.float64, device=depths.router.device)
