"""Catalog of facts: model shapes, accelerators, links and clusters, each with its source, read from TOML."""

from shoal.spec.catalog.accelerators import Accelerator, accelerator, accelerators, match
from shoal.spec.catalog.clusters import link
from shoal.spec.catalog.experts import Depths, Experts
from shoal.spec.catalog.models import Latent, ModelShape, RopeScaling, model_names, model_shape

__all__ = [
    "Accelerator", "Depths", "Experts", "Latent", "ModelShape", "RopeScaling", "accelerator", "accelerators",
    "link", "match", "model_names", "model_shape",
]  # fmt: skip
