"""Import everything that a rank needs, for servers that fork ranks.

Torch costs a rank seconds of CPU time, and so do the 800 modules that it imports when a model is first built.
"""

from __future__ import annotations

import torch

import shoal.engine.collectives.ops  # noqa: F401 -- for the forks
from shoal.engine.models.transformer import Transformer
from shoal.spec.catalog import model_shape

with torch.device("meta"):  # only shapes
    Transformer(model_shape("tiny"))
