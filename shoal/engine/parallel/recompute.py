"""Activation recomputation: parts of a layer whose activations are computed again in backward instead of kept.

- full: a whole layer; only its input is kept (Chen et al. 2016).
- selective: the core of attention, whose scores take the most memory for the fewest FLOPs (Korthikanti et al. 2022,
  section 5).
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.engine.models.transformer import Transformer
from shoal.engine.parallel.replace import replace_forward
from shoal.spec.layout import Recompute


def apply_recompute(model: Transformer, mode: Recompute) -> None:
    """Wrap the forward of each layer, or of each attention core, in place."""
    for layer in model.layers.values():
        targets: dict[Recompute, nn.Module | None] = {
            "none": None, "selective": layer.attention.core, "full": layer
        }
        if (target := targets[mode]) is not None:
            # There is no dropout, so no generator state to restore.
            again = partial(checkpoint, target.forward, use_reentrant=False, preserve_rng_state=False)
            replace_forward(target, again)
