"""The router of a layer with experts: scores in float32 at least, a gate, and the losses that keep it in balance."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engine.models.experts import gates
from shoal.engine.models.experts.gates import Choice
from shoal.engine.models.initial import key_of, normal, uniform
from shoal.spec.catalog import ModelShape

SUMS = 3
"""Numbers of a `Router.tally` before the experts' own: dropped, balance loss, z loss."""


class RoutingContext(NamedTuple):
    """What routers need to know of a forward pass.

    Attributes:
        sequences: of the whole batch, over which the routers' losses are a mean.
        seed: of the draws.
        samples: [b] int64, which samples of the data the sequences are; None draws nothing.
    """

    sequences: float = 1
    seed: int = 0
    samples: Tensor | None = None


class Tallied(Protocol):
    """What decides where tokens go, and has counted it."""

    tally: Tensor | None


class TokenPlaces:
    """Which tokens of the sequences this process has: all of them, unless it is one of several (`gather`: the full
    scores that all decide by).

    Attributes:
        share: of the losses' tally, where several ranks compute the same sequences.
    """

    share = 1.0

    def take(self, x: Tensor) -> Tensor:
        """Of the activations, [b, s, h], those of the tokens that are routed here."""
        return x

    def join(self, y: Tensor) -> Tensor:
        """Back to all tokens of the activations."""
        return y

    def gather(self, scores: Tensor) -> Tensor:
        """Scores of all tokens of each sequence, in their order, from those of the tokens that are routed here."""
        return scores

    def own(self, made: Tensor) -> Tensor:
        """Back to the tokens that are routed here: [b, s, ..]."""
        return made


class Router(nn.Module):
    """Scores every token against every expert, and lets the gate choose.

    The losses do not become part of the output: backward adds their gradient to that of the scores, as if their mean
    over the sequences of the batch had been added to the loss that it starts from. So no stage of a pipeline has to
    hand them on, and the loss that is reported is that of the tokens.

    Attributes:
        bias: [E], added to the scores in choosing; changed by `shoal.engine.models.experts.balance`, not by gradients.
        tally: [`SUMS` + E] float64, what backward has counted: choices dropped, the two losses, and the tokens that
            each expert got; None where nobody asks.
        validated: the same of forward passes without a backward, which recomputation has too; None but in validation.
        places: the tokens that are routed here.
    """

    bias: Tensor | None

    def __init__(self, shape: ModelShape, layer: int):
        super().__init__()
        assert shape.experts is not None
        self.experts, self.layer = shape.experts, layer
        count = shape.experts.count
        self.weight = nn.Parameter(torch.empty(count, shape.hidden))
        noisy = shape.experts.gate == "noisy-top-k"
        self.noise = nn.Parameter(torch.empty(count, shape.hidden)) if noisy else None
        self.register_buffer("bias", torch.zeros(count) if shape.experts.bias_update else None)
        self.tally: Tensor | None = None
        self.validated: Tensor | None = None
        self.places = TokenPlaces()

    def forward(self, x: Tensor, context: RoutingContext) -> tuple[Tensor, Tensor]:
        """Choose.

        Args:
            x: [b, s, h].

        Returns:
            As of `Choice`: weights and chosen, [b, s, E] each.
        """
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        weight = self.weight if self.noise is None else torch.cat((self.weight, self.noise))
        logits = self.places.gather(F.linear(x.to(exact), weight.to(exact)))
        choice, logits = self._choose(logits, context)
        z = torch.logsumexp(logits, -1).square().mean(1)  # [b]
        chosen, dropped = self.places.own(choice.chosen), self.places.own(choice.dropped)
        balance, z = choice.balance.sum(), z.sum()
        loss = (self.experts.balance_loss * balance + self.experts.z_loss * z) / context.sequences
        counted = None
        if torch.is_grad_enabled():
            counted = self._counted(chosen, dropped, balance, z)
        elif self.validated is not None:
            self.validated += self._counted(chosen, dropped, balance, z)
        return self.places.own(WithLoss.apply(choice.weights, loss, counted, self)), chosen

    def _choose(self, logits: Tensor, context: RoutingContext) -> tuple[Choice, Tensor]:
        experts, kind = self.experts, self.experts.gate
        if kind == "noisy-top-k":
            logits, noise = logits.chunk(2, -1)
            draws = self._draw(normal, logits, context)
            return gates.noisy_top_k(logits, F.softplus(noise), experts, draws), logits
        if kind == "gshard":
            return gates.gshard(logits, experts, self._draw(uniform, logits[..., 0], context)), logits
        if kind == "top-k":
            return gates.top_k(logits, experts, self.bias), logits
        gate = gates.switch if kind == "switch" else gates.expert_choice
        return gate(logits, experts), logits

    def _draw(self, kind: Callable, like: Tensor, context: RoutingContext) -> Tensor | None:
        """A number for each element of [b, s, ...], which depends on (seed, layer, sample, place in it) alone."""
        if context.samples is None:
            return None
        each = like[0].numel()
        inside = torch.arange(each, device=like.device).view(like.shape[1:])
        index = context.samples.view(-1, *(1 for _ in like.shape[1:])) * each + inside
        return kind(key_of(context.seed, f"layers.{self.layer}.gate"), index)

    def _counted(self, chosen: Tensor, dropped: Tensor, balance: Tensor, z: Tensor) -> Tensor:
        sums = torch.stack((dropped.sum().double(), balance.detach().double() * self.places.share,
                            z.detach().double() * self.places.share))
        return torch.cat((sums, chosen.sum((0, 1)).double()))


class WithLoss(torch.autograd.Function):
    """The weights as they are; backward gives the loss a gradient of 1, and adds what was counted to the tally of what
    routes. A forward that is computed again, by recomputation, is so counted once."""

    @staticmethod
    def forward(ctx, weights: Tensor, loss: Tensor, counted: Tensor | None, router: Tallied) -> Tensor:
        ctx.counted, ctx.router = counted, router
        ctx.save_for_backward(torch.ones_like(loss))
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        if ctx.router.tally is not None:
            ctx.router.tally += ctx.counted
        return gradient, *ctx.saved_tensors, None, None
