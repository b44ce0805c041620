"""Ask one device for a sum: ``SHOAL_PROBE=cuda:1 python -m shoal.launch.checks.device_probe`` ends with 0 if it is
right."""

from __future__ import annotations

import os
import sys

import torch


def answers(device: str) -> bool:
    """Whether a device computes; what is wrong with it is raised."""
    kind, _, index = device.partition(":")
    place = torch.device(kind, int(index)) if kind == "cuda" else torch.device(kind)
    return float((torch.ones(1024, device=place) * 3).sum()) == 3072.0


if __name__ == "__main__":
    sys.exit(0 if answers(os.environ["SHOAL_PROBE"]) else 1)
