"""Facts as data: model shapes and accelerators, each with its source, read from TOML."""

from shoal.catalog.accelerators import Accelerator, accelerator, accelerator_names, match
from shoal.catalog.depths import Depths
from shoal.catalog.experts import Experts
from shoal.catalog.links import link
from shoal.catalog.models import ModelShape, Published, model_names, model_shape, published

__all__ = [
    "Accelerator",
    "Depths",
    "Experts",
    "ModelShape",
    "Published",
    "accelerator",
    "accelerator_names",
    "link",
    "match",
    "model_names",
    "model_shape",
    "published",
]
