"""Muon's orthogonalisation of several matrices at once, as a GPU does it."""

import pytest
import torch

from shoal.engine.optim import muon
from shoal.engine.optim.build import build
from shoal.engine.optim.muon import newton_schulz, orthogonal
from shoal.engine.optim.shards import Shards
from shoal.spec.config import OptimizerConfig


@pytest.mark.parametrize("shape", [(1, 5, 5), (3, 24, 80), (4, 80, 24), (2, 130, 129)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_batches_equal_single_matrices(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = torch.stack([orthogonal(matrix) for matrix in matrices])
    tolerance = 1e-9 if dtype == torch.float64 else 5e-4
    torch.testing.assert_close(newton_schulz(matrices), expected, rtol=tolerance, atol=tolerance)


def test_bfloat16_ends_as_close_to_orthogonal(monkeypatch) -> None:
    monkeypatch.setattr(muon, "product_dtype", lambda dtype, device: torch.bfloat16)
    matrices = torch.randn(3, 32, 96, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(newton_schulz(matrices))
    assert values.min() > 0.6 and values.max() < 1.3


def test_matrices_of_one_shape_are_one_batch(monkeypatch) -> None:
    """Two layers, each with two matrices of one shape and a transposed one, also cut into experts."""
    shapes = {"up": (6, 4), "gate": (6, 4), "down": (4, 6), "experts": (3, 6, 4)}
    named = [(f"layers.{i}.{name}", torch.randn(shape), torch.randn(shape))
             for i in range(2) for name, shape in shapes.items()]
    seen, exact = [], muon.orthogonalise_
    monkeypatch.setattr(muon, "orthogonalise_", lambda x, factor: (seen.append(tuple(x.shape)), exact(x, factor))[1])
    rule = build(OptimizerConfig(name="muon"), Shards.from_parameters(named, lambda *_: 0.0))
    rule.step(0.1)
    assert sorted(seen) == [(2, 4, 6), (10, 6, 4)]
