"""Decoder-only transformer in the families llama and gpt.

- ``llama``: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases (Touvron et al. 2023); with biases of
  queries, keys and values it is Qwen2, with norms of queries and keys Qwen3, with experts and sinks gpt-oss.
- ``gpt``: LayerNorm, learned positions, GELU, biases, tied head (Radford et al. 2019; Brown et al. 2020).

Shapes in comments: b sequences, s tokens, h hidden, a heads, k key/value heads, d head width, v vocabulary.
The model is plain PyTorch and can be built on the meta device. Removing any of ``embed``, ``layers.*`` and ``norm,
head`` leaves a valid pipeline stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from shoal.base.boxes import Box
from shoal.engine.kernels.rotary import rotate_packed
from shoal.engine.models.attention import (
    AttentionCore,
    Context,
    Kernel,
    Mask,
    Positions,
    Sinks,
    recomputed,
    rotary_table,
    rotate,
)
from shoal.engine.models.block_attention import cap
from shoal.engine.models.cache import Slice
from shoal.engine.models.experts.layer import MoE
from shoal.engine.models.experts.router import RoutingContext
from shoal.engine.models.feedforward import MLP, SwiGLU, project, project_joined
from shoal.engine.models.initial import Initial, fill
from shoal.engine.models.labels import look_further
from shoal.engine.models.latent_attention import LatentAttention
from shoal.engine.models.loss import CrossEntropy
from shoal.engine.models.mixture_of_depths import MixtureOfDepths
from shoal.engine.models.norm import RMSNorm, add_and_normalise
from shoal.spec.catalog import ModelShape
from shoal.spec.layout import Recompute


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads.

    The number of heads is derived from the output of the projections, so the module works on any subset of the heads.
    """

    def __init__(
        self, shape: ModelShape, index: int, kernel: Kernel = "sdpa", *, recompute: bool = False
    ):
        super().__init__()
        bias = shape.family == "gpt" or shape.qkv_bias
        self.head_dim, self.recompute = shape.head_dim, recompute
        self.q = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=bias)
        self.k = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=bias)
        self.v = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=bias)
        self.joint = shape.joint_qk_norm
        self.q_norm, self.k_norm = (
            RMSNorm((heads if self.joint else 1) * shape.head_dim, shape.norm_eps, not shape.plain_qk_norm)
            if shape.norms_heads(index) else None for heads in (shape.heads, shape.kv_heads)
        )
        self.sinks = Sinks(shape.heads) if shape.sinks else None
        self.window, self.rotated = shape.reach(index), shape.rotated(index)
        self.core = AttentionCore(kernel, self.window, shape.softcap)
        self.scale = 1.0 if shape.query_scalar is None else math.sqrt(shape.head_dim / shape.query_scalar)
        self.out = nn.Linear(
            shape.heads * shape.head_dim, shape.hidden, bias=shape.family == "gpt" or shape.out_bias
        )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        # Views of one product keep it in full, also what a copy takes the place of.
        copied = self.scale != 1.0 or context.temperature is not None or context.part is not None
        rotary = context.rotary_with(self.window) if self.rotated else None
        joined = self.q_norm is None and (rotary is not None or (type(self.core) is AttentionCore and not copied))
        q, k, v = self._heads(x, rotary, joined=joined)  # [b, a or k, s, d]
        if self.scale != 1.0:
            q = q * self.scale
        if context.temperature is not None and not self.rotated:
            q = q * context.temperature
        if context.part is not None:
            k, v = context.part.extend(self, k, v)  # [b, k, t, d]
        core = partial(recomputed, self.core) if self.recompute else self.core
        sinks = None if self.sinks is None else self.sinks.weight
        o = core(q, k, v, context.mask_with(self.window), sinks)  # [b, a, s, d]
        return self.out(o.transpose(1, 2).flatten(2))  # [b, s, h]

    def first_layers(self) -> tuple[nn.Linear, ...]:
        return self.q, self.k, self.v

    def _heads(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, *, joined: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values by head, with rotated queries and keys; if ``joined``, from one product."""
        packed = project_joined(x, self.q, self.k, self.v) if joined else None  # [b, s, (a + 2 k) d]
        if packed is None:
            q, k, v = project(x, self.q, self.k, self.v)
        elif rotary:
            heads, kv_heads = (len(layer.weight) // self.head_dim for layer in (self.q, self.k))
            q, k, v = (y.transpose(1, 2) for y in rotate_packed(packed, *rotary, heads, kv_heads))
            return q, k, v
        else:
            q, k, v = packed.split([len(layer.weight) for layer in (self.q, self.k, self.v)], -1)
        if self.joint and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))  # [b, s, a or k, d]
        if not self.joint and self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # [b, a or k, s, d]
        return (rotate(q, *rotary), rotate(k, *rotary), v) if rotary else (q, k, v)


def temperature(positions: Tensor, shape: ModelShape, dtype: torch.dtype) -> Tensor:
    """Return the factors on queries without rotary positions: [s] -> [s, 1]."""
    steps = ((positions + 1) // shape.temperature_floor).to(torch.promote_types(dtype, torch.float32))
    return (1 + shape.temperature * steps.log1p()).to(dtype).unsqueeze(-1)


def norm(shape: ModelShape) -> nn.Module:
    """Return RMSNorm for llama, else LayerNorm."""
    kind = RMSNorm if shape.family == "llama" else nn.LayerNorm
    return kind(shape.hidden, eps=shape.norm_eps)


class Block(nn.Module):
    """One transformer layer with pre-normalisation (Xiong et al. 2020), or with norms of its updates too or alone."""

    def __init__(self, shape: ModelShape, index: int, kernel: Kernel = "sdpa", recompute: Recompute = "none"):
        super().__init__()
        self.recompute = recompute == "full"
        self.depth = MixtureOfDepths(shape, index) if shape.skips(index) else None
        before, after = shape.post_norm != "only", shape.post_norm is not None
        self.attention_norm = norm(shape) if before else nn.Identity()
        attention = Attention if shape.latent is None else LatentAttention
        self.attention = attention(shape, index, kernel, recompute=recompute == "selective")
        self.attention_post_norm = norm(shape) if after else nn.Identity()
        self.mlp_norm = norm(shape) if before else nn.Identity()
        self.sparse = shape.sparse(index)
        if self.sparse:
            self.mlp: nn.Module = MoE(shape, index)
        else:
            self.mlp = SwiGLU(shape, shape.ffn) if shape.family == "llama" else MLP(shape, shape.ffn)
        self.mlp_post_norm = norm(shape) if after else nn.Identity()

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return recomputed(self._forward, x, context) if self.recompute else self._forward(x, context)

    def _forward(self, x: Tensor, context: Context) -> Tensor:
        if self.depth is not None:
            return self.depth(x, context, self.residual_update)
        x, y = add_and_normalise(self.mlp_norm, x, self._attend(x, context), self.mlp)
        return x + self._feed_forward(y, context)

    def residual_update(self, x: Tensor, context: Context) -> Tensor:
        """Return the layer's update of the residual stream."""
        update = self._attend(x, context)
        _, y = add_and_normalise(self.mlp_norm, x, update, self.mlp)
        return update + self._feed_forward(y, context)

    def _attend(self, x: Tensor, context: Context) -> Tensor:
        _, y = add_and_normalise(self.attention_norm, x, None, self.attention)
        return self.attention_post_norm(self.attention(y, context))

    def _feed_forward(self, y: Tensor, context: Context) -> Tensor:
        return self.mlp_post_norm(self.mlp(y, context.routing) if self.sparse else self.mlp(y))


def _table(rows: int, width: int) -> nn.Embedding:
    """Return an embedding. Numbers drawn on the meta device would import torch's compiler, a second of each process."""
    weight = torch.empty(rows, width)
    return nn.Embedding.from_pretrained(weight if weight.is_meta else nn.init.normal_(weight), freeze=False)


class ModelEnd(nn.Module):
    """All that follows the last layer, as one call: its parameters are used several times, and gathered together."""

    def forward(self, compute: Callable[..., Tensor], *inputs: object) -> Tensor:
        return compute(*inputs)


class PredictionBlock(Block):
    """Module of multi-token prediction: a layer with a projection of its two inputs before it, and a norm after it.

    Module k takes what module k - 1 gave for a token (the first: the model's normalised output), and the embedding of
    the token k places later (DeepSeek-AI 2024, "DeepSeek-V3", section 2.2). Embedding and head are the model's.
    """

    def __init__(self, shape: ModelShape, index: int, kernel: Kernel = "sdpa", recompute: Recompute = "none"):
        super().__init__(shape, index, kernel, recompute)
        self.embedding_norm, self.hidden_norm, self.last_norm = norm(shape), norm(shape), norm(shape)
        self.projection = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)

    def predict(self, hidden: Tensor, embedded: Tensor, context: Context) -> Tensor:
        """Return hidden states for the head, [b, s, h], from the hidden states of the module before and embeddings."""
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), -1)
        return self.last_norm(self(self.projection(both), context))


class Embedding(nn.Module):
    """Token embeddings, with learned positions in the gpt family."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.token = _table(shape.vocab, shape.hidden)
        self.position = _table(shape.max_sequence, shape.hidden) if shape.family == "gpt" else None
        self.scale = math.sqrt(shape.hidden) if shape.scaled_embedding else 1.0

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.token(tokens)  # [b, s, h]
        x = x if self.scale == 1.0 else x * self.scale
        return x if self.position is None else x + self.position(positions)


class Transformer(nn.Module):
    """Full model, or one pipeline stage of it (absent parts are None or missing from ``layers``).

    Args:
        recompute: activations to recompute in backward instead of storing: of full layers ("full"), or of the attention
            core, whose scores take the most memory for the fewest FLOPs ("selective": Korthikanti et al. 2022,
            section 5).
        seed: random seed of the gates in training.
        layers: numbers of the layers to build, modules of multi-token prediction included; None builds all.
    """

    def __init__(
        self, shape: ModelShape, *, kernel: Kernel = "sdpa", recompute: Recompute = "none", seed: int = 0,
        layers: Iterable[int] | None = None,
    ):
        super().__init__()
        self.shape, self.seed = shape, seed
        kernel = kernel if shape.softcap is None else "explicit"
        self.positions, self.mask = Positions(), Mask(kernel, shape.query_dim)
        self.local_mask = Mask(kernel, shape.query_dim, shape.window, shape.chunked) if shape.window else None
        self.embed: Embedding | None = Embedding(shape)
        self.first = True  # whether this stage begins with the embedding
        blocks = {str(i): (Block if i < shape.layers else PredictionBlock)(shape, i, kernel, recompute)
                  for i in (range(shape.blocks) if layers is None else layers)}  # fmt: skip
        self.layers = cast("dict[str, Block]", nn.ModuleDict(blocks))  # keyed by layer number in the full model
        self.norm: nn.Module | None = norm(shape)
        self.head: nn.Linear | None = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.loss = CrossEntropy()
        self.end = ModelEnd() if shape.mtp_depth else None
        if shape.tied:
            self.head.weight = self.embed.token.weight

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        hidden: Tensor | None = None,
        part: Slice | None = None,
        samples: Tensor | None = None,
        *,
        sequences: float = 1,
        labels: Callable[[Tensor, Tensor], Tensor] | None = None,
        further: Tensor | None = None,
    ) -> Tensor:
        """Run the parts that this stage holds.

        Args:
            tokens: [b, s] int64 ids.
            targets: [b, s] int64, `IGNORE` where the loss does not count.
            documents: [b, s] ascending document numbers of the tokens of packed sequences, on the host; attention
                stays inside a document.
            hidden: [b, s, h] output of the previous layers, required if ``embed`` is absent.
            part: the slice that the tokens form, if sequences come in slices; `documents` still covers all tokens.
            samples: [b] int64 sample index of each sequence in the data, which seeds random gates; None (validation,
                generation) disables randomness.
            sequences: number of sequences in the global batch, over which router losses are averaged.
            labels: computes the loss targets from (logits, targets).
            further: `look_further` of multi-token prediction; None computes it, of tokens that are complete sequences.

        Returns:
            The summed loss [nats] with targets, logits [b, s, v] without, or hidden states [b, s, h] without a head.
            The loss of multi-token prediction is not in it, but its gradient is in the loss's.
        """
        shape, start, rotary = self.shape, part.start if part else 0, None
        positions = self.positions(start, tokens.shape[1], tokens.device)
        x = self.embed(tokens, positions) if self.first and self.embed is not None else hidden
        assert x is not None, "hidden states, where the embedding is absent"
        if shape.family == "llama":
            rotary = rotary_table(positions, shape.rotary_dim, shape.rope_theta, x.dtype, shape.rope_scaling)
        mask, local_mask = self._make_masks(start, len(positions), documents, x)
        context = Context(rotary, mask, part, RoutingContext(sequences, self.seed, samples), documents, local_mask)
        if shape.local_rope_theta is not None:
            other = rotary_table(positions, shape.rotary_dim, shape.local_rope_theta, x.dtype)
            context = context._replace(local_rotary=other)
        if shape.temperature:
            context = context._replace(temperature=temperature(positions, shape, x.dtype))
        if part is not None:
            part.stop = part.start + tokens.shape[1]
        for layer in self.layers.values():
            if not isinstance(layer, PredictionBlock):
                x = layer(x, context)
        if self.norm is None or self.head is None:
            return x
        if self.end is None:
            return self._finish(x, targets, labels)
        if targets is not None and torch.is_grad_enabled():
            further = look_further(tokens, targets, documents, shape.mtp_depth) if further is None else further
        return self.end(self._finish, x, targets, labels, further, context)

    def _finish(
        self, x: Tensor, targets: Tensor | None, labels: Callable[[Tensor, Tensor], Tensor] | None,
        further: Tensor | None = None, context: Context | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute the loss or the logits from the output of the last layer, [b, s, h]."""
        assert self.norm is not None and self.head is not None
        hidden = self.norm(x)
        more = None if further is None or context is None else self._predict(hidden, further, context)
        logits = cap(self.head(hidden), self.shape.logit_softcap)
        if targets is None:
            return logits
        loss = self.loss(logits, targets if labels is None else labels(logits, targets))
        return loss if more is None else loss + (more - more.detach())

    def _predict(self, hidden: Tensor, further: Tensor, context: Context) -> Tensor:
        """Return the weighted loss of multi-token prediction (DeepSeek-AI 2024, DeepSeek-V3, equation 25)."""
        assert self.embed is not None and self.head is not None
        modules = [layer for layer in self.layers.values() if isinstance(layer, PredictionBlock)]
        losses = []
        for module, (tokens, targets) in zip(modules, further.unbind(), strict=True):
            embedded = self.embed.forward(tokens, tokens)  # without hooks of the model's beginning: `end` has its own
            hidden = module.predict(hidden, embedded, context)
            losses.append(self.loss(cap(self.head(hidden), self.shape.logit_softcap), targets))
        return torch.stack(losses).mean() * self.shape.mtp_weight

    def _make_masks(self, *inputs: Any) -> tuple[Any, Any]:
        """Return the masks of layers that see all earlier tokens and of those with a window, where there are any."""
        local = {layer.attention.window is not None for layer in self.layers.values()}
        of_local = self.local_mask(*inputs) if self.local_mask is not None and True in local else None
        return (None if local == {True} else self.mask(*inputs)), of_local


def initial(name: str, shape: ModelShape) -> Initial:
    """Return the initial distribution of a parameter: ones for norms, zeros for biases, else normal(0, 0.02).

    Projections into the residual stream have a std smaller by sqrt(2 L) (Radford et al. 2019, section 2.3).
    """
    if name.endswith(("bias", "router.noise")):
        return Initial(mean=0.0, std=0.0)
    if "norm" in name:
        return Initial(mean=1.0, std=0.0)
    if name.endswith(("attention.out.weight", "mlp.down.weight", "shared.down.weight", "experts.down")):
        return Initial(mean=0.0, std=0.02 / math.sqrt(2 * shape.layers))
    return Initial(mean=0.0, std=0.02)


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Fill an unsharded model with the initial values of ``seed``, which are the same for every layout."""
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        start = initial(name, model.shape)
        fill(parameter, name=name, global_shape=shape, box=Box.full(shape), initial=start, seed=seed)
