"""Quantisation of a matrix with scales from its own values."""

from torch import Tensor

from shoal.engine.precision.float8 import Codes, Grain, encode, largest, scale_of
from shoal.spec.number_formats import Format


def quantise(x: Tensor, kind: Format, grain: Grain) -> Codes:
    return encode(x, scale_of(largest(x, grain), kind, grain), kind, grain)
