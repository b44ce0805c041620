"""Configuration of number formats."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from shoal.base.section import Section

Precision = Literal[  # the keys of `shoal.spec.number_formats.FORMATS`
    "fp32", "bf16", "bf16-sums", "bf16-moments", "bf16-weights", "bf16-all", "fp16", "fp16-unscaled", "fp8", "mxfp8",
    "fp64", "fp64-fp16", "fp64-fp8", "fp64-mxfp8",
]


LARGEST_SCALE = 2.0**100  # scale of a loss that never overflows


class LossScaleConfig(Section):
    """The dynamic loss scale of fp16 (Micikevicius et al. 2018, section 3.2)."""

    initial: float = Field(default=2.0**16, gt=0, le=LARGEST_SCALE)
    """Initial scale."""

    growth: float = Field(default=2.0, ge=1)
    """Factor on the scale after `interval` consecutive steps without an overflow."""

    backoff: float = Field(default=0.5, gt=0, lt=1)
    """Factor on the scale after a step with an overflow, which is skipped."""

    interval: PositiveInt = 2000
    """Consecutive steps without an overflow before the scale grows."""

    smallest: float = Field(default=1.0, gt=0, le=LARGEST_SCALE)
    """Minimum scale. A gradient that overflows at this scale ends the run."""


class Float8Config(Section):
    """Quantisation of the inputs, weights and output gradients of linear layers by fp8. The embedding and the head are
    never quantised."""

    scales: Literal["tensor", "row", "block"] = "tensor"
    """Elements that share a scale: a full tensor (of one micro-batch), a row of it, or a block of a row."""

    block: PositiveInt = 128
    """block: elements per block; weights use block x block tiles (DeepSeek-AI 2024, "DeepSeek-V3", section 3.3)."""

    amax: Literal["current", "delayed"] = "current"
    """Source of the scales: the current values, or the largest values of earlier steps (tensor)."""

    history: PositiveInt = 16
    """delayed: number of earlier steps."""

    margin: int = Field(default=0, ge=0, le=32)
    """delayed: octaves of headroom above the largest value, for values that grow."""

    gradient: Literal["e5m2", "e4m3"] = "e5m2"
    """The format of output gradients; inputs and weights use e4m3. mxfp8 only reads this setting and keep."""

    keep: tuple[str, ...] = ()
    """Patterns of linear layers that stay in the compute format, such as ["layers.0.*", "*.mlp.down"]."""
