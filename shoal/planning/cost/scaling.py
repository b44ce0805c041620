"""Scaling laws: the loss that parameters and data buy, and the best split of a budget between them.

Kaplan et al. 2020 ("Scaling Laws for Neural Language Models"): N without embeddings, loss in nats per token.
Hoffmann et al. 2022 ("Training Compute-Optimal Large Language Models"): N with all parameters; and what Besiroglu et
al. 2024 ("Chinchilla Scaling: A replication attempt") make of the same runs.
Their losses are of different data and tokenizers, and cannot be compared with each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.planning.cost.flops import petaflop_days

# Kaplan et al. 2020, equation 1.5, with the constants of table 2 for N and D together.
_ALPHA_N, _ALPHA_D, _N_C, _D_C = 0.076, 0.103, 6.4e13, 1.8e13
# Section 6.1: with the compute spent best, N = 1.3e9 PF-days^0.73; equation 1.3: L = (3.1e8 / PF-days)^0.050.
_N_E, _P_N, _C_C, _ALPHA_C = 1.3e9, 0.73, 3.1e8, 0.050


@dataclass(frozen=True)
class Allocation:
    """How to spend a budget.

    Attributes:
        parameters: N.
        tokens: T.
        loss: what the law expects [nats per token].
    """

    parameters: float
    tokens: float
    loss: float


def kaplan_loss(parameters: float, tokens: float = float("inf")) -> float:
    """L(N, D) = ((N_c/N)^(a_N/a_D) + D_c/D)^a_D (Kaplan et al. 2020, equation 1.5), where training stops early, with
    data that are seen again.

    Args:
        parameters: embeddings not counted.
    """
    return ((_N_C / parameters) ** (_ALPHA_N / _ALPHA_D) + _D_C / tokens) ** _ALPHA_D


def kaplan_optimum(flops: float) -> Allocation:
    """The best size for a budget: N grows with the budget to the 0.73, and the data with what is left (section 6.1);
    the loss to the -0.050 (equation 1.3), in one pass over the data.

    The budget is their C_min, what it takes with batches far below the critical size; with batches of that size it is
    twice as much, of tokens as well (equation 5.5).
    """
    parameters = _N_E * petaflop_days(flops) ** _P_N
    return Allocation(parameters, flops / (6 * parameters), (_C_C / petaflop_days(flops)) ** _ALPHA_C)


@dataclass(frozen=True)
class Parametric:
    """L(N, D) = E + A/N^alpha + B/D^beta (Hoffmann et al. 2022, equation 10): what no model learns, and what too small
    a model and too few data cost.
    """

    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """What the law expects [nats per token]."""
        return self.e + self.a / parameters**self.alpha + self.b / tokens**self.beta

    def optimum(self, flops: float) -> Allocation:
        """The best size for a budget C = 6 N T: N = G (C/6)^a, T = (C/6)^b / G (Hoffmann et al. 2022, equation 4)."""
        both = self.alpha + self.beta
        g = (self.alpha * self.a / (self.beta * self.b)) ** (1 / both)
        parameters, tokens = g * (flops / 6) ** (self.beta / both), (flops / 6) ** (self.alpha / both) / g
        return Allocation(parameters, tokens, self.loss(parameters, tokens))


CHINCHILLA = Parametric(1.6934, 406.4, 410.7, 0.3392, 0.2849)
"""Their approach 3, with the digits that the paper's source has (Besiroglu et al. 2024, table 1); with those that are
printed, 0.34 and 0.28, the optimum is another. For Gopher's budget it is 40 B parameters, where approaches 1 and 2, and
so the rule of 20 tokens each, have 70 B.

>>> round(CHINCHILLA.loss(70e9, 1.4e12), 2), round(CHINCHILLA.loss(280e9, 300e9), 2)  # Chinchilla, Gopher
(1.92, 1.97)
"""
REFITTED = Parametric(1.8172, 482.01, 2085.43, 0.3478, 0.3658)
"""The same law fitted again to the points of the paper's figure 4 (Besiroglu et al. 2024, table 1): some 20 tokens for
each parameter, as by approaches 1 and 2."""


def twenty_tokens(flops: float) -> Allocation:
    """The rule of thumb of 20 tokens per parameter (Hoffmann et al. 2022, table 3): C = 120 N^2.

    >>> f"{twenty_tokens(5.88e23).parameters:.3g}"
    '7e+10'
    """
    parameters = (flops / 120) ** 0.5
    return Allocation(parameters, 20 * parameters, CHINCHILLA.loss(parameters, 20 * parameters))
