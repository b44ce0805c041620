"""Quantisation of a matrix with scales from its own values."""

from torch import Tensor

from shoal.engine.precision.float8 import Codes, Grain, compute_scale, encode, largest
from shoal.spec.number_formats import Format


def quantise(x: Tensor, kind: Format, grain: Grain) -> Codes:
    return encode(x, compute_scale(largest(x, grain), kind, grain), kind, grain)
