"""Steps with the operands of hardware, multiplied here by a model of `torch._scaled_mm`, equal the emulated ones."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shoal.engine.parallel.float8_product import Float8Product
from shoal.engine.precision import recipe
from shoal.engine.precision.recipe import Recipe
from shoal.spec.config import RunConfig
from shoal.testing.verify.case import prepare
from tests.engine.parallel.counting import engine_of
from tests.engine.parallel.test_float8 import MODEL, in_float8
from tests.testing.verify.runs import small_run

CASES = [
    ({"tp": 2}, "fp8", {}),
    ({"tp": 2}, "fp8", {"scales": "row"}),
    ({"tp": 2, "sequence_parallel": True}, "fp8", {"amax": "delayed", "history": 2}),
    ({"dp": 2, "zero": 3, "recompute": "full"}, "fp8", {"scales": "block", "block": 32}),
    ({"pp": 2, "schedule": "zb-h1"}, "mxfp8", {}),
]
STEPS, MICRO_BATCHES = 3, 2


@pytest.mark.parametrize(("parallel", "precision", "settings"), CASES, ids=str)
def test_operands_of_hardware_give_the_emulated_step(pool, parallel, precision, settings):
    compare(pool, parallel, precision, settings, MODEL["ffn"], blocks=2)


def test_a_block_with_an_unfit_side_is_decoded_alone(pool):
    compare(pool, {"tp": 2}, "fp8", {"scales": "row"}, 120, blocks=1)  # 60 on a rank, no multiple of 8


def compare(pool, parallel, precision, settings, ffn, blocks):
    model = MODEL | {"layers": parallel.get("pp", 1), "ffn": ffn}
    config = in_float8(small_run(parallel, model), precision, settings)
    config = prepare(config, own_precision=False).config
    for emulated, native, products in pool.run(_both, config.parallel.world_size, config):
        of_layer = 2 * blocks  # of attention, and of the feed-forward block
        assert products == (3 + (parallel.get("recompute") == "full")) * of_layer * STEPS * MICRO_BATCHES
        torch.testing.assert_close(native, emulated, rtol=1e-12, atol=0)


def _both(config: RunConfig) -> tuple[Tensor, Tensor, int]:
    """Losses and gradient norms of emulated and of native steps, and the number of native products."""
    emulated, calls = _steps(config), []

    def product(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype, use_fast_accum=False, out=None):
        calls.append(use_fast_accum)
        assert a.is_contiguous() and b.t().is_contiguous() and a.dtype.itemsize == 1
        y = (decode(a, scale_a, config) @ decode(b.t(), scale_b.t(), config).t()).to(out_dtype)
        return y if out is None else out.copy_(y)

    with (
        patch.object(Recipe, "is_native", lambda self, compute, device: True), patch.object(Recipe, "alignment", 8),
        patch.object(torch, "_scaled_mm", product), patch.object(recipe, "HARDWARE_BLOCK", config.float8.block),
    ):  # fmt: skip
        return emulated, _steps(config), len(calls)


def _steps(config: RunConfig) -> Tensor:
    engine = engine_of(config)
    assert any(isinstance(getattr(m, "product", None), Float8Product) for m in engine.stages[0].module.modules())
    results = [engine.step(step) for step in range(STEPS)]
    return torch.tensor([(result.loss, result.gradient_norm) for result in results], dtype=torch.float64)


def decode(codes: Tensor, inverse: Tensor, config: RunConfig) -> Tensor:
    """Multiply codes [m, k] by their inverse scales, as documented by torch and cuBLAS."""
    (m, k), block = codes.shape, config.float8.block
    if inverse.numel() == 1:
        return codes.double() * inverse
    if inverse.dtype == torch.float8_e8m0fnu:  # in tiles of 128 rows and 4 blocks of 32
        row, column = torch.arange(m)[:, None], torch.arange(k)[None, :] // 32
        tile = row // 128 * -(-k // 128) + column // 4
        return codes.double() * inverse.double()[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4]
    if inverse.shape == (m, 1) and config.float8.scales == "row":
        return codes.double() * inverse
    spread = inverse.double().repeat_interleave(block, 1)[:, :k]
    if len(inverse) < m:
        spread = spread.repeat_interleave(block, 0)[:m]
        assert inverse.is_contiguous()
    else:
        assert inverse.stride(0) == 1
    return codes.double() * spread
