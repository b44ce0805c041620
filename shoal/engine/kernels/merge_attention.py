"""Merge of the softmax over additional keys into an accumulated one, in place (Milakov & Gimelshein 2018).

With the outputs o, o' and the log-sum-exps l, l' of the scores of two sets of keys, the output over both is
o + sigmoid(l' - l) (o' - o), and the log-sum-exp log(exp l + exp l').
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.library import custom_op

from shoal.engine.kernels import launch
from shoal.engine.kernels.example import Example


def merge_attention_reference(out: Tensor, total: Tensor, block_out: Tensor, block_total: Tensor) -> None:
    """Merge in plain PyTorch; see `merge_attention_`."""
    share = torch.sigmoid(block_total - total)  # the new keys' share of the weights
    share = share.masked_fill(block_total.isneginf(), 0.0).unsqueeze(-1)  # also if nothing was seen before
    out.lerp_(block_out.to(out.dtype), share.to(out.dtype))
    torch.logaddexp(total, block_total.to(total.dtype), out=total)


@custom_op("shoal::merge_attention_", mutates_args=("out", "total"))
def merge_attention_(out: Tensor, total: Tensor, block_out: Tensor, block_total: Tensor) -> None:
    """Merge the softmax over additional keys into an accumulated one, in place.

    Args:
        out: [b, a, n, d] accumulated output, in at least float32, in any strides with contiguous heads.
        total: [b, a, n] accumulated log-sum-exp of the scores; -inf where nothing was seen.
        block_out, block_total: the same of the additional keys, ``block_out`` in any format.
    """
    merge_attention_reference(out, total, block_out, block_total)


merge_attention_.register_kernel("cuda", launch("merge_attention", "merge"))


def examples() -> Iterator[Example]:
    """Yield merges of some rows of tensors with heads inside tokens, with and without a row that saw nothing."""
    def merged(function, out: Tensor, total: Tensor, *block: Tensor) -> tuple[Tensor, Tensor]:
        out, total = out.transpose(1, 2).clone().transpose(1, 2), total.clone()
        function(out[:, :, 3:], total[:, :, 3:], *block)
        return out, total.exp()

    for d in (64, 80):
        out, block_out = torch.randn(2, 3, 40, d), torch.randn(2, 37, 3, d).transpose(1, 2)
        total, block_total = torch.randn(2, 3, 40), torch.randn(2, 3, 37)
        total[0, 0, 7] = block_total[1, 1, 5] = -torch.inf
        yield Example(
            f"merge of attention, width {d}", lambda *x: merged(merge_attention_, *x),
            lambda *x: merged(merge_attention_reference, *x), (out, total, block_out, block_total),
            (torch.float32,), (),
        )  # fmt: skip
