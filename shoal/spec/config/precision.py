"""The number formats of a run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from shoal.base.section import Section

Precision = Literal[  # as `shoal.spec.number_formats` has them
    "fp32", "bf16", "bf16-sums", "bf16-moments", "bf16-weights", "bf16-all", "fp16", "fp16-unscaled", "fp8", "mxfp8",
    "fp64", "fp64-fp16", "fp64-fp8", "fp64-mxfp8",
]


LARGEST_SCALE = 2.0**100  # of a loss: where nothing ever overflows


class LossScaleConfig(Section):
    """The dynamic loss scale of fp16 (Micikevicius et al. 2018, section 3.2)."""

    initial: float = Field(default=2.0**16, gt=0, le=LARGEST_SCALE)
    """Its first value."""

    growth: float = Field(default=2.0, ge=1)
    """What it is multiplied by after `interval` steps without an overflow."""

    backoff: float = Field(default=0.5, gt=0, lt=1)
    """What it is multiplied by after a step with one, which is skipped."""

    interval: PositiveInt = 2000
    """Steps in a row."""

    smallest: float = Field(default=1.0, gt=0, le=LARGEST_SCALE)
    """Below this it does not go: a gradient that overflows even so ends the run."""


class Float8Config(Section):
    """How fp8 makes 8 bits of the inputs, weights and output gradients of the layers' products. The embedding and the
    head are never in 8 bits."""

    scales: Literal["tensor", "row", "block"] = "tensor"
    """What shares a scale: a whole tensor (of one micro-batch), a row of it, or a block of a row."""

    block: PositiveInt = 128
    """block: its elements; of weights block x block share one (DeepSeek-AI 2024, "DeepSeek-V3", section 3.3)."""

    amax: Literal["current", "delayed"] = "current"
    """Scales come from the numbers themselves, or from the largest of earlier steps (tensor)."""

    history: PositiveInt = 16
    """delayed: the earlier steps."""

    margin: int = Field(default=0, ge=0, le=32)
    """delayed: octaves that are left free above the largest, for numbers that grow."""

    gradient: Literal["e5m2", "e4m3"] = "e5m2"
    """The format of output gradients; inputs and weights are in e4m3. mxfp8 has this setting too, and no other."""

    keep: tuple[str, ...] = ()
    """Patterns of linear layers that stay in the compute format, as in ["layers.0.*", "*.mlp.down"]."""
