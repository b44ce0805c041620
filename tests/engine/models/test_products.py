"""Who multiplies float32 matrices on the CPU, and that they stay float32."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal.engine.models import products
from shoal.engine.models.attention import AttentionCore
from shoal.engine.models.experts.grouped import GroupedFunction
from shoal.engine.models.norm import RMSNorm
from shoal.engine.models.products import by_mkl, tune_products


def precision() -> str:
    return torch.get_float32_matmul_precision()


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    before = products._by_onednn
    products._choose(onednn=False)
    yield
    products._choose(onednn=before)


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor whose products oneDNN makes, whatever this one is and however it multiplies."""
    monkeypatch.setattr(products, "_multiplies_faster", lambda: True)
    monkeypatch.setattr(products, "_exact", lambda: True)
    assert tune_products()


@pytest.mark.parametrize(
    "vendor, capability, faster",
    [("AuthenticAMD", "AVX512", True), ("AuthenticAMD", "AVX2", False), ("GenuineIntel", "AVX512", False)],
)
def test_who_is_faster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vendor: str, capability: str, faster: bool
) -> None:
    said = tmp_path / "cpuinfo"
    said.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: 25\n\nprocessor\t: 1\n")
    monkeypatch.setattr(products, "_CPUINFO", said)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert products._multiplies_faster() == faster


def test_elsewhere_nothing_is_said_of_the_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(products, "_CPUINFO", tmp_path / "none")
    assert not products._multiplies_faster()


def test_products_that_are_rounded_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_multiplies_faster", lambda: True)
    multiply = torch.Tensor.__matmul__

    def rounded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype == torch.float32 and precision() == "medium":
            a, b = a.bfloat16().float(), b.bfloat16().float()
        return multiply(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    assert not tune_products()
    assert precision() == "highest"


@pytest.mark.parametrize("tokens, inputs, outputs", [(1, 64, 48), (7, 33, 129), (256, 512, 320)])
def test_tuned_products_are_float32s(
    monkeypatch: pytest.MonkeyPatch, tokens: int, inputs: int, outputs: int
) -> None:
    """In each form that a layer's forward and backward have, wherever this processor lets itself be tuned."""
    monkeypatch.setattr(products, "_multiplies_faster", lambda: True)
    tune_products()
    generator = torch.Generator().manual_seed(0)
    sizes = (tokens, inputs), (outputs, inputs), (tokens, outputs)
    x, w, g = (torch.randn(size, generator=generator) for size in sizes)
    total = torch.ones(outputs, inputs)
    for got, exact in (
        (x @ w.t(), x.double() @ w.double().t()),
        (g @ w, g.double() @ w.double()),
        (torch.addmm(total, g.t(), x, out=total), 1 + g.double().t() @ x.double()),
    ):
        assert (got - exact).abs().max() < products._EXACT * exact.abs().max()


def test_what_is_mkls_inside(onednn: None) -> None:
    with pytest.raises(ZeroDivisionError), by_mkl():
        assert precision() == "highest"
        with by_mkl():  # as inner ones are
            pass
        assert precision() == "highest"
        _ = 1 / 0
    assert precision() == "medium"


def test_the_vectors_of_a_norms_backward_are_mkls(onednn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, multiply = [], torch.Tensor.__matmul__

    def watched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.append(precision())
        return multiply(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    RMSNorm(8)(torch.randn(3, 8, requires_grad=True)).sum().backward()
    assert seen == ["highest"] * 2
    assert precision() == "medium"


def test_grouped_products_are_mkls(onednn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, multiply = [], torch.mm

    def watched(*operands: torch.Tensor, **how: torch.Tensor) -> torch.Tensor:
        seen.append(precision())
        return multiply(*operands, **how)

    monkeypatch.setattr(torch, "mm", watched)
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(2, 4, 8, requires_grad=True)
    GroupedFunction.apply(x, weight, [2, 3], None).sum().backward()
    assert seen == ["highest"] * 6
    assert precision() == "medium"


@pytest.mark.parametrize("keys, inside", [(64, "highest"), (1024, "medium")])
def test_attention_over_few_keys_is_mkls_forward_and_backward(
    onednn: None, monkeypatch: pytest.MonkeyPatch, keys: int, inside: str
) -> None:
    seen, attend = [], torch.nn.functional.scaled_dot_product_attention

    def watched(*inputs: torch.Tensor, **how: object) -> torch.Tensor:
        seen.append(precision())
        return attend(*inputs, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    q = torch.randn(1, 1, keys, 32, requires_grad=True)
    out = AttentionCore()(q, q, q, None)
    out.grad_fn.register_prehook(lambda gradients: seen.append(precision()))  # called last, before the kernel
    out.sum().backward()
    assert seen == [inside, inside]
    assert precision() == "medium"
