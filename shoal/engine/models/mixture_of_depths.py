"""Mixture-of-Depths: layers that process only some tokens of a sequence (Raposo et al. 2024).

A router scores every token of the residual stream. The k highest of a sequence pass through the layer: attention among
each other, and the feed-forward block. With score r and residual update f (equation 1):

    x <- x + r f(x)   for the k highest,        x <- x   for the others

So k is known in advance, and the router learns through r. But the k highest depend on later tokens, which rules out
generation. A small network therefore learns to predict from the token alone whether it is chosen, with the gradient
stopped before it (section 3.5). If a sequence comes in slices, this prediction decides.

Shapes: b sequences, s tokens, k of them chosen, h hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engine.models.attention import Context, Mask, rotary_table
from shoal.engine.models.cache import Slice
from shoal.engine.models.experts.gates import sort_tokens
from shoal.engine.models.experts.router import Tallied, TokenPlaces, WithLoss
from shoal.engine.streams import to_device
from shoal.spec.catalog import ModelShape

COUNTS = 3
"""Leading entries of a `MixtureOfDepths.tally`, before the predictor's loss: tokens predicted correctly, chosen tokens
among them, and tokens predicted as chosen.
"""


Update = Callable[[Tensor, Context], Tensor]
"""A layer's update of the residual stream: [b, s, h] -> [b, s, h]."""


def choose_highest(scores: Tensor, k: int) -> Tensor:
    """Return the positions of each sequence's k highest scores, in ascending order: [b, s] -> [b, k] int64."""
    return sort_tokens(scores)[:, :k].sort(dim=1).values


class TokenRoute(NamedTuple):
    """Route of the chosen tokens to the ranks that compute them, and back.

    Attributes:
        chosen: [m] indices of the chosen tokens among the b s local tokens.
        dispatch: sends the local chosen tokens, [m, h], and returns the tokens to compute here, [b, k, h].
        combine: the inverse of ``dispatch``.
    """

    chosen: Tensor
    dispatch: Callable[[Tensor], Tensor]
    combine: Callable[[Tensor], Tensor]


class ChosenPlaces(TokenPlaces):
    """Tokens and chosen tokens of this process: all of them by default."""

    def attending(self, taken: Tensor) -> Tensor:
        """Return the chosen tokens that attention sees on this rank, in its order."""
        return taken

    def route(self, taken: Tensor, s: int) -> TokenRoute:
        """Return the route of the tokens at positions [b, k], given the number of local tokens per sequence."""
        b, k = taken.shape
        chosen = (taken + s * torch.arange(b, device=taken.device).unsqueeze(1)).flatten()
        return TokenRoute(chosen, lambda rows: rows.view(b, k, -1), lambda rows: rows.flatten(0, 1))


class MixtureOfDepths(Tallied):
    """Choose the tokens that pass through a layer, and add the layer's update to the residual stream.

    Attributes:
        router: [h] weights of the token score.
        predictor_up, predictor_down: [p, h] and [p] weights of the network that predicts whether a token is chosen.
        mask: attention mask of the chosen tokens, as a shorter sequence.
        choose: `choose_highest`, replaceable where scores have no values.
        tally: [`COUNTS` + 1] float64 counts made in backward, and the predictor's loss; None if not recorded.
        counts: whether to record the tally; only one of several ranks with the same tokens does.
    """

    def __init__(self, shape: ModelShape, layer: int):
        super().__init__()
        assert shape.depths is not None
        self.depths, self.layer = shape.depths, layer
        self.shape = shape
        self.router = nn.Parameter(torch.empty(shape.hidden))
        self.predictor_up = nn.Parameter(torch.empty(shape.depths.predictor, shape.hidden))
        self.predictor_down = nn.Parameter(torch.empty(shape.depths.predictor))
        self.mask, self.places = Mask(), ChosenPlaces()
        self.choose = choose_highest
        self.counts = True

    def forward(self, x: Tensor, context: Context, update: Update) -> Tensor:
        """Return the residual stream [b, s, h] after a layer whose ``update`` is f."""
        rows = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        scores = rows @ self.router.to(rows)  # [b, s]
        predicted = F.gelu(F.linear(rows.detach(), self.predictor_up.to(rows))) @ self.predictor_down.to(rows)
        if context.part is not None:
            return self._forward_slice(x, scores, predicted, context, context.part, update)
        full = self.places.gather(scores.detach())
        taken = self.choose(full, self.depths.taken(full.shape[1]))  # [b, k]
        weights = self._train_predictor(self._weights(scores), predicted, taken, full, context)
        route = self.places.route(taken, x.shape[1])
        y = update(
            route.dispatch(x.flatten(0, 1).index_select(0, route.chosen)), self._restrict_context(taken, x, context)
        )
        return _add_weighted(x, route.combine(y), weights, route.chosen)

    def _forward_slice(
        self, x: Tensor, scores: Tensor, predicted: Tensor, context: Context, part: Slice, update: Update
    ) -> Tensor:
        """Process a slice of one sequence, with the predictor's decision for each token."""
        if len(x) != 1 or context.documents is not None:
            raise ValueError("slices need one sequence of one document: others would choose other numbers of tokens")
        index = (predicted[0] > 0).nonzero().squeeze(1)  # [n]
        if not len(index):
            return x
        rotary = self._rotary((part.start + index).unsqueeze(0), x.dtype)
        y = update(x[:, index], context._replace(rotary=rotary, mask=None))
        return _add_weighted(x, y.flatten(0, 1), self._weights(scores), index)

    def _weights(self, scores: Tensor) -> Tensor:
        return scores.sigmoid() if self.depths.weight == "sigmoid" else scores

    def _train_predictor(
        self, weights: Tensor, predicted: Tensor, taken: Tensor, full: Tensor, context: Context
    ) -> Tensor:
        """Return the weights, with a backward that also starts the predictor's loss and counts its correct predictions.

        The loss is binary cross-entropy, averaged over the tokens of all sequences.
        """
        chosen = torch.zeros_like(full, dtype=torch.bool).scatter_(1, taken, True)
        chosen = self.places.own(chosen)  # [b, s]
        losses = F.binary_cross_entropy_with_logits(predicted, chosen.to(predicted), reduction="sum") / full.shape[1]
        counted = None
        if torch.is_grad_enabled():
            expected = predicted.detach() > 0
            counts = [(expected == chosen).sum(), (expected & chosen).sum(), expected.sum(), losses.detach()]
            counted = torch.stack([count.double() for count in counts]) * self.counts
        return WithLoss.apply(weights, losses / context.routing.sequences, counted, self)

    def _restrict_context(self, taken: Tensor, x: Tensor, context: Context) -> Context:
        """Return the context of the chosen tokens: their original positions, and attention among each other only."""
        attending = self.places.attending(taken)
        documents = None if context.documents is None else to_device(context.documents, x.device).gather(1, taken)
        mask = self.mask(0, attending.shape[1], documents, x)
        return context._replace(rotary=self._rotary(attending, x.dtype), mask=mask, documents=documents)

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin of [b, n] positions, each [b, 1, n, d/2]."""
        shape = self.shape
        if shape.family != "llama":
            return None
        cos, sin = rotary_table(positions.flatten(), shape.rotary_dim, shape.rope_theta, dtype, shape.rope_scaling)
        return cos.view(*positions.shape, -1).unsqueeze(1), sin.view(*positions.shape, -1).unsqueeze(1)

    def _zeros(self) -> Tensor:
        return torch.zeros(COUNTS + 1, dtype=torch.float64, device=self.router.device)


def _add_weighted(x: Tensor, y: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """Add weight x row to the tokens ``index`` [m] of x: [b, s, h] and rows [m, h]."""
    weight = weights.flatten().index_select(0, index).to(y.dtype).unsqueeze(-1)
    return x.flatten(0, 1).index_add(0, index, weight * y).view_as(x)
