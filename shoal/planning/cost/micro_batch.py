"""A micro-batch on one rank: the input of the formulas of memory, FLOPs and traffic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, wraps
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

from shoal.spec.catalog import ModelShape
from shoal.spec.config import Float8Config
from shoal.spec.layout import Layout
from shoal.spec.number_formats import BLOCKS, Formats

Kernel = Literal["sdpa", "explicit"]
P = ParamSpec("P")
T = TypeVar("T")


class EightBits(NamedTuple):
    """Which products of the layers are in 8 or 4 bits, and their scaling.

    Backward saves the codes of the transposed input, and their scales (`shoal.engine.parallel.float8.product`).
    """

    per_tensor: bool  # one scale per input tensor; otherwise one per feature
    block: int  # tokens that share a feature's scale; 0 for all tokens
    keep: tuple[str, ...] = ()  # patterns of the linear layers that stay in higher precision
    packed: bool = False  # two codes take a byte, and a scale one, instead of a byte and a number

    @staticmethod
    def from_formats(formats: Formats, config: Float8Config, *, packed: bool = False) -> EightBits | None:
        """Build from a precision; None if products are in the compute format.

        Args:
            packed: whether the products are in 4 bits, and the device multiplies these.
        """
        if formats.products == "compute":
            return None
        if formats.products in BLOCKS:
            return EightBits(False, BLOCKS[formats.products], config.keep, packed)
        return EightBits(config.scales == "tensor", config.block if config.scales == "block" else 0, config.keep)

    def takes(self, name: str) -> bool:
        """Return whether a linear layer of the model's blocks is in 8 bits."""
        return not any(fnmatchcase(name, pattern) for pattern in self.keep)

    def codes(self, elements: int) -> int:
        """Return the bytes of the codes of a matrix."""
        return elements // 2 if self.packed else elements

    def scales(self, tokens: int, width: int) -> int:
        """Return the number of scales of an input.

        >>> EightBits(True, 0).scales(100, 8), EightBits(False, 0).scales(100, 8), EightBits(False, 32).scales(100, 8)
        (1, 8, 32)
        """
        return 1 if self.per_tensor else width * -(-tokens // (self.block or tokens))


class RoutedRows(NamedTuple):
    """Rows of one micro-batch in one expert layer on one rank, with even routing and no dropped tokens."""

    own: int  # tokens that the rank routes, from its part of each sequence
    sent: int  # rows that it sends to experts on any rank, itself included
    computed: int  # rows that its experts compute
    away: float  # sent rows for other ranks of ep; equally many arrive
    gathered: int  # rows in `computed` that come from other ranks of etp


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Properties that determine the activations of one micro-batch on one rank."""

    shape: ModelShape  # the model
    layout: Layout  # only tp, tp_x, sequence_parallel, cp, ulysses, ep, etp, micro_batch and recompute are read
    s: int  # tokens of the full sequence
    itemsize: int = 2  # bytes of the compute dtype
    kernel: Kernel = "sdpa"  # attention kernel
    masked: bool = False  # attention stays inside documents
    # operators are fused, as on CUDA (`shoal.engine.kernels`): RMSNorm keeps no copies in fp32, SwiGLU no silu(gate),
    # the loss no probabilities in fp32, and weight gradients are accumulated without temporaries
    fused: bool = True
    eight: EightBits | None = None  # which of the layers' products are in 8 bits, if any, and how
    by_lengths: bool = False  # attention takes lengths of documents and the window, not a mask

    @cached_property
    def counted(self) -> dict[tuple, Any]:
        """Cache of `once`."""
        return {}

    # ---- tokens --------------------------------------------------------------------------------------------------

    @cached_property
    def s_local(self) -> int:
        """s, or the part of it on the context-parallel rank with the most.

        >>> from shoal.spec.catalog import model_shape
        >>> tiny = model_shape("tiny")
        >>> [MicroBatch(tiny, Layout(cp=4, ulysses=u), s).s_local for u, s in ((1, 32), (1, 33), (2, 33))]
        [8, 9, 9]
        """
        units = math.ceil(self.s / self.layout.sequence_shards)
        return math.ceil(math.ceil(units / self.layout.cp_ring) / self.layout.ulysses) * self.layout.sequence_shards

    @cached_property
    def tokens(self) -> int:
        """b s, with s on this rank."""
        return self.layout.micro_batch * self.s_local

    @cached_property
    def tokens_between(self) -> int:
        """b s, or b s/y between the tensor-parallel regions if they split the sequence."""
        return self.tokens // self.layout.sequence_shards

    @cached_property
    def chosen(self) -> MicroBatch:
        """The part of the micro-batch that a mixture-of-depths layer processes."""
        return replace(self, s=self.shape.mod.taken(self.s), by_lengths=False)

    @cached_property
    def routed(self) -> RoutedRows:
        """Rows in an expert layer."""
        own = -(-self.tokens // self.layout.tp)
        sent, ep = own * self.shape.moe.per_token, self.layout.ep
        computed = sent * self.layout.expert_tensor
        return RoutedRows(own, sent, computed, sent * (ep - 1) / ep, computed - sent)

    # ---- sizes ---------------------------------------------------------------------------------------------------

    @cached_property
    def hidden_local(self) -> int:
        """h, or h/x of a grid's rank."""
        return self.shape.hidden // self.layout.tp_x

    @cached_property
    def hidden_bytes(self) -> int:
        """Bytes of a tensor between layers. [b, s, h/x]"""
        return self.itemsize * self.tokens_between * self.hidden_local

    @cached_property
    def kv_heads(self) -> int:
        """Key/value heads of a context-parallel rank; each rank that exchanges heads has at least one."""
        return max(1, self.shape.kv_heads // self.layout.tp, self.layout.ulysses)

    @cached_property
    def ring_elements(self) -> int:
        """Elements of the keys and values of one place of the ring. [2, b, k/t, s, d]"""
        return 2 * self.tokens * self.kv_heads * self.shape.query_dim

    @cached_property
    def distinguishes_layers(self) -> bool:
        """True if patterns select which layers' products are in 8 bits, or layers differ in masks or norms of heads."""
        windows = not self.by_lengths and any(self.window(layer) for layer in range(self.shape.layers))
        return windows or self.shape.plain_qk_norm or (self.eight is not None and bool(self.eight.keep))

    @property
    def stores_scores(self) -> bool:
        """True if attention on one rank saves its weights: unfused, and not in blocks (`ModelShape.by_blocks`)."""
        return self.kernel == "explicit" and not self.shape.by_blocks

    def window(self, layer: int) -> int | None:
        """Return the window of a layer if it hides tokens."""
        window = self.shape.reach(layer)
        return window if window is not None and window < self.s else None

    def weight_codes(self, layers: Sequence[int]) -> int:
        """Return the bytes of the codes of these layers' weights and of their transposes, without scales."""
        shape, eight = self.shape, self.eight
        if eight is None:
            return 0
        h, t, parts = shape.hidden, self.layout.tp, ("gate", "up", "down") if self.gated else ("up", "down")
        sizes = {f"attention.{name}": size for name, size in self._attention_sizes().items()}
        sizes |= {f"mlp.{name}": h * shape.ffn // t for name in parts}
        return 2 * eight.codes(sum(
            size for layer in layers for name, size in sizes.items() if eight.takes(f"layers.{layer}.{name}")
        ))  # fmt: skip

    def _attention_sizes(self) -> dict[str, int]:
        """Return the elements of the matrices of a layer's attention on one rank."""
        shape, h, t, latent = self.shape, self.shape.hidden, self.layout.tp, self.shape.latent
        queries, out = shape.heads * shape.query_dim, h * shape.heads * shape.value_dim // t
        if latent is None:
            keys = h * shape.kv_heads * shape.head_dim // t
            return {"q": h * queries // t, "k": keys, "v": keys, "out": out}
        rank, expanded = latent.key_value_rank, shape.heads * (shape.head_dim + shape.value_dim)
        sizes = {"kv_down": h * (rank + latent.rotary_dim), "kv_up": rank * expanded // t, "out": out}
        if latent.query_rank is None:
            return sizes | {"q": h * queries // t}
        return sizes | {"q_down": h * latent.query_rank, "q_up": latent.query_rank * queries // t}

    @property
    def joins_gate(self) -> bool:
        """True if SwiGLU reads gate and up from one product, and writes their gradients for one."""
        swiglu = self.gated and self.shape.activation is None
        return self.fused and swiglu and self.layout.tp_x == 1 and not (self.eight and self.eight.keep)

    @property
    def copies_gradients(self) -> bool:
        """True if a weight gradient has its own memory before it is added to a wider sum."""
        return self.itemsize < 4 and not (self.fused and self.eight is None)

    @property
    def gated(self) -> bool:
        """True if the feed-forward block has a gate (SwiGLU)."""
        return self.shape.family == "llama"

    @property
    def logit(self) -> int:
        """Bytes that the loss keeps of a logit."""
        return self.itemsize if self.fused else self.exact

    @property
    def exact(self) -> int:
        """Bytes of an element that is computed in fp32 or wider."""
        return max(4, self.itemsize)


def once(count: Callable[Concatenate[MicroBatch, P], T]) -> Callable[Concatenate[MicroBatch, P], T]:
    """Cache a function of a micro-batch per arguments; a search calls it thousands of times."""

    @wraps(count)
    def cached(run: MicroBatch, *args: P.args, **named: P.kwargs) -> T:
        key = (cached, *args, *named.items())  # by its public name, so that estimates can be pickled
        if key not in run.counted:
            run.counted[key] = count(run, *args, **named)
        return run.counted[key]

    return cached
