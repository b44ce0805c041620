"""The machine on which something was measured, in one line."""

from __future__ import annotations

import os
import platform

import torch

from shoal.engine.device import usable_cores


def machine() -> str:
    """Torch's version, the architecture, the cores and the load."""
    load = f", load average {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"torch {torch.__version__}, {platform.machine()}, {usable_cores()} cores{load}"
