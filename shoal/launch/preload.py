"""Imports, on its own import, what every rank needs: for processes that fork ranks.

Importing torch costs a rank seconds of a core, and so do the 800 modules that torch imports itself when a model is
first built. Nothing is computed here, no thread is started and no device touched: what a fork cannot take along is not
there yet.
"""

from __future__ import annotations

import gc

import torch

import shoal.engine.collectives.ops  # noqa: F401 -- for the forks
from shoal.engine.models.transformer import Transformer
from shoal.spec.catalog import model_shape

with torch.device("meta"):  # shapes alone
    Transformer(model_shape("tiny"))
gc.collect()
gc.freeze()  # a collection in one rank would otherwise copy the pages that all share
