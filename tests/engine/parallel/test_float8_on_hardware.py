"""Steps with the operands of hardware, multiplied here by a model of torch's product, equal the emulated ones."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from shoal.engine import kernels
from shoal.engine.parallel.float8.encoding import Encoder
from shoal.engine.parallel.float8.product import Float8Product
from shoal.engine.precision import recipe
from shoal.engine.precision.recipe import Recipe
from shoal.spec.config import RunConfig
from shoal.testing.verify.case import prepare
from tests.engine.parallel.counting import engine_of
from tests.engine.parallel.test_float8 import MODEL, in_float8, take_steps
from tests.testing.verify.runs import small_run

CASES = [
    ({"tp": 2}, "fp8", {}),
    ({"tp": 2}, "fp8", {"scales": "row"}),
    ({"tp": 2, "sequence_parallel": True}, "fp8", {"amax": "delayed", "history": 2}),
    ({"dp": 2, "zero": 3, "recompute": "full"}, "fp8", {"scales": "block", "block": 32}),
    ({"pp": 2, "schedule": "zb-h1"}, "mxfp8", {}),
    ({"tp": 2, "recompute": "full"}, "nvfp4", {}),
    ({"pp": 2, "schedule": "zb-h1"}, "nvfp4", {}),
]
MICRO_BATCHES = 2


@pytest.mark.parametrize(("parallel", "precision", "settings"), CASES, ids=str)
def test_operands_of_hardware_give_the_emulated_step(pool, parallel, precision, settings):
    compare(pool, parallel, precision, settings, MODEL["ffn"], blocks=2)


def test_a_block_with_an_unfit_side_is_decoded_alone(pool):
    compare(pool, {"tp": 2}, "fp8", {"scales": "row"}, 120, blocks=1)  # 60 on a rank, no multiple of 8


def compare(pool, parallel, precision, settings, ffn, blocks):
    model = MODEL | {"layers": parallel.get("pp", 1), "ffn": ffn}
    config = in_float8(small_run(parallel, model), precision, settings)
    config = prepare(config, own_precision=False).config
    for emulated, *found in pool.run(_all, config.parallel.world_size, config):
        for (native, products, encodings), fused in zip(found, (False, True), strict=True):
            of_layer = 2 * blocks  # of attention, and of the feed-forward block
            assert products == (3 + (parallel.get("recompute") == "full")) * of_layer * steps_of(config) * MICRO_BATCHES
            torch.testing.assert_close(native, emulated, rtol=1e-12, atol=0)
            expected = {"plain"} if precision != "nvfp4" else set()
            if fused and precision != "nvfp4":
                expected |= {"swiglu", "swiglu_backward"} if blocks == 2 else set()
                expected |= {"norm"} if parallel.get("tp", 1) == 1 else set()
            assert encodings == expected


def steps_of(config: RunConfig) -> int:
    """A history of two steps is complete, and has lost a value, in the third."""
    return 3 if config.float8.amax == "delayed" else 2


def _all(config: RunConfig) -> tuple[Tensor, tuple, tuple]:
    """Losses and gradient norms of emulated steps; and of native ones without and with fused operators, with the number
    of native products and what was encoded."""
    emulated = _steps(config)
    return emulated, *(_native(config, fused, _steps) for fused in (False, True))


def _native(config: RunConfig, fused: bool, steps: Callable[[RunConfig], Any]) -> tuple[Any, int, set[str]]:
    """Return what ``steps`` does with native products, their number, and what was encoded."""
    calls: list[bool] = []
    sources, encode = set(), Encoder.encode_result

    def encode_result(self, source, *args):
        sources.add(source)
        return encode(self, source, *args)

    def product(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype, use_fast_accum=False, out=None):
        calls.append(use_fast_accum)
        assert a.is_contiguous() and b.t().is_contiguous() and a.dtype.itemsize == 1
        y = (decode(a, scale_a, config) @ decode(b.t(), scale_b.t(), config).t()).to(out_dtype)
        return y if out is None else out.copy_(y)

    def product_in_4_bits(a: Tensor, b: Tensor, scale_a, levels_a, scale_b, levels_b, *layouts, output_dtype):
        calls.append(False)
        assert a.is_contiguous() and b.t().is_contiguous() and a.dtype == b.dtype == torch.float4_e2m1fn_x2
        assert levels_a == levels_b == [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        assert layouts == ([SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE],) * 2
        return (decode_in_4_bits(a, *scale_a) @ decode_in_4_bits(b.t(), *scale_b).t()).to(output_dtype)

    block = config.float8.block
    with (
        patch.object(Recipe, "is_native", lambda self, compute, device: True), patch.object(Recipe, "alignment", 8),
        patch.object(torch, "_scaled_mm", product), patch.object(F, "scaled_mm", product_in_4_bits),
        patch.object(kernels, "use_fused", lambda x: fused),
        patch.object(Encoder, "encode_result", encode_result), patch.object(recipe, "HARDWARE_BLOCK", block),
    ):  # fmt: skip
        return steps(config), len(calls), sources


@pytest.mark.parametrize("settings", [{"amax": "delayed", "history": 2}, {"scales": "block", "block": 32}], ids=str)
def test_fused_operators_are_compiled(pool, settings):
    """Captured and differentiated as one graph for each layer, but not made into C++."""
    config = in_float8(small_run({}, MODEL | {"layers": 1}), "fp64-fp8", settings)
    ((expected, graphs, encodings),) = pool.run(_compiled, 1, config, False)
    assert graphs == 0 and encodings == {"plain", "norm", "swiglu", "swiglu_backward"}
    ((found, graphs, encodings),) = pool.run(_compiled, 1, config, True, timeout=300)
    assert graphs > 0 and encodings == {"plain", "norm", "swiglu", "swiglu_backward"}
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


def _compiled(config: RunConfig, compile: bool) -> tuple[Tensor, int, set[str]]:
    """Losses and gradient norms, number of compiled graphs, and what was encoded."""
    config = config.model_copy(update={"train": config.train.model_copy(update={"compile": compile})})
    (values, graphs), _, encodings = _native(config, True, take_steps)
    return values, graphs, encodings


def _steps(config: RunConfig) -> Tensor:
    engine = engine_of(config)
    assert any(isinstance(getattr(m, "product", None), Float8Product) for m in engine.stages[0].module.modules())
    results = [engine.step(step) for step in range(steps_of(config))]
    return torch.tensor([(result.loss, result.gradient_norm) for result in results], dtype=torch.float64)


def decode(codes: Tensor, inverse: Tensor, config: RunConfig) -> Tensor:
    """Multiply codes [m, k] by their inverse scales, as documented by torch and cuBLAS."""
    (m, k), block = codes.shape, config.float8.block
    if inverse.numel() == 1:
        return codes.double() * inverse
    if inverse.dtype == torch.float8_e8m0fnu:  # in tiles of 128 rows and 4 blocks of 32
        return codes.double() * spread_tiles(inverse, m, k, 32)
    if inverse.shape == (m, 1) and config.float8.scales == "row":
        return codes.double() * inverse
    spread = inverse.double().repeat_interleave(block, 1)[:, :k]
    if len(inverse) < m:
        spread = spread.repeat_interleave(block, 0)[:m]
        assert inverse.is_contiguous()
    else:
        assert inverse.stride(0) == 1
    return codes.double() * spread


def decode_in_4_bits(codes: Tensor, inverse: Tensor, factor: Tensor) -> Tensor:
    """Multiply codes of e2m1, two in a byte, by their inverse scales and the tensor's."""
    assert inverse.dtype == torch.float8_e4m3fn
    codes = codes.view(torch.uint8)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    values = torch.cat((numbers, -numbers))[torch.stack((codes % 16, codes // 16), -1).flatten(1).long()]
    return values * spread_tiles(inverse, *values.shape, 16) * factor


def spread_tiles(inverse: Tensor, m: int, k: int, block: int) -> Tensor:
    """Return one inverse scale for each element [m, k], from tiles of 128 rows and 4 blocks."""
    row, column = torch.arange(m)[:, None], torch.arange(k)[None, :] // block
    tile = row // 128 * -(-k // (4 * block)) + column // 4
    return inverse.double()[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4]
