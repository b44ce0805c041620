"""Attention in pieces, merged, is attention; so is its backward, from the whole row's log-sum-exp."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine.models.block_attention import attend, attend_backward
from shoal.engine.parallel.context.causal_blocks import ROWS, CausalBlocks, token_positions
from shoal.engine.parallel.context.ring import merge
from shoal.engine.parallel.context.token_order import ORDERS, count_tokens

KERNELS = st.sampled_from(["sdpa", "explicit"])
FEW = st.integers(1, 4)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Written out naively, with its log-sum-exp: [b, a, n, d], [b, k, t, d], [b, 1, n, t]."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)


def numbers(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@settings(max_examples=60)
@given(FEW, FEW, FEW, st.integers(1, 9), st.integers(1, 9), FEW, st.booleans(), st.booleans(), KERNELS, FEW)
def test_a_piece(
    b: int, kv: int, groups: int, n: int, t: int, d: int, causal: bool, masked: bool, kernel: str, seed: int
) -> None:
    t = n if causal else t
    q, k, v = numbers((b, kv * groups, n, 2 * d), (b, kv, t, 2 * d), (b, kv, t, 2 * d), seed=seed)
    seen = torch.ones(b, 1, n, t, dtype=torch.bool)
    if masked:
        seen = torch.rand(b, 1, n, t, generator=torch.Generator().manual_seed(seed)) < 0.5
    if causal:
        seen = seen.tril()
    out, total = attend(q, k, v, seen if masked else None, causal=causal, kernel=kernel)
    expected, expected_total = plain(q, k, v, seen)
    assert torch.allclose(out, expected, atol=1e-12)
    assert torch.equal(total.isneginf(), expected_total.isneginf()), "where a query sees nothing"
    assert torch.allclose(total, expected_total, atol=1e-12)


@pytest.mark.parametrize("kernel", ["sdpa", "explicit"])
def test_more_rows_than_are_alive_at_once(kernel: str) -> None:
    q, k, v = numbers((1, 2, 600, 4), (1, 1, 600, 4), (1, 1, 600, 4))
    seen = torch.ones(1, 1, 600, 600, dtype=torch.bool).tril()
    out, total = attend(q, k, v, causal=True, kernel=kernel)
    expected, expected_total = plain(q, k, v, seen)
    assert torch.allclose(out, expected, atol=1e-12) and torch.allclose(total, expected_total, atol=1e-12)


@st.composite
def spread_rows(draw: st.DrawFn) -> tuple[list, torch.Tensor | None, int]:
    """The tokens of every place, and documents [1, s]."""
    places, s = draw(st.integers(1, 4)), draw(st.integers(8, 40))
    ends = draw(st.lists(st.booleans(), min_size=s, max_size=s))
    documents = torch.tensor(ends).cumsum(0)[None].int() if draw(st.booleans()) else None
    return ORDERS[draw(st.sampled_from(sorted(ORDERS)))](s, places, 1), documents, s


@settings(max_examples=30)
@given(spread_rows(), KERNELS, st.integers(1, 3), st.sampled_from([None, 1, 4, 20]))
def test_pieces_of_all_blocks_merged_are_attention_both_ways(
    drawn, kernel: str, groups: int, window: int | None
) -> None:
    """Blocks in any order after a place's own: as one device's, to 1e-10, forward and backward."""
    held, documents, s = drawn
    q, k, v, gradient = numbers((1, 2 * groups, s, 4), (1, 2, s, 4), (1, 2, s, 4), (1, 2 * groups, s, 4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    seen = torch.ones(s, s, dtype=torch.bool).tril().triu(1 - (window or s))[None, None]
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    expected, _ = plain(*leaves, seen)
    expected.backward(gradient)
    found = [torch.zeros_like(x) for x in (q, q, k, v)]  # the output, and three gradients
    where = [token_positions(chunks, q.device) for chunks in held]
    for place, mine in enumerate(where):
        sight = CausalBlocks(held[place], held, documents, window=window)
        order = [place, *(other for other in range(len(held)) if other != place)]
        rows, of_rows = q[:, :, mine], gradient[:, :, mine]
        out, total = torch.zeros_like(rows), torch.full(rows.shape[:-1], -math.inf, dtype=q.dtype)
        blocks = {other: (k[:, :, where[other]], v[:, :, where[other]]) for other in order}
        for backward in (False, True):
            for other in order:
                for piece in sight.blocks(other):
                    some = (rows[:, :, piece.rows], *(x[:, :, piece.columns] for x in blocks[other]))
                    how = {"mask": sight.mask(piece, other), "causal": piece.causal, "kernel": kernel}
                    if not backward:
                        merge(out[:, :, piece.rows], total[:, :, piece.rows], *attend(*some, **how))
                        continue
                    d_q, d_k, d_v = attend_backward(
                        of_rows[:, :, piece.rows], *some, out[:, :, piece.rows], total[:, :, piece.rows], **how
                    )
                    found[1][:, :, mine[piece.rows]] += d_q
                    found[2][:, :, where[other][piece.columns]] += d_k
                    found[3][:, :, where[other][piece.columns]] += d_v
        found[0][:, :, mine] = out
    for got, wanted in zip(found, (expected, *(x.grad for x in leaves)), strict=True):
        assert (got - wanted).abs().max() < 1e-10


def test_documents_leave_out_what_no_query_sees() -> None:
    """Two documents of half a sequence each: of the second's queries, the first's keys are never computed."""
    s = 8 * ROWS
    documents = (torch.arange(s) >= s // 2).int()[None]
    whole = (range(s),)
    computed = sum(piece.scores for piece in CausalBlocks(whole, [whole], documents).blocks(0))
    assert computed == 2 * (s // 2) * (s // 2 + 1) // 2
    assert not any(piece.masked for piece in CausalBlocks(whole, [whole], documents).blocks(0))
    late = CausalBlocks((range(s // 2, s),), [(range(s // 2),)], documents)
    assert late.blocks(0) == []
    one = CausalBlocks(whole, [whole], torch.zeros(1, s))
    assert one.blocks(0) == CausalBlocks(whole, [whole], None).blocks(0), "one document is cut nowhere"
    assert count_tokens(whole) == s
