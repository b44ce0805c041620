"""A micro-batch on one rank: the input of memory and FLOP formulas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from shoal.planning.cost.context import tokens_here
from shoal.planning.cost.memory.float8 import EightBits
from shoal.spec.catalog import ModelShape
from shoal.spec.layout import Layout

Kernel = Literal["sdpa", "explicit"]
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Properties that determine the activations of one micro-batch on one rank.

    Attributes:
        shape: the model.
        layout: only tp, tp_x, sequence_parallel, cp, ulysses, micro_batch and recompute are read.
        s: tokens of the full sequence.
        itemsize: bytes of the compute dtype.
        kernel: attention kernel.
        masked: attention stays inside documents.
        fused_norm: RMSNorm is one operation (in torch on CUDA, and on the CPU from fp32 on); otherwise it keeps two
            copies in fp32.
        eight: which of the layers' products are in 8 bits, if any, and how.
    """

    shape: ModelShape
    layout: Layout
    s: int
    itemsize: int = 2
    kernel: Kernel = "sdpa"
    masked: bool = False
    fused_norm: bool = True
    eight: EightBits | None = None

    @cached_property
    def counted(self) -> dict[tuple, Any]:
        """Cache of `once`."""
        return {}

    @cached_property
    def tokens(self) -> int:
        return self.layout.micro_batch * self.s_here

    @cached_property
    def s_here(self) -> int:
        """s, or the fullest context-parallel rank's part of it."""
        return tokens_here(self.layout, self.s)

    @cached_property
    def tokens_here(self) -> int:
        """b s, or b s/y between the tensor-parallel regions where the sequence is split."""
        return self.tokens // self.layout.token_multiple

    @cached_property
    def hidden_here(self) -> int:
        """h, or h/x of a grid's rank."""
        return self.shape.hidden // self.layout.tp_x

    @cached_property
    def told_apart(self) -> bool:
        """True if patterns select which layers' products are in 8 bits."""
        return self.eight is not None and bool(self.eight.keep)

    @property
    def exact(self) -> int:
        """Bytes of an element that is computed in fp32 or wider."""
        return max(4, self.itemsize)


def once(count: Callable[Concatenate[MicroBatch, P], T]) -> Callable[Concatenate[MicroBatch, P], T]:
    """Cache a micro-batch method's result per arguments; a search calls it thousands of times."""

    @wraps(count)
    def of(run: MicroBatch, *args: P.args, **named: P.kwargs) -> T:
        key = (count, *args, *named.items())
        if key not in run.counted:
            run.counted[key] = count(run, *args, **named)
        return run.counted[key]

    return of
