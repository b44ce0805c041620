"""Model and hardware FLOPs, and the resulting time and cost of a training run.

A matrix product [m, k] x [k, n] is 2 m k n FLOPs; a backward is two forwards. *Model* FLOPs are the FLOPs of the
mathematical operations without recomputation (`ModelShape.flops_per_token`, the basis of every MFU in shoal).
*Hardware* FLOPs include recomputation.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.base.units import DAY, HOUR
from shoal.spec.catalog import ModelShape
from shoal.spec.layout import Recompute


class LayerFlops(NamedTuple):
    """FLOPs of one token's forward through one layer; the mean over all tokens if only some pass through it."""

    projections: int  # attention's q, k, v and output products
    core: int  # q k^T and the product with v, counted in full (not halved for causality), or with the window
    mlp: int  # the feed-forward block, or the experts of a token and the routers

    @property
    def forward(self) -> int:
        return self.projections + self.core + self.mlp


def layer_flops(shape: ModelShape, sequence_length: int, layer: int = 0) -> LayerFlops:
    """Return the FLOPs of one layer by part."""
    s, n, projections = sequence_length, shape.taken(layer, sequence_length), 2 * shape.attention_matrices()
    core = 2 * shape.heads * (shape.query_dim + shape.value_dim) * min(n, shape.reach(layer) or n)
    found = LayerFlops(projections, core, 2 * shape.layer_matrices(layer) - projections)
    if not shape.skips(layer):
        return found
    mlp = n * found.mlp // s + 2 * shape.router(layer)
    return LayerFlops(n * found.projections // s, n * found.core // s, mlp)


def hardware_flops(shape: ModelShape, sequence_length: int, recompute: Recompute, tokens: float = 1) -> float:
    """Return model FLOPs plus recomputation: of the attention core of each layer, or of all of each layer.

    For GPT with full recomputation this is 96 B s l h^2 (1 + s/6h + v/16lh) (Narayanan et al. 2021, equation 3), which
    also recomputes the layers alone.
    """
    again = 0
    for layer in range(shape.layers):
        once = layer_flops(shape, sequence_length, layer)
        again += {"none": 0, "selective": once.core, "full": once.forward}[recompute]
    return tokens * shape.flops_per_token(sequence_length) + tokens * again


# ---- full training runs --------------------------------------------------------------------------------------------


def petaflop_days(flops: float) -> float:
    """Convert FLOPs to petaFLOP/s-days: 8.64e19 FLOPs each (Amodei & Hernandez 2018).

    >>> round(petaflop_days(3.14e23))
    3634
    """
    return flops / (1e15 * DAY)


def dollars(seconds: float, devices: int, per_hour: float) -> float:
    """Return the rent of some devices."""
    return seconds / HOUR * devices * per_hour
