"""The parts that only some models have, where it is known that a model has them."""

from __future__ import annotations

from shoal.spec.catalog import ModelShape
from shoal.spec.catalog.experts import Experts
from shoal.spec.catalog.mixture_of_depths import Depths


def experts_of(shape: ModelShape) -> Experts:
    """The experts of a model of which some layer is sparse.

    Raises:
        ValueError: it has none.
    """
    if shape.experts is None:
        raise ValueError("the model has no experts")
    return shape.experts


def depths_of(shape: ModelShape) -> Depths:
    """What lets only some tokens pass through the layers that skip the others.

    Raises:
        ValueError: all tokens pass through all layers.
    """
    if shape.depths is None:
        raise ValueError("all tokens pass through all layers of the model")
    return shape.depths
