"""A device beside the CPU, emulated: layers that take time in which the cores are free.

Where ranks compute on the very cores that move their messages there is hardly a wait to hide communication behind. On
an accelerator the host waits for the device; here it sleeps for as long.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from torch import nn


def compute_elsewhere(layers: Iterable[nn.Module], seconds: float) -> None:
    """Have each layer take so long in forward, and twice that in backward, besides what it takes here."""
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: time.sleep(seconds))
        layer.register_full_backward_pre_hook(lambda *_: time.sleep(2 * seconds))
