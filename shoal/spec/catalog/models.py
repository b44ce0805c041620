"""Shapes of published models by name, with the parameter counts that their authors publish."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from shoal.base.errors import UsageError
from shoal.base.section import Section
from shoal.spec.catalog.experts import Depths, Experts
from shoal.spec.catalog.tables import complete, entry, find, table, wrong


class RopeScaling(Section):
    """Rotary frequencies for sequences longer than in most of the training (Dubey et al. 2024, section 3.4.3).

    Waves longer than original_max_sequence / low_frequency are slowed down by the factor, those shorter than
    original_max_sequence / high_frequency stay, and the ones between are interpolated, as in the code released with
    Llama 3.1.
    """

    kind: Literal["llama3", "yarn", "linear"] = "llama3"
    """How waves between are interpolated: linearly in their frequency (Llama 3.1), or in their number (YaRN: Peng et
    al. 2023, section 3.2; its usual high_frequency is 32). linear: all get the factor (Chen et al. 2023)."""

    factor: PositiveFloat
    """Factor by which the longest waves are slowed down."""

    low_frequency: PositiveFloat = 1.0
    """Turns over original_max_sequence of the fastest wave that gets the full factor."""

    high_frequency: PositiveFloat = 4.0
    """Turns over original_max_sequence of the slowest wave that stays as it is."""

    original_max_sequence: PositiveInt = 8192
    """Longest sequence of the training before."""

    mscale: NonNegativeFloat = 0.0
    """yarn: rotated parts are multiplied by (0.1 mscale ln(factor) + 1) / (0.1 mscale_all ln(factor) + 1); if one of
    them is 0, by 0.1 ln(factor) + 1 (Peng et al. 2023, equation 22)."""

    mscale_all: NonNegativeFloat = 0.0
    """yarn, in latent attention: scores are multiplied by (0.1 mscale_all ln(factor) + 1)^2 (mscale_all_dim of
    DeepSeek's)."""

    truncate: bool = True
    """yarn: the numbers of the first and the last wave between are rounded outwards (gpt-oss: they are not)."""

    @property
    def magnitude(self) -> float:
        """Factor on rotated queries and keys."""
        if self.kind != "yarn":
            return 1.0
        if not (self.mscale and self.mscale_all):
            return self._attention_scale(1.0)
        return self._attention_scale(self.mscale) / self._attention_scale(self.mscale_all)

    @property
    def score_factor(self) -> float:
        """Factor on the scores of latent attention."""
        return self._attention_scale(self.mscale_all) ** 2 if self.kind == "yarn" else 1.0

    def _attention_scale(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


class Latent(Section):
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1): keys and values of all heads are
    computed from one narrow vector per token, and only a part of each query and a key of all heads is rotated."""

    query_rank: PositiveInt | None = None
    """Width that queries are compressed to; none computes them from the hidden state."""

    key_value_rank: PositiveInt
    """Width that keys and values are compressed to."""

    rotary_dim: PositiveInt = 64
    """Width of the rotary part of a query and of the shared key, in addition to head_dim."""

    value_dim: PositiveInt | None = None
    """Width of the values of a head; none is head_dim."""


Reach = Literal["local", "global"]
Width = Annotated[int, Field(gt=0, le=2**24)]


class ModelShape(Section):
    """Shape of a decoder-only transformer: everything that determines its tensors."""

    family: Literal["llama", "gpt"]
    """llama: RMSNorm, RoPE, SwiGLU, no biases. gpt: LayerNorm, learned positions, GELU, biases (GPT-2 and GPT-3)."""

    layers: int = Field(gt=0, le=2**14)
    """L, transformer layers."""

    hidden: Width
    """h, width of the residual stream."""

    heads: Width
    """a, query heads."""

    kv_heads: Width
    """Key and value heads; fewer than heads is grouped-query attention (Ainslie et al. 2023)."""

    head_dim: Width
    """Width of one head."""

    ffn: Width
    """Width inside the feed-forward block."""

    vocab: Width
    """v, vocabulary size."""

    max_sequence: Width
    """Longest sequence: the number of learned positions (gpt), or what the model was trained for (llama)."""

    tied: bool
    """Whether the output head shares the embedding's weight."""

    norm_eps: PositiveFloat = 1e-5
    """Added to the variance in the norms."""

    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies (Su et al. 2021); llama only."""

    rope_scaling: RopeScaling | None = None
    """Rescaled rotary frequencies (Llama 3.1 and later); llama only."""

    qkv_bias: bool = False
    """Whether queries, keys and values have biases in the llama family too (Qwen2)."""

    out_bias: bool = False
    """Whether the output projection of attention has a bias in the llama family too (gpt-oss)."""

    qk_norm: bool = False
    """Whether each head of queries and keys passes through an RMSNorm before it is rotated (Qwen3); llama only."""

    joint_qk_norm: bool = False
    """With qk_norm, one norm over all heads of the queries and one over all keys, instead of one of each head (Team
    OLMo 2024, "2 OLMo 2 Furious", section 3.3)."""

    plain_qk_norm: bool = False
    """With qk_norm, its norms have no weights, and layers without rotary positions none (Llama 4)."""

    mtp_depth: int = Field(default=0, ge=0, le=64)
    """Modules after the last layer, each of which predicts one token further in training (multi-token prediction:
    DeepSeek-AI 2024, DeepSeek-V3, section 2.2); llama only."""

    mtp_weight: PositiveFloat = 0.3
    """Weight of the mean of their losses, which are no part of the reported loss."""

    post_norm: Literal["also", "only"] | None = None
    """Norms of what attention and the feed-forward block add to the residual stream, besides norms of their inputs
    (also: Gemma 2) or instead (only: OLMo 2); llama only."""

    activation: Literal["gelu", "clamped"] | None = None
    """Function of the gate in the llama family: GELU in its tanh form (Gemma: GeGLU, Shazeer 2020); clamped: of gate
    and up, both limited, gate x sigmoid(1.702 gate) x (up + 1) (gpt-oss); None: SiLU."""

    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the square root of hidden (Gemma)."""

    query_scalar: Width | None = None
    """Scores are divided by its square root; None: by that of head_dim (Gemma 2 27B: hidden / heads)."""

    softcap: PositiveFloat | None = None
    """Limit of attention scores, which become softcap x tanh(score / softcap) (Bello et al. 2016; Gemma 2)."""

    sinks: bool = False
    """Whether the softmax of each head has one more score, a parameter without a value, which takes a part of the
    weights (OpenAI 2025, gpt-oss model card, section 2; Xiao et al. 2023); llama only."""

    logit_softcap: PositiveFloat | None = None
    """The same for the logits of the head."""

    local_rope_theta: PositiveFloat | None = None
    """Base of the rotary frequencies of local layers, which are then not rescaled (Gemma 3); None: rope_theta."""

    window: PositiveInt | None = None
    """Tokens that a query sees in local layers, its own included (Jiang et al. 2023, Mistral 7B, section 2); None: all
    earlier ones in every layer."""

    pattern: tuple[Reach, ...] = Field(default=(), max_length=2**14)
    """With a window, the kinds of the layers, repeated over the model (Gemma 2: local, global); empty: all local."""

    chunked: bool = False
    """Whether the window cuts sequences into chunks of that many tokens: a query of a local layer sees its own chunk
    alone (Meta AI 2025, "The Llama 4 herd")."""

    global_rope: bool = True
    """Whether queries and keys of global layers are rotated; otherwise these layers have no positions (NoPE: Kazemnejad
    et al. 2023; Llama 4); llama only."""

    temperature: NonNegativeFloat = 0.0
    """Without global_rope, the query at position p of a global layer is multiplied by 1 + temperature x ln(1 + floor((p
    + 1) / temperature_floor)) (Nakanishi 2025, "Scalable-softmax"; Llama 4: 0.1)."""

    temperature_floor: Width = 8192
    """Positions before the first factor other than 1."""

    experts: Experts | None = None
    """Experts that replace the feed-forward blocks of some layers."""

    depths: Depths | None = None
    """Layers that process only some tokens."""

    latent: Latent | None = None
    """Latent attention; kv_heads is then heads, and head_dim the part of a query that is not rotated. llama only."""

    @property
    def query_dim(self) -> int:
        """Width of a query and of a key of one head."""
        return self.head_dim + (self.latent.rotary_dim if self.latent else 0)

    @property
    def value_dim(self) -> int:
        """Width of the values of one head."""
        return (self.latent.value_dim if self.latent else None) or self.head_dim

    @property
    def rotary_dim(self) -> int:
        """Width of the rotated part of a query."""
        return self.latent.rotary_dim if self.latent else self.head_dim

    @property
    def blocks(self) -> int:
        """Layers, with one in each module of multi-token prediction."""
        return self.layers + self.mtp_depth

    @property
    def shares_ends(self) -> bool:
        """Whether the end of the model uses the embedding: as its head, or in multi-token prediction."""
        return self.tied or self.mtp_depth > 0

    @property
    def by_blocks(self) -> bool:
        """Whether attention saves the log-sum-exp of its scores with every kernel, and never the scores."""
        return self.sinks or self.softcap is not None

    @property
    def moe(self) -> Experts:
        """`experts` of a model that has some (mixture of experts)."""
        if self.experts is None:
            raise ValueError("the model has no experts")
        return self.experts

    @property
    def mod(self) -> Depths:
        """`depths` of a model in which layers skip tokens (mixture of depths)."""
        if self.depths is None:
            raise ValueError("all tokens pass through all layers of the model")
        return self.depths

    def parameters(self) -> int:
        """Return the exact number of trainable parameters; a tied head counts once."""
        h, q, kv, f = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim, self.ffn
        gpt = self.family == "gpt"
        norms = {None: 2, "also": 4, "only": 2}[self.post_norm]
        layer = self.attention_matrices() + (2 if gpt else 1) * norms * h
        if self.latent is not None:
            layer += (self.latent.query_rank or 0) + self.latent.key_value_rank  # norms of latent attention
        block = h * f * self._matrices_of_block()
        qk_norms = q + kv if self.joint_qk_norm else 2 * self.head_dim
        layer += (q + 2 * kv) * (gpt or self.qkv_bias) + qk_norms * (self.qk_norm and not self.plain_qk_norm)
        layer += h * self.out_bias + self.heads * self.sinks
        if gpt:
            layer, block = layer + h, block + f + h  # including the biases
        total = self.blocks * (layer + block) + (2 * h + self.max_sequence * h if gpt else h)
        total += self.mtp_depth * (3 * h + 2 * h * h)
        if (experts := self.experts) is not None:
            routers = (2 if experts.gate == "noisy-top-k" else 1) * h * experts.count
            of_experts = (experts.count + experts.shared) * self._block(experts)
            if experts.biases:  # of the router, and of each matrix of an expert
                of_experts += experts.count * (1 + (self._matrices_of_block() - 1) * experts.ffn + h)
            if gpt and experts.shared:
                of_experts += experts.shared * experts.ffn + h
            total += len(experts.layers(self.blocks)) * (routers + of_experts - block)
        total += sum(self.router(i) for i in range(self.layers))
        return total + self.vocab * h * (1 if self.tied else 2)

    def vocabulary_rows(self, parts: int) -> int:
        """Return the rows of one of equal parts of a matrix by token id, rounded up to a multiple of 16.

        Products of 16 or 8 bits need rows of logits that begin at multiples of 16 bytes: of 50,257 ids they took 4 to 6
        times as long on an H200 as of 50,264. Megatron-LM rounds up for the same reason.
        """
        return -(-self.vocab // (16 * parts)) * 16

    def flops_per_token(self, sequence_length: int) -> int:
        """Return model FLOPs of forward and backward per token: 6 per matrix parameter and 12 L a d s for attention.

        PaLM's definition (Chowdhery et al. 2022, appendix B), used for every MFU in shoal: attention counts in full
        (not halved for causality), and in a local layer with the window instead of s; recomputation and the embedding
        lookup do not count. Routed experts count per token as if none were dropped (Fedus et al. 2022, section 2), and
        so does the router. A layer that processes k of a sequence's s tokens counts k/s, its attention scores (k/s)^2,
        and its router for all tokens. A module of multi-token prediction counts its layer, its projection and the head.
        """
        s, wide = sequence_length, self.query_dim + self.value_dim
        of_token = 6 * (1 + self.mtp_depth) * self.vocab * self.hidden + 12 * self.mtp_depth * self.hidden**2
        of_some = 0  # per sequence, for layers that skip tokens
        for layer in range(self.blocks):
            n = self.taken(layer, s)
            done = 6 * (self.layer_matrices(layer) + self.heads * wide * min(n, self.reach(layer) or n))
            of_token += 6 * self.router(layer) if self.skips(layer) else done
            of_some += n * done if self.skips(layer) else 0
        return of_token + of_some // max(1, s)

    def reach(self, layer: int) -> int | None:
        """Return the window of a layer, or None if its queries see all earlier tokens."""
        local = not self.pattern or self.pattern[layer % len(self.pattern)] == "local"
        return self.window if local else None

    def rotated(self, layer: int) -> bool:
        """Return whether a layer has rotary positions."""
        return self.family == "llama" and (self.global_rope or self.reach(layer) is not None)

    def norms_heads(self, layer: int) -> bool:
        """Return whether a layer has norms of queries and keys."""
        return self.qk_norm and (not self.plain_qk_norm or self.rotated(layer))

    def sparse(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return self._layer_experts(layer) is not None

    def skips(self, layer: int) -> bool:
        """Return whether a layer processes only some tokens."""
        return self._layer_depths(layer) is not None

    def taken(self, layer: int, sequence_length: int) -> int:
        """Return the number of a sequence's tokens that a layer processes."""
        depths = self._layer_depths(layer)
        return depths.taken(sequence_length) if depths else sequence_length

    def router(self, layer: int) -> int:
        """Return the number of parameters of a layer's depth router and its predictor."""
        depths = self._layer_depths(layer)
        return self.hidden + depths.predictor * (self.hidden + 1) if depths else 0

    def layer_matrices(self, layer: int) -> int:
        """Return the number of a layer's matrix parameters that take part in the computation of one token."""
        h, experts = self.hidden, self._layer_experts(layer)
        if experts is None:
            return self.attention_matrices() + h * self.ffn * self._matrices_of_block()
        routers = 2 if experts.gate == "noisy-top-k" else 1
        met = experts.per_token + experts.shared
        return self.attention_matrices() + met * self._block(experts) + routers * h * experts.count

    def mean_layer_matrices(self) -> float:
        """Return the mean of `layer_matrices` over layers, weighted by the fraction of tokens they process."""
        if self.experts is None and self.depths is None:  # all layers are equal
            return float(self.layer_matrices(0))
        depths = [self._layer_depths(i) for i in range(self.layers)]
        return sum((of.capacity if of else 1) * self.layer_matrices(i) for i, of in enumerate(depths)) / self.layers

    def attention_matrices(self) -> int:
        """Return the number of matrix parameters of a layer's attention."""
        h, latent = self.hidden, self.latent
        q, out = self.heads * self.query_dim, self.heads * self.value_dim * self.hidden
        if latent is None:
            return h * q + 2 * h * self.kv_heads * self.head_dim + out
        queries = (h + q) * latent.query_rank if latent.query_rank else h * q
        keys_values = h * (latent.key_value_rank + latent.rotary_dim)
        return queries + keys_values + latent.key_value_rank * self.heads * (self.head_dim + self.value_dim) + out

    def _layer_experts(self, layer: int) -> Experts | None:
        return self.experts if self.experts and self.experts.has(layer) else None

    def _layer_depths(self, layer: int) -> Depths | None:
        return self.depths if self.depths and self.depths.has(layer) else None

    def _matrices_of_block(self) -> int:
        return 3 if self.family == "llama" else 2

    def _block(self, experts: Experts) -> int:
        """Return the number of parameters of one expert."""
        return self.hidden * experts.ffn * self._matrices_of_block()


_ABOUT = {"published_parameters", "published_to", "published_active", "off_because", "source"}
"""Keys of an entry besides the shape: the count that the authors publish and its unit (1: exact), the active
parameters per token, the reason if the count differs from the published one, and the source."""


def model_names() -> list[str]:
    """Return all names in the catalog."""
    return list(table("models"))


def model_shape(name: str) -> ModelShape:
    """Return the shape of a published model or of one of shoal's own.

    Raises:
        UsageError: the name is not in the catalog, or a value in a user's catalog is missing, unknown or out of range.

    >>> shape = model_shape("llama-3-8b")
    >>> shape.layers, shape.hidden, f"{shape.parameters():,}"
    (32, 4096, '8,030,261,248')
    """
    if name not in (known := table("models")) and Path(name, "config.json").is_file():
        raise UsageError(f"model.name = '{name}' is the folder of a model, and not in the catalog.\n"
                         f"  Take its shape from a config: shoal import hf {name} --out run.toml, then shoal estimate "
                         "run.toml.")
    find(name, known, "model.name =")
    shape = {key: value for key, value in complete("models", name).items() if key not in _ABOUT}
    heads, hidden = shape.get("heads"), shape.get("hidden")
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        if "head_dim" not in shape and hidden % heads:
            raise wrong("models", name, f"hidden: {hidden} is no multiple of heads {heads}, and head_dim is not given")
        shape = {"kv_heads": heads, "head_dim": hidden // heads} | shape
    found = entry(ModelShape, "models", name, shape)
    if found.heads % found.kv_heads:
        raise wrong("models", name, f"kv_heads: {found.kv_heads} does not divide heads {found.heads}")
    return found
