"""Facts as data: model shapes and accelerators, each with its source, read from TOML."""

from shoal.catalog.accelerators import Accelerator, accelerator
from shoal.catalog.models import ModelShape, model_names, model_shape

__all__ = ["Accelerator", "ModelShape", "accelerator", "model_names", "model_shape"]
