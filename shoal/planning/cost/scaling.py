"""Scaling laws: predicted loss from parameters and data, and the compute-optimal split of a budget.

Kaplan et al. 2020 ("Scaling Laws for Neural Language Models"): N without embeddings, loss in nats per token. Hoffmann
et al. 2022 ("Training Compute-Optimal Large Language Models"): N with all parameters. Besiroglu et al. 2024
("Chinchilla Scaling: A replication attempt"): a new fit to the same runs. Their losses are on different data and
tokenizers, and cannot be compared with each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.planning.cost.flops import petaflop_days

# Kaplan et al. 2020, equation 1.5, with the constants of table 2 for N and D together.
_ALPHA_N, _ALPHA_D, _N_C, _D_C = 0.076, 0.103, 6.4e13, 1.8e13
# Section 6.1: with optimally spent compute, N = 1.3e9 PF-days^0.73; equation 1.3: L = (3.1e8 / PF-days)^0.050.
_N_E, _P_N, _C_C, _ALPHA_C = 1.3e9, 0.73, 3.1e8, 0.050


@dataclass(frozen=True)
class Allocation:
    """Optimal use of a compute budget.

    Attributes:
        parameters: N.
        tokens: T.
        loss: predicted loss [nats per token].
    """

    parameters: float
    tokens: float
    loss: float


def kaplan_loss(parameters: float, tokens: float = float("inf")) -> float:
    """Return L(N, D) = ((N_c/N)^(a_N/a_D) + D_c/D)^a_D (Kaplan et al. 2020, equation 1.5).

    Applies to early-stopped training on repeated data.

    Args:
        parameters: non-embedding parameters.
    """
    return ((_N_C / parameters) ** (_ALPHA_N / _ALPHA_D) + _D_C / tokens) ** _ALPHA_D


def kaplan_optimum(flops: float) -> Allocation:
    """Return the optimal size for a budget: N scales as the budget^0.73, and data use the rest (section 6.1).

    The loss scales as the budget^-0.050 (equation 1.3), in one pass over the data. The budget is their C_min, the
    compute with batches far below the critical size; with batches of that size the compute and tokens double (equation
    5.5).
    """
    parameters = _N_E * petaflop_days(flops) ** _P_N
    return Allocation(parameters, flops / (6 * parameters), (_C_C / petaflop_days(flops)) ** _ALPHA_C)


@dataclass(frozen=True)
class Parametric:
    """L(N, D) = E + A/N^alpha + B/D^beta (Hoffmann et al. 2022, equation 10).

    E is the irreducible loss; the other terms are the costs of finite model size and finite data.
    """

    e: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the predicted loss [nats per token]."""
        return self.e + self.a / parameters**self.alpha + self.b / tokens**self.beta

    def optimum(self, flops: float) -> Allocation:
        """Return the optimum for C = 6 N T: N = G (C/6)^a, T = (C/6)^b / G (Hoffmann et al. 2022, equation 4)."""
        both = self.alpha + self.beta
        g = (self.alpha * self.a / (self.beta * self.b)) ** (1 / both)
        parameters, tokens = g * (flops / 6) ** (self.beta / both), (flops / 6) ** (self.alpha / both) / g
        return Allocation(parameters, tokens, self.loss(parameters, tokens))


CHINCHILLA = Parametric(1.6934, 406.4, 410.7, 0.3392, 0.2849)
"""Approach 3 of Hoffmann et al., with the digits of the paper's source (Besiroglu et al. 2024, table 1).

The printed exponents, 0.34 and 0.28, give a different optimum. For Gopher's budget the optimum is 40 B parameters;
approaches 1 and 2, and so the rule of 20 tokens per parameter, give 70 B.

>>> round(CHINCHILLA.loss(70e9, 1.4e12), 2), round(CHINCHILLA.loss(280e9, 300e9), 2)  # Chinchilla, Gopher
(1.92, 1.97)
"""
REFITTED = Parametric(1.8172, 482.01, 2085.43, 0.3478, 0.3658)
"""The same law refitted to the points of the paper's figure 4 (Besiroglu et al. 2024, table 1): about 20 tokens per
parameter, as in approaches 1 and 2."""


def twenty_tokens(flops: float) -> Allocation:
    """Allocate by the rule of 20 tokens per parameter (Hoffmann et al. 2022, table 3): C = 120 N^2.

    >>> f"{twenty_tokens(5.88e23).parameters:.3g}"
    '7e+10'
    """
    parameters = (flops / 120) ** 0.5
    return Allocation(parameters, 20 * parameters, CHINCHILLA.loss(parameters, 20 * parameters))
