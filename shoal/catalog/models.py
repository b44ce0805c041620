"""Shapes of published models, by name, with the parameter counts that their authors print."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

from shoal.errors import UsageError, did_you_mean


class ModelShape(BaseModel):
    """Everything that decides a decoder-only transformer's tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    family: Literal["llama", "gpt"]
    """llama: RMSNorm, RoPE, SwiGLU, no biases. gpt: LayerNorm, learned positions, GELU, biases (GPT-2 and GPT-3)."""

    layers: PositiveInt
    """L, transformer layers."""

    hidden: PositiveInt
    """h, width of the residual stream."""

    heads: PositiveInt
    """a, query heads."""

    kv_heads: PositiveInt
    """Key and value heads; fewer than heads is grouped-query attention (Ainslie et al. 2023)."""

    head_dim: PositiveInt
    """Width of one head."""

    ffn: PositiveInt
    """Width inside the feed-forward block."""

    vocab: PositiveInt
    """v, token ids."""

    max_sequence: PositiveInt
    """Longest sequence: the number of learned positions (gpt), or what the model was trained for (llama)."""

    tied: bool
    """The output head shares the embedding's weight."""

    norm_eps: float = 1e-5
    """Added to the variance in the norms."""

    rope_theta: float = 10000.0
    """Base of the rotary frequencies (Su et al. 2021); llama only."""

    def parameters(self) -> int:
        """Exact number of trainable parameters, a tied head counted once."""
        h, kv, q = self.hidden, self.kv_heads * self.head_dim, self.heads * self.head_dim
        attention = h * q + 2 * h * kv + q * h
        if self.family == "llama":
            layer = attention + 3 * h * self.ffn + 2 * h
            rest = h
        else:
            layer = attention + (q + 2 * kv + h) + 2 * h * self.ffn + self.ffn + h + 2 * 2 * h
            rest = 2 * h + self.max_sequence * h
        return self.layers * layer + rest + self.vocab * h * (1 if self.tied else 2)

    def flops_per_token(self, sequence_length: int) -> int:
        """Model FLOPs of forward and backward per token: 6 per matrix parameter and 12 L a d s for attention.

        The definition of PaLM (Chowdhery et al. 2022, appendix B), used for every MFU that shoal prints: attention
        counted in full (not halved for causality), recomputation not counted, and neither is the embedding look-up.
        """
        h, kv, q = self.hidden, self.kv_heads * self.head_dim, self.heads * self.head_dim
        mlp = (3 if self.family == "llama" else 2) * h * self.ffn
        matrices = self.layers * (2 * h * q + 2 * h * kv + mlp) + self.vocab * h
        return 6 * matrices + 12 * self.layers * q * sequence_length


@cache
def _catalog() -> dict[str, dict]:
    return tomllib.loads(files("shoal.catalog").joinpath("models.toml").read_text())


def model_names() -> list[str]:
    """All names in the catalog."""
    return list(_catalog())


def model_shape(name: str) -> ModelShape:
    """The shape of a published model.

    Raises:
        UsageError: the name is not in the catalog.
    """
    if name not in _catalog():
        raise UsageError(f"model.name = '{name}' is not in the catalog; {did_you_mean(name, _catalog())}")
    entry = {k: v for k, v in _catalog()[name].items() if k not in ("published_parameters", "source")}
    entry.setdefault("kv_heads", entry["heads"])
    entry.setdefault("head_dim", entry["hidden"] // entry["heads"])
    return ModelShape(**entry)
