"""The choice of attention kernels, and documents as lengths instead of a mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine.compiler import prepare_compiler
from shoal.engine.models import attention, attention_kernels
from shoal.engine.models.attention import Mask, causal_mask, document_mask
from shoal.engine.models.attention_kernels import CudaDevice, choose_kernels, takes_lengths
from shoal.engine.models.cache import Slice
from shoal.engine.models.segments import Segments, document_segments
from shoal.engine.models.transformer import Transformer, initialise
from shoal.spec.catalog import model_shape

A100, H200, B200, T4 = (CudaDevice(of, 91900) for of in ((8, 0), (9, 0), (10, 0), (7, 5)))
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "dtype", "d", "mask", "kernels"),
    [
        (None, BF16, 128, "causal", "cpu"),
        (None, FP64, 128, "dense", "cpu"),
        (None, BF16, 128, "lengths", ""),
        (H200, BF16, 128, "causal", "cudnn flash efficient"),
        (B200, FP16, 64, "causal", "cudnn flash efficient"),
        (H200._replace(cudnn=91002), BF16, 128, "causal", "flash efficient"),  # wrong for odd lengths
        (A100, BF16, 128, "causal", "flash efficient"),
        (A100, BF16, 20, "causal", "flash efficient"),  # which torch pads
        (H200, BF16, 320, "causal", "efficient"),
        (H200, BF16, 128, "dense", "efficient"),
        (H200, BF16, 20, "dense", "math"),
        (H200, BF16, 128, "lengths", "flash"),
        (A100, FP16, 256, "lengths", "flash"),
        (A100, FP16, 20, "lengths", ""),
        (H200, BF16, 264, "lengths", ""),
        (T4, FP16, 64, "causal", "efficient"),
        (T4, FP16, 64, "lengths", ""),
        (H200, FP32, 128, "causal", "efficient math"),
        (H200, FP32, 128, "dense", "efficient math"),
        (H200, FP32, 128, "lengths", ""),
        (H200, FP64, 128, "causal", "math"),
        (H200, FP64, 128, "lengths", ""),
    ],
)  # fmt: skip
def test_choice(device, dtype, d, mask, kernels: str) -> None:
    assert choose_kernels(device, dtype, d, mask) == tuple(kernels.split())


def test_narrow_formats_never_store_all_scores_for_common_widths() -> None:
    for device in (A100, H200, B200):
        for d in (64, 80, 96, 128, 192, 256):
            for mask in ("causal", "lengths", "dense"):
                assert "math" not in choose_kernels(device, BF16, d, mask)


@pytest.fixture
def lengths(monkeypatch) -> None:
    """Attention takes lengths on the CPU and in any format, as on CUDA in narrow ones."""
    choose = choose_kernels
    monkeypatch.setattr(
        attention_kernels, "choose_kernels", lambda *of: ("flash",) if of[-1] == "lengths" else choose(*of)
    )


def test_masks_by_device_and_kernel(lengths) -> None:
    x, documents = torch.zeros(1, 3, 8), torch.tensor([[0, 0, 1, 1]])
    assert takes_lengths(CPU, FP64, 4)
    assert isinstance(Mask("sdpa", 4)(1, 3, documents, x), Segments)
    assert Mask("sdpa", 4)(1, 3, None, x) is None
    for dense in (Mask("explicit", 4), Mask()):
        assert torch.equal(dense(1, 3, documents, x), document_mask(documents, 3))
        assert torch.equal(dense(1, 3, None, x), causal_mask(3, 4, CPU)[None, None])


def test_segments_by_hand() -> None:
    """The last three tokens of two sequences; their number is rounded up, and so is the longest."""
    found = document_segments(torch.tensor([[0, 0, 1, 1, 2], [3, 4, 4, 4, 4]]), 3, CPU)
    assert found.q_ends.tolist() == [0, 0, 2, 3, 3, 6] + [6] * 11
    assert found.k_ends.tolist() == [0, 2, 4, 5, 6, 10] + [10] * 11
    assert found.longest.tolist() == [128, 128] and found.q_ends.dtype == torch.int32


def losses(model: Transformer, tokens: torch.Tensor, documents: torch.Tensor | None, at: list[int]) -> list:
    """The summed loss over slices that end at ``at``, and all gradients."""
    model.zero_grad()
    parts, outputs, start = [], [], 0
    for stop in at:
        part = None if at == [tokens.shape[1]] else Slice(parts[-1] if parts else None)
        parts.append(part)
        outputs.append(model(tokens[:, start:stop], tokens[:, start:stop], documents, part=part))
        start = stop
    for part, output in zip(reversed(parts), reversed(outputs), strict=True):
        roots = ([], []) if part is None else (part.roots(), part.root_gradients())
        torch.autograd.backward([output, *roots[0]], [None, *roots[1]])
    return [sum(output.detach() for output in outputs), *(p.grad.clone() for p in model.parameters())]


@settings(max_examples=8, deadline=None)
@given(
    recompute=st.sampled_from(["none", "selective", "full"]), packed=st.booleans(), slices=st.booleans(),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_steps_by_lengths_are_steps_by_masks(recompute: str, packed: bool, slices: bool, seed: int) -> None:
    """Loss and gradients, with documents and without, of full sequences and of slices."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"layers": 2, "vocab": 50, "hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 16}
    model = Transformer(model_shape("tiny").model_copy(update=sizes), recompute=recompute).double()
    initialise(model, seed=0)
    tokens = torch.randint(0, 50, (2, 12), generator=generator)
    documents = (torch.rand(2, 12, generator=generator) < 0.3).cumsum(1).int() if packed else None
    at = [5, 6, 12] if slices else [12]
    expected = losses(model, tokens, documents, at)
    with pytest.MonkeyPatch.context() as patch:
        choose, called = choose_kernels, []
        patch.setattr(
            attention_kernels, "choose_kernels", lambda *of: ("flash",) if of[-1] == "lengths" else choose(*of)
        )
        flash = attention.flash_attention
        patch.setattr(attention, "flash_attention", lambda *of: called.append(of) or flash(*of))
        found = losses(model, tokens, documents, at)
    assert bool(called) == (packed or slices)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_under_the_compiler(lengths) -> None:
    """One graph, which other lengths do not compile again."""
    prepare_compiler()
    torch._dynamo.reset()
    core, compiled = attention.AttentionCore(), []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    fast = torch.compile(core, backend=backend, dynamic=False, fullgraph=True)
    q, k = torch.randn(1, 4, 12, 8, dtype=FP64), torch.randn(1, 2, 12, 8, dtype=FP64)
    for ends in ([5, 12], [1, 12], [11, 12]):
        documents = torch.tensor([[sum(i >= end for end in ends) for i in range(12)]])
        out = fast(q, k, k, document_segments(documents, 12, CPU))
        torch.testing.assert_close(out, core(q, k, k, document_mask(documents, 12)))
    assert len(compiled) == 1


def test_the_order_of_kernels_under_the_compiler(monkeypatch) -> None:
    monkeypatch.setattr(attention_kernels, "describe_device", lambda device: H200)
    prepare_compiler()
    torch._dynamo.reset()
    fast = torch.compile(attention._attend_on_cuda, backend="eager", dynamic=False, fullgraph=True)
    q, k = torch.randn(1, 4, 12, 8).bfloat16(), torch.randn(1, 2, 12, 8).bfloat16()
    before = torch._C._get_sdp_priority_order()
    torch.testing.assert_close(fast(q, k, k, None), attention.AttentionCore()(q, k, k, None))
    assert torch._C._get_sdp_priority_order() == before and torch.backends.cuda.math_sdp_enabled()
