"""Attention with its log-sum-exp: against plain attention, and the calls of torch's CUDA operators on the CPU."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.engine.kernels import flash_attention as module
from shoal.engine.kernels.flash_attention import (
    examples,
    flash_attention,
    flash_attention_backward,
    launch_backward,
    launch_forward,
)
from tests.engine.kernels.triton_tools import OPERATOR_CHECKS

CASES = {example.name.split(", ")[1]: example.inputs for example in examples()}


def doubled(inputs: tuple) -> list:
    return [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]


@pytest.mark.parametrize("case", CASES)
def test_operators(case: str) -> None:
    """Registrations: schema, fake tensors and autograd."""
    q, k, v, *rest = doubled(CASES[case])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(flash_attention, (*leaves, *rest), test_utils=OPERATOR_CHECKS)
    out, total = flash_attention(*leaves, *rest)
    assert out.requires_grad and not total.requires_grad
    q, k, v, out = (x.detach() for x in (q, k, v, out))
    found = (torch.randn_like(out), q, k, v, out, total, *rest)
    for name in ("flash_attention", "flash_attention_backward"):  # not in CUDA graphs
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.shoal, name).default.tags
    torch.library.opcheck(flash_attention_backward, found, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("case", CASES)
def test_gradients(case: str) -> None:
    q, k, v, *rest = doubled(CASES[case])
    leaves = [x[:1, :, :, :4].requires_grad_() if not rest[1:] else x[..., :2].requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *x: flash_attention(*x, *rest)[0], leaves, fast_mode=True)


def test_queries_without_keys() -> None:
    """Zeros, -inf and no gradient: a query before all keys of its segment, and one in a segment without keys."""
    q, k, v = (torch.randn(1, 1, n, 8, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2))
    q_ends, k_ends = (torch.tensor(ends, dtype=torch.int32) for ends in ((0, 3, 4), (0, 2, 2)))
    out, total = flash_attention(q, k, v, True, q_ends, k_ends, torch.tensor([3, 2], dtype=torch.int32))
    assert (out == 0).all(-1).flatten().tolist() == [True, False, False, True]
    assert total.isneginf().flatten().tolist() == [True, False, False, True]
    out.sum().backward()
    assert q.grad[0, 0, [0, 3]].eq(0).all() and not any(x.grad.isnan().any() for x in (q, k, v))


# ---- the calls of torch's operators: on the CPU, by operators written out -------------------------------------------

ARGUMENTS = {
    "_flash_attention_forward": (
        "query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask"
    ),
    "_flash_attention_backward": (
        "grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, "
        "rng_state, unused"
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_schemas_are_the_known_ones(name: str) -> None:
    """A version of torch whose operators take other arguments fails here, on the CPU build already."""
    schema = getattr(torch.ops.aten, name).default._schema
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    assert "window_size_left" in {argument.name for argument in schema.arguments if argument.kwarg_only}
    assert ", ".join(positional) == ARGUMENTS[name]
    kinds = [str(result.type) for result in schema.returns[:3]]
    assert kinds == ["Tensor"] * 3 and (name.endswith("backward") or schema.returns[1].name == "softmax_logsumexp")


class FlashOperators:
    """torch's CUDA operators as they are documented and read: [b, s, a, d] or [b s, a, d], one sequence at a time."""

    def _flash_attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, q_ends, k_ends, max_q: int, max_k: int, dropout: float, causal: bool,
        debug: bool, window_size_left: int = -1,
    ) -> tuple[Tensor, Tensor]:
        assert (dropout, debug) == (0.0, False) and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        if q_ends is None:
            assert (max_q, max_k) == (q.shape[1], k.shape[1])
            found = [flash(*of_sequence, causal, window_size_left) for of_sequence in zip(q, k, v, strict=True)]
            outs, totals = zip(*found, strict=True)
            return torch.stack(outs), torch.stack(totals)
        assert q_ends[-1] == len(q) and k_ends[-1] == len(k) and q_ends.dtype == k_ends.dtype == torch.int32
        assert max_q >= q_ends.diff().max() and max_k >= k_ends.diff().max() and q_ends.is_contiguous()
        out, total = torch.full_like(q, torch.nan), torch.full((q.shape[1], len(q)), torch.nan, dtype=q.dtype)
        for rows, columns in segments(q_ends, k_ends):
            out[rows], found = flash(q[rows], k[columns], v[columns], causal, window_size_left)
            total[:, rows] = found.masked_fill(found.isneginf(), math.inf)
        return out, total

    def _flash_attention_backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, q_ends, k_ends,
        max_q: int, max_k: int, dropout: float, causal: bool, state: Tensor, unused: Tensor, window_size_left: int = -1,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert total.is_contiguous() and state.dtype == torch.uint64 and dropout == 0.0
        found = [torch.zeros_like(x) for x in (q, k, v)]
        if q_ends is None:
            for i in range(len(q)):
                some = [x[i] for x in (gradient, q, k, v, out, total)]
                for x, part in zip(found, flash_backward(*some, causal, window_size_left), strict=True):
                    x[i] = part
            return tuple(found)
        for rows, columns in segments(q_ends, k_ends):
            some = gradient[rows], q[rows], k[columns], v[columns], out[rows], total[:, rows]
            parts = flash_backward(*some, causal, window_size_left)
            for x, place, part in zip(found, (rows, columns, columns), parts, strict=True):
                x[place] = part
        return tuple(found)


def segments(q_ends: Tensor, k_ends: Tensor):
    ends = zip(q_ends[:-1].tolist(), q_ends[1:].tolist(), k_ends[:-1].tolist(), k_ends[1:].tolist(), strict=True)
    return [(slice(a, b), slice(c, d)) for a, b, c, d in ends]


def weights(q: Tensor, k: Tensor, causal: bool, left: int) -> tuple[Tensor, Tensor]:
    """Scores [a, s, t] of one sequence, causal at the lower right, and their log-sum-exp; -1 left is no window."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("sad,tad->ast", q, k) / math.sqrt(q.shape[2])
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1) & causal
    if left >= 0:
        hidden |= torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q) - left - 1)
    scores = scores.masked_fill(hidden, -math.inf)
    return scores, scores.logsumexp(-1)


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int) -> tuple[Tensor, Tensor]:
    scores, total = weights(q, k, causal, left)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("ast,tad->sad", scores.softmax(-1).nan_to_num(0.0), v), total


def flash_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, causal: bool, left: int
) -> tuple[Tensor, Tensor, Tensor]:
    scores, _ = weights(q, k, causal, left)
    p, groups = (scores - total.unsqueeze(-1)).exp().nan_to_num(0.0), q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) for x in (k, v))
    along = (gradient * out).sum(-1).t().unsqueeze(-1)
    ds = p * (torch.einsum("sad,tad->ast", gradient, values) - along) / math.sqrt(q.shape[2])
    d_k, d_v = torch.einsum("ast,sad->tad", ds, q), torch.einsum("ast,sad->tad", p, gradient)
    d_k, d_v = (x.unflatten(1, (-1, groups)).sum(2) for x in (d_k, d_v))
    return torch.einsum("ast,tad->sad", ds, keys), d_k, d_v


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_calls_on_cuda_give_what_the_operator_promises(monkeypatch, case: str, packed: bool) -> None:
    monkeypatch.setattr(module, "_aten", FlashOperators())
    q, k, v, *rest = doubled(CASES[case])
    if packed and q.shape[2] == k.shape[2]:  # views of one projection's output: [b, s, (a + 2 k) d]
        q, k, v = torch.cat([x.transpose(1, 2) for x in (q, k, v)], 2).split([4, 2, 2], 2)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        assert module._rows(q, rest[1] if rest[1:] else None).data_ptr() == q.data_ptr(), "no copy"
    out, total = launch_forward(q, k, v, *rest)
    expected, expected_total = flash_attention(q, k, v, *rest)
    torch.testing.assert_close((out, total), (expected, expected_total))
    assert out.stride() == expected.stride() and total.is_contiguous()
    more = (total + 0.3).repeat(1, 1, 2)[:, :, : q.shape[2]]  # as if over more keys; the kernel reads it by its address
    assert not more.is_contiguous()
    gradient = torch.randn_like(out)
    inputs = (gradient, q, k, v, out, more, *rest)
    torch.testing.assert_close(launch_backward(*inputs), flash_attention_backward(*inputs))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=5), st.booleans())
def test_any_segments(lengths: list[tuple[int, int]], causal: bool) -> None:
    """One sequence is cut into segments, of which many have no queries or no keys."""
    ends = [torch.tensor([0, *x], dtype=torch.int32).cumsum(0).int() for x in zip(*lengths, strict=True)]
    n, t = (int(x[-1]) for x in ends)
    if not n * t:
        return
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, a, x, 8, generator=generator, dtype=torch.float64) for a, x in ((4, n), (2, t), (2, t)))
    rest = (causal, *ends, torch.tensor([4, 5], dtype=torch.int32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_aten", FlashOperators())
        out, total = launch_forward(q, k, v, *rest)
        torch.testing.assert_close((out, total), flash_attention(q, k, v, *rest))
        inputs = (torch.randn(out.shape, generator=generator, dtype=torch.float64), q, k, v, out, total, *rest)
        torch.testing.assert_close(launch_backward(*inputs), flash_attention_backward(*inputs))
