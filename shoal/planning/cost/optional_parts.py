"""Accessors for optional model parts that are known to exist."""

from __future__ import annotations

from shoal.spec.catalog import ModelShape
from shoal.spec.catalog.experts import Experts
from shoal.spec.catalog.mixture_of_depths import Depths


def experts_of(shape: ModelShape) -> Experts:
    """Return the experts of a model with expert layers.

    Raises:
        ValueError: the model has none.
    """
    if shape.experts is None:
        raise ValueError("the model has no experts")
    return shape.experts


def depths_of(shape: ModelShape) -> Depths:
    """Return the mixture-of-depths settings of a model in which layers skip tokens.

    Raises:
        ValueError: all tokens pass through all layers.
    """
    if shape.depths is None:
        raise ValueError("all tokens pass through all layers of the model")
    return shape.depths
