"""Permutation of tokens to experts and back, with shapes that depend on no value: the host never waits for the device.

    sort_choices    which row belongs to which token and expert: a counting sort by expert, then by token
    copy_rows       a token's row, once for each of its experts
    combine_rows    the weighted sum of each token's rows, in one order

Rows form one tensor [m, ..] sorted by expert, where m bounds the number of choices; the rows after the last choice are
zeros or undefined, and no result depends on them. Sums use float32, or float64 for float64 rows.
Shapes: n tokens, E experts, at most k experts per token, rows of h numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from shoal.engine.kernels import launch
from shoal.engine.kernels.example import Example


@custom_op("shoal::sort_choices", mutates_args=())
def sort_choices(chosen: Tensor, m: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Assign a row to each chosen pair of token and expert.

    Args:
        chosen: [n, E] bool with at most ``m`` chosen pairs, and at most ``k`` per token.

    Returns:
        Four int32 tensors: the token and the expert of each row, [m], -1 after the last; the rows of each token,
        [n, k], by ascending expert and -1 after the last; the end of each expert's rows, [E].
    """
    expert, token = chosen.t().nonzero(as_tuple=True)
    place = torch.arange(len(token), device=chosen.device, dtype=torch.int32)
    rows = place.new_full((len(chosen), k), -1)
    rows[token, chosen.cumsum(1)[token, expert] - 1] = place
    padded = [F.pad(of_row.int(), (0, m - len(token)), value=-1) for of_row in (token, expert)]
    return *padded, rows, chosen.sum(0).cumsum(0).int()  # type: ignore[return-value]


sort_choices.register_kernel("cuda", launch("permute", "sort_choices"))


@sort_choices.register_fake
def _(chosen: Tensor, m: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, experts = chosen.shape
    token, expert, rows, ends = (chosen.new_empty(size, dtype=torch.int32) for size in ((m,), (m,), (n, k), (experts,)))
    return token, expert, rows, ends


def _select(x: Tensor, index: Tensor) -> Tensor:
    """Select rows of x, with zeros where the index is -1: [.., h], [..] -> [.., h]."""
    if len(x) == 0:
        return x.new_zeros(*index.shape, x.shape[1])
    selected = x.index_select(0, index.clamp(min=0).flatten()).view(*index.shape, x.shape[1])
    return selected.masked_fill((index < 0).unsqueeze(-1), 0)


# ---- copies of tokens --------------------------------------------------------------------------------------------


@custom_op("shoal::copy_rows", mutates_args=())
def copy_rows(x: Tensor, token: Tensor, rows: Tensor) -> Tensor:
    """Copy each row's token, with zeros in rows without one: [n, h] -> [m, h].

    Args:
        token, rows: from `sort_choices`.
    """
    return _select(x, token)


copy_rows.register_kernel("cuda", lambda x, token, rows: launch("permute", "copy_rows")(x, token))
copy_rows.register_fake(lambda x, token, rows: x.new_empty(len(token), x.shape[1]))


@custom_op("shoal::sum_rows", mutates_args=())
def sum_rows(y: Tensor, rows: Tensor) -> Tensor:
    """Sum the rows of each token: [m, h], [n, k] -> [n, h]."""
    exact = torch.promote_types(y.dtype, torch.float32)
    return _select(y, rows).sum(1, dtype=exact).to(y.dtype)


sum_rows.register_kernel("cuda", launch("permute", "sum_rows"))
sum_rows.register_fake(lambda y, rows: y.new_empty(len(rows), y.shape[1]))


copy_rows.register_autograd(
    lambda ctx, gradient: (sum_rows(gradient.contiguous(), *ctx.saved_tensors), None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[2]),
)


# ---- weighted sums of a token's rows -----------------------------------------------------------------------------


@custom_op("shoal::combine_rows", mutates_args=())
def combine_rows(y: Tensor, weights: Tensor, token: Tensor, expert: Tensor, rows: Tensor) -> Tensor:
    """Sum each token's rows with the weights of their experts: [m, h], [n, E] -> [n, h].

    Args:
        token, expert, rows: from `sort_choices`. ``y`` may lack the rows after the last choice.
    """
    exact = torch.promote_types(y.dtype, torch.float32)
    of_rows = expert[rows.clamp(min=0)].clamp(min=0).long()  # [n, k]
    return (_select(y, rows) * weights.gather(1, of_rows).unsqueeze(-1).to(exact)).sum(1, dtype=exact).to(y.dtype)


combine_rows.register_kernel(
    "cuda", lambda y, weights, token, expert, rows: launch("permute", "combine_rows")(y, weights, expert, rows)
)
combine_rows.register_fake(lambda y, weights, token, expert, rows: y.new_empty(len(rows), y.shape[1]))


@custom_op("shoal::combine_rows_backward", mutates_args=())
def combine_rows_backward(
    gradient: Tensor, y: Tensor, weights: Tensor, token: Tensor, expert: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of ``y`` and ``weights`` of `combine_rows` from that of the sums, [n, h]."""
    token, expert = token[: len(y)], expert[: len(y)]
    exact = torch.promote_types(y.dtype, torch.float32)
    of_row = token.clamp(min=0).long(), expert.clamp(min=0).long()
    spread, filled = _select(gradient, token).to(exact), token >= 0
    d_weights = torch.zeros_like(weights)
    d_weights.index_put_(of_row, (spread * y.masked_fill(~filled.unsqueeze(1), 0)).sum(1).to(weights.dtype), True)
    return (spread * weights[of_row].to(exact).unsqueeze(1)).to(y.dtype), d_weights


combine_rows_backward.register_kernel("cuda", launch("permute", "combine_rows_backward"))
combine_rows_backward.register_fake(
    lambda gradient, y, weights, token, expert: (torch.empty_like(y), torch.empty_like(weights))
)


combine_rows.register_autograd(
    lambda ctx, gradient: (*combine_rows_backward(gradient.contiguous(), *ctx.saved_tensors), None, None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:4]),
)


def examples() -> Iterator[Example]:
    """Yield layers whose expert e multiplies a token by e + 1, without and with unused rows."""
    def permuted(x: Tensor, weights: Tensor, chosen: Tensor, m: int, k: int) -> tuple[Tensor, Tensor]:
        token, expert, rows, ends = sort_choices(chosen, m, k)
        y = copy_rows(x, token, rows) * (expert + 1).unsqueeze(1).to(x.dtype)
        return combine_rows(y, weights, token, expert, rows), ends

    def reference(x: Tensor, weights: Tensor, chosen: Tensor, m: int, k: int) -> tuple[Tensor, Tensor]:
        factors = torch.arange(1, weights.shape[1] + 1, device=x.device)
        return x * (weights * chosen * factors).sum(1, keepdim=True), chosen.sum(0).cumsum(0)

    for n, experts, k, h in ((9, 3, 2, 7), (70, 64, 8, 1030)):
        chosen = torch.rand(n, experts).argsort(1) < k
        yield Example(f"permutation, h = {h}", permuted, reference,
                      (torch.randn(n, h), torch.rand(n, experts), chosen, n * k, k))
        dropped = chosen & (torch.rand(n, experts) < 0.5)
        yield Example(f"permutation with drops, h = {h}", permuted, reference,
                      (torch.randn(n, h), torch.rand(n, experts), dropped, n * k + 3, experts))
