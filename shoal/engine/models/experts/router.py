"""Router of a mixture-of-experts layer: scores in at least float32, a gate, and auxiliary losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engine.models.experts import gates
from shoal.engine.models.experts.gates import Choice
from shoal.engine.models.initial import normal, stream_key, uniform
from shoal.spec.catalog import ModelShape

SUMS = 3
"""Leading entries of a `Router.tally`, before one per expert: dropped choices, balance loss, z loss."""


class RoutingContext(NamedTuple):
    """Routing inputs of a forward pass.

    Attributes:
        sequences: number of sequences in the global batch, over which the routers' losses are averaged.
        samples: [b] int64 sample index of each sequence in the data; None disables random draws.
    """

    sequences: float = 1
    seed: int = 0
    samples: Tensor | None = None


class Tallied(nn.Module):
    """A module that counts its routing decisions."""

    tally: Tensor | None = None  # float64 counts made in backward; None if not recorded

    def reset_tally(self) -> None:
        self.tally = self._zeros()

    def _zeros(self) -> Tensor:
        raise NotImplementedError


M = TypeVar("M", bound=nn.Module)


def find_modules(model: nn.Module, kind: type[M]) -> list[M]:
    """Return the modules of a class in a model or in a part of it, in layer order."""
    return [module for module in model.modules() if isinstance(module, kind)]


class TokenPlaces:
    """Tokens of the sequences that this process routes: all of them by default.

    Subclasses split sequences over ranks; `gather` then returns the full scores, from which every rank decides.

    Attributes:
        share: factor of this rank's losses in the tally if several ranks compute the same sequences.
    """

    share = 1.0

    def take(self, x: Tensor) -> Tensor:
        """Return the activations of the tokens routed by this process, out of [b, s, h]."""
        return x

    def join(self, y: Tensor) -> Tensor:
        """Restore the activations of all tokens from the results of this process."""
        return y

    def gather(self, scores: Tensor) -> Tensor:
        """Return the scores of all tokens of each sequence, in order, from the scores of this process."""
        return scores

    def own(self, made: Tensor) -> Tensor:
        """Return the entries of this process's tokens: [b, s, ..]."""
        return made

    def full_length(self, s: int) -> int:
        """Return the tokens of a sequence of which this process routes ``s``."""
        return s


class Router(Tallied):
    """Router that scores every token against every expert and applies the gate.

    The auxiliary losses are not part of the output: backward adds their gradients to the gradient of the scores, as if
    their mean over the sequences of the batch had been added to the training loss. Pipeline stages therefore need not
    pass them on, and the reported loss is the token loss.

    Attributes:
        bias: [E] added to the scores for the selection only; updated by `rebalance`, not by gradients.
        tally: [`SUMS` + E] float64 counts made in backward: dropped choices, the two losses, tokens per expert; None if
            not recorded.
        validated: the same for forward passes without gradients; None except in validation, because recomputation
            also runs such passes.
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
        self.logit_bias = nn.Parameter(torch.empty(count)) if shape.experts.biases else None
        self.register_buffer("bias", torch.zeros(count) if shape.experts.bias_update else None)
        self.validated: Tensor | None = None
        self.places = TokenPlaces()

    def forward(self, x: Tensor, context: RoutingContext) -> tuple[Tensor, Tensor]:
        """Choose the experts of each token: [b, s, h] -> ``weights`` and ``chosen`` of `Choice`, [b, s, E] each."""
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        weight = self.weight if self.noise is None else torch.cat((self.weight, self.noise))
        bias = None if self.logit_bias is None else self.logit_bias.to(exact)
        logits = self.places.gather(F.linear(x.to(exact), weight.to(exact), bias))
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

    def most_choices(self, x: Tensor) -> tuple[int, int]:
        """Return the largest number of choices of tokens [b, s, h], in total and per token."""
        b, s, _ = x.shape
        return gates.most_choices(self.experts, b, s, self.places.full_length(s))

    def begin_validation(self) -> None:
        """Start to count forward passes without a backward."""
        self.validated = self._zeros()

    @torch.no_grad()
    def rebalance(self, loads: Tensor, skip: Tensor | None = None) -> None:
        """Raise the bias of experts with fewer tokens than the mean (Wang et al. 2024, algorithm 1); call once a step.

        Args:
            loads: tokens per expert in the global batch, [E].
            skip: leave the bias unchanged if this is 1.
        """
        if self.bias is not None:
            change = self.experts.bias_update * torch.sign(loads.mean() - loads).to(self.bias)
            self.bias += change if skip is None else change * (1 - skip)

    def _zeros(self) -> Tensor:
        return torch.zeros(SUMS + self.experts.count, dtype=torch.float64, device=self.weight.device)

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
        """Draw a number for each element of [b, s, ...], a function of (seed, layer, sample, position) only."""
        if context.samples is None:
            return None
        each = like[0].numel()
        inside = torch.arange(each, device=like.device).view(like.shape[1:])
        index = context.samples.view(-1, *(1 for _ in like.shape[1:])) * each + inside
        return kind(stream_key(context.seed, f"layers.{self.layer}.gate"), index)

    def _counted(self, chosen: Tensor, dropped: Tensor, balance: Tensor, z: Tensor) -> Tensor:
        sums = torch.stack((dropped.sum().double(), balance.detach().double() * self.places.share,
                            z.detach().double() * self.places.share))
        return torch.cat((sums, chosen.sum((0, 1)).double()))


class WithLoss(torch.autograd.Function):
    """Identity of the weights whose backward gives the loss a gradient of 1 and adds the counts to the tally.

    Counting in backward counts a recomputed forward once.
    """

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
