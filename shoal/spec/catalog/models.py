"""Shapes of published models, by name, with the parameter counts that their authors print."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import PositiveInt

from shoal.base.errors import did_you_mean
from shoal.base.section import Section
from shoal.spec.catalog.experts import Experts
from shoal.spec.catalog.mixture_of_depths import Depths
from shoal.spec.catalog.tables import entry, find, table, wrong


class Latent(Section):
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1): keys and values of all heads are made
    from one narrow vector of a token. It is counted, not trained."""

    query_rank: PositiveInt
    """Width that queries are compressed to."""

    key_value_rank: PositiveInt
    """Width that keys and values are compressed to."""

    rotary_dim: PositiveInt
    """Width of a query's and of the one common key's part that carries positions, besides head_dim."""


class ModelShape(Section):
    """Everything that decides a decoder-only transformer's tensors."""

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

    experts: Experts | None = None
    """In place of the feed-forward blocks of some layers; they have no biases, in either family."""

    depths: Depths | None = None
    """Of some layers, which tokens pass through them."""

    latent: Latent | None = None
    """In place of the attention that heads and kv_heads describe."""

    def parameters(self) -> int:
        """Exact number of trainable parameters, a tied head counted once."""
        h, q, kv, f = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim, self.ffn
        gpt = self.family == "gpt"
        layer = self._attention_matrices() + (2 if gpt else 1) * 2 * h  # with the norms
        if self.latent is not None:
            layer += self.latent.query_rank + self.latent.key_value_rank  # theirs
        block = h * f * self._matrices_of_block()
        if gpt:
            layer, block = layer + q + 2 * kv + h, block + f + h  # with the biases
        total = self.layers * (layer + block) + (2 * h + self.max_sequence * h if gpt else h)
        if (experts := self.experts) is not None:
            routers = (2 if experts.gate == "noisy-top-k" else 1) * h * experts.count
            of_experts = (experts.count + experts.shared) * self._block(experts)
            if gpt and experts.shared:
                of_experts += experts.shared * experts.ffn + h
            total += len(experts.layers(self.layers)) * (routers + of_experts - block)
        total += sum(self.router(i) for i in range(self.layers))
        return total + self.vocab * h * (1 if self.tied else 2)

    def flops_per_token(self, sequence_length: int) -> int:
        """Model FLOPs of forward and backward per token: 6 per matrix parameter and 12 L a d s for attention.

        The definition of PaLM (Chowdhery et al. 2022, appendix B), used for every MFU that shoal prints: attention
        counted in full (not halved for causality), recomputation not counted, and neither is the embedding look-up. Of
        experts those count that a token is given to, were none dropped (Fedus et al. 2022, section 2), and the router.
        A layer that takes k of a sequence's s tokens counts k/s, its scores (k/s)^2, and its router for all of them.
        """
        s, wide = sequence_length, 2 * self.head_dim + (self.latent.rotary_dim if self.latent else 0)
        of_token, of_some = 6 * self.vocab * self.hidden, 0  # each, and those that pass through layers, of a sequence
        for layer in range(self.layers):
            n = self.taken(layer, s)
            done = 6 * (self.layer_matrices(layer) + self.heads * wide * n)
            of_token += 6 * self.router(layer) if self.skips(layer) else done
            of_some += n * done if self.skips(layer) else 0
        return of_token + of_some // max(1, s)

    def sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self._experts_of(layer) is not None

    def skips(self, layer: int) -> bool:
        """Whether only some tokens pass through a layer."""
        return self._depths_of(layer) is not None

    def taken(self, layer: int, sequence_length: int) -> int:
        """How many of a sequence's tokens pass through a layer."""
        depths = self._depths_of(layer)
        return depths.taken(sequence_length) if depths else sequence_length

    def router(self, layer: int) -> int:
        """Parameters that decide which tokens pass through a layer, and that foresee it."""
        depths = self._depths_of(layer)
        return self.hidden + depths.predictor * (self.hidden + 1) if depths else 0

    def layer_matrices(self, layer: int) -> int:
        """Parameters of one layer that take part in the matrix products of one token that passes through it."""
        h, experts = self.hidden, self._experts_of(layer)
        if experts is None:
            return self._attention_matrices() + h * self.ffn * self._matrices_of_block()
        routers = 2 if experts.gate == "noisy-top-k" else 1
        met = experts.per_token + experts.shared
        return self._attention_matrices() + met * self._block(experts) + routers * h * experts.count

    def mean_layer_matrices(self) -> float:
        """The mean of `layer_matrices` over the layers and the tokens that may pass through them."""
        if self.experts is None and self.depths is None:  # all alike
            return float(self.layer_matrices(0))
        depths = [self._depths_of(i) for i in range(self.layers)]
        return sum((of.capacity if of else 1) * self.layer_matrices(i) for i, of in enumerate(depths)) / self.layers

    def _experts_of(self, layer: int) -> Experts | None:
        return self.experts if self.experts and self.experts.has(layer) else None

    def _depths_of(self, layer: int) -> Depths | None:
        return self.depths if self.depths and self.depths.has(layer) else None

    def _matrices_of_block(self) -> int:
        return 3 if self.family == "llama" else 2

    def _block(self, experts: Experts) -> int:
        """Parameters of one expert."""
        return self.hidden * experts.ffn * self._matrices_of_block()

    def _attention_matrices(self) -> int:
        h, q, kv, latent = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim, self.latent
        if latent is None:
            return 2 * h * q + 2 * h * kv
        rotary = self.heads * latent.rotary_dim
        queries = h * latent.query_rank + latent.query_rank * (q + rotary)
        return queries + h * (latent.key_value_rank + latent.rotary_dim) + latent.key_value_rank * 2 * q + q * h


_ABOUT = {"published_parameters", "published_to", "published_active", "off_because", "source"}
"""What an entry says of a model besides its shape: the count that its authors print and its unit (1: exactly), that of
the parameters that one token meets, why the shape has another count than its rounding, and the source."""


def _entry(name: str) -> dict[str, Any]:
    known = table("models")
    other = find(name, known, "model.name =").get("same_as", name)
    if other not in known:
        raise wrong("models", name, f"same_as: there is no model '{other}'; {did_you_mean(str(other), known)}")
    return known[other]


def model_names() -> list[str]:
    """All names in the catalog."""
    return list(table("models"))


def model_shape(name: str) -> ModelShape:
    """The shape of a published model, or one of ours.

    Raises:
        UsageError: the name is not in the catalog, or a value of a user's own is missing, unknown or out of its range.

    >>> shape = model_shape("llama-3-8b")
    >>> shape.layers, shape.hidden, f"{shape.parameters():,}"
    (32, 4096, '8,030,261,248')
    """
    shape = {key: value for key, value in _entry(name).items() if key not in _ABOUT}
    heads, hidden = shape.get("heads"), shape.get("hidden")
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        if "head_dim" not in shape and hidden % heads:
            raise wrong("models", name, f"hidden: {hidden} is no multiple of heads {heads}, and head_dim is not given")
        shape = {"kv_heads": heads, "head_dim": hidden // heads} | shape
    found = entry(ModelShape, "models", name, shape)
    if found.heads % found.kv_heads:
        raise wrong("models", name, f"kv_heads: {found.kv_heads} does not divide heads {found.heads}")
    return found
