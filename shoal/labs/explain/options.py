"""Options that several explanations have."""

from __future__ import annotations

from pathlib import Path

from pydantic import PositiveInt

from shoal.base.section import Section


class FigureOptions(Section):
    """An explanation that can be drawn."""

    out: Path | None = None
    """Also write a figure of it (.svg)."""


class ModelOptions(FigureOptions):
    """An explanation with a model."""

    model: str = "llama-3-8b"
    """A model of the catalog."""


class BatchOptions(ModelOptions):
    """An explanation of one micro-batch."""

    tp: PositiveInt = 1
    """Tensor-parallel ranks."""

    micro_batch: PositiveInt = 1
    """Sequences of a micro-batch."""

    sequence_length: PositiveInt | None = None
    """Tokens of a sequence (default: the longest that the model was trained for)."""
