"""The attention core and rotary positions, for every size."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from shoal.engine.models import attention, attention_kernels, block_attention
from shoal.engine.models.attention import (
    AttentionCore,
    Mask,
    causal_mask,
    document_mask,
    explicit_attention,
    rotary_table,
    rotate,
)
from shoal.engine.models.attention_kernels import CudaDevice

SMALL = st.integers(1, 5)
H200 = CudaDevice((9, 0), 91900)


@pytest.mark.parametrize(
    ("dtype", "masked", "heads", "first"),
    [
        (torch.float32, False, 8, "EFFICIENT_ATTENTION"), (torch.float32, True, 8, "EFFICIENT_ATTENTION"),
        (torch.bfloat16, True, 8, "EFFICIENT_ATTENTION"), (torch.bfloat16, False, 4, "CUDNN_ATTENTION"),
    ],
)  # fmt: skip
def test_on_cuda_key_heads_are_repeated_only_for_kernels_without_groups(monkeypatch, dtype, masked, heads, first):
    """cuDNN and flash attention know groups, in narrow formats and without a mask."""
    given = {}

    def kernel(q, k, v, **how):
        given.update(how, heads=k.shape[1])
        return q

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", kernel)
    given_backends = lambda backends, set_priority: given.update(backends=backends) or nullcontext()  # noqa: E731
    monkeypatch.setattr(attention, "sdpa_kernel", given_backends)
    monkeypatch.setattr(attention_kernels, "describe_device", lambda device: H200)
    with FakeTensorMode():
        q, k = (torch.empty(2, n, 16, 8, dtype=dtype, device="cuda") for n in (8, 4))
        mask = torch.empty(1, 1, 16, 16, dtype=torch.bool, device="cuda") if masked else None
        AttentionCore()(q, k, k, mask)
    assert given["heads"] == heads and given["enable_gqa"] == (heads == 4)
    assert given["backends"][0].name == first and (dtype == torch.float32 or SDPBackend.MATH not in given["backends"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    b=SMALL, groups=SMALL, kv=st.integers(1, 3), s=st.integers(1, 9), past=st.sampled_from((0, 1, 4)), d=SMALL,
    packed=st.booleans(), rows=SMALL, seed=SMALL, window=st.sampled_from([None, 1, 2, 4]),
    softcap=st.sampled_from([None, 0.5]), sinks=st.booleans(), kernel=st.sampled_from(["sdpa", "explicit"]),
)
def test_explicit_and_capped_attention_are_the_formula(
    monkeypatch: pytest.MonkeyPatch,
    b: int, groups: int, kv: int, s: int, past: int, d: int, packed: bool, rows: int, seed: int, window: int | None,
    softcap: float | None, sinks: bool, kernel: str,
) -> None:
    """In any number of blocks of queries, the last of them as it comes; with capped scores or sinks, as written out."""
    monkeypatch.setattr(attention, "_MIN_ROWS", rows)
    monkeypatch.setattr(block_attention, "_ROWS", rows)
    torch.manual_seed(seed)
    t = past + s
    q = torch.randn(b, groups * kv, s, d, dtype=torch.float64, requires_grad=True)
    k, v = torch.randn(2, b, kv, t, d, dtype=torch.float64).unbind()
    documents = torch.randint(0, 2, (b, t)).cumsum(1) if packed else None
    mask = Mask(window=window)(past, s, documents, q)
    k.requires_grad_(), v.requires_grad_()
    more = torch.randn(groups * kv, dtype=torch.float64, requires_grad=True) if sinks else None
    expected = write_out(q, k, v, documents, window, softcap, more)
    got = AttentionCore(kernel, window, softcap)(q, k, v, mask, more)
    if softcap is None and not sinks:
        torch.testing.assert_close(got, expected)
        got = explicit_attention(q, k, v, mask, window if window and window < t else None)
    torch.testing.assert_close(got, expected)
    weight = torch.randn_like(got)
    for a, b_ in zip(
        torch.autograd.grad((got * weight).sum(), (q, k, v, *([] if more is None else [more]))),
        torch.autograd.grad((expected * weight).sum(), (q, k, v, *([] if more is None else [more]))),
        strict=True,
    ):
        torch.testing.assert_close(a, b_)


def write_out(q, k, v, documents, window: int | None, softcap: float | None, sinks=None) -> torch.Tensor:
    """Attention of each query to the keys at most ``window - 1`` before it, in its document; and to a sink."""
    s, t = q.shape[2], k.shape[2]
    distance = torch.arange(t - s, t)[:, None] - torch.arange(t)
    seen = (distance >= 0) & (distance < (window or t))
    if documents is not None:
        seen = (seen & (documents[:, t - s :, None] == documents[:, None]))[:, None]
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[3] ** 0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)), -1)
    return scores.softmax(-1)[..., :t] @ v


def test_a_document_mask_by_hand() -> None:
    mask = document_mask(torch.tensor([[0, 0, 1]]), 3)
    assert mask.tolist() == [[[[True, False, False], [True, True, False], [False, False, True]]]]


@given(s=st.integers(1, 6), past=st.integers(0, 6))
def test_the_masks_of_a_slice_are_the_last_rows_of_the_whole_ones(s: int, past: int) -> None:
    documents = torch.randint(0, 2, (2, past + s)).cumsum(1)
    assert torch.equal(document_mask(documents, s), document_mask(documents, past + s)[:, :, past:])
    whole = causal_mask(past + s, past + s, documents.device)
    assert torch.equal(causal_mask(s, past + s, documents.device), whole[past:])


@settings(max_examples=40, deadline=None)
@given(s=st.integers(1, 12), half=st.integers(1, 8), shift=st.integers(0, 20))
def test_rotary_positions_keep_lengths_and_see_only_distances(s: int, half: int, shift: int) -> None:
    torch.manual_seed(0)
    cos, sin = rotary_table(torch.arange(s + shift), 2 * half, 10000.0, torch.float64)
    q, k = torch.randn(2, 1, 1, s, 2 * half, dtype=torch.float64).unbind()
    here = [rotate(x, cos[:s], sin[:s]) for x in (q, k)]
    there = [rotate(x, cos[shift:], sin[shift:]) for x in (q, k)]
    torch.testing.assert_close(here[0].norm(dim=-1), q.norm(dim=-1))
    torch.testing.assert_close(here[0] @ here[1].transpose(2, 3), there[0] @ there[1].transpose(2, 3))
    torch.testing.assert_close(here[0][..., 0, :], q[..., 0, :])  # position 0 is not turned


def test_rotary_angles_stay_exact_far_out_in_half_precision() -> None:
    """Position 10,000 in bf16 would be a multiple of 64: the angles must be computed before they are rounded."""
    s = 10_001
    cos, _ = rotary_table(torch.arange(s), 2, 10000.0, torch.bfloat16)
    exact = torch.tensor(10_000.0, dtype=torch.float64).cos()
    assert cos.dtype == torch.bfloat16
    assert abs(cos[-1, 0].double() - exact) < 2**-8


def test_rotation_is_the_formula_written_out_and_turns_gradients_back():
    x, dy = (torch.randn(2, 3, 5, 8, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()
    cos, sin = rotary_table(torch.arange(5), 8, 1e4, torch.float64)
    first, second = x.chunk(2, dim=-1)
    written_out = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    turned = rotate(x, cos, sin)
    torch.testing.assert_close(turned, written_out)
    torch.testing.assert_close(
        torch.autograd.grad(turned, x, dy), torch.autograd.grad(written_out, x, dy)
    )
