"""8-bit Adam in one kernel for each matrix."""

import math
from functools import partial

import pytest
import torch

from shoal.engine.kernels.adam8bit import WIDTH, adam8bit_, dequantise, dynamic_map, nearest_codes
from shoal.engine.optim import adam8bit
from shoal.engine.optim.adam8bit import Adam8bit
from shoal.spec.config import OptimizerConfig
from tests.engine.kernels.triton_tools import OPERATOR_CHECKS, TARGETS, compile_program
from tests.engine.optim.test_low_precision_state import cut

SHAPES = {"layers.0.mlp.up.weight": (6, 3 * WIDTH + 44), "layers.0.mlp.router": (3, 7, 200), "norm.weight": (31,)}


def compare(dtype: torch.dtype, cuts: list[int]) -> None:
    """Compare the rule, on whatever `adam8bit_` launches, with its operations on the CPU."""
    total = sum(math.prod(shape) for shape in SHAPES.values())
    values = torch.randn(2, total, generator=torch.Generator().manual_seed(1))
    results = []
    for fused in (False, True):
        shards, weights, gradients = cut(values, dtype, torch.float32, cuts, SHAPES)
        rule = Adam8bit(OptimizerConfig(name="adam8bit"), shards, seed=3)
        rule.fused = fused
        for step in range(3):
            gradients.copy_(torch.sin(values[1] * (step + 1)))
            rule.step(0.01, scale=torch.tensor(0.5))
        decoded = [
            dequantise(*each)
            for _, tile in rule.tiles for each in zip(tile.codes, tile.scales, rule.levels, strict=True)
        ]  # fmt: skip
        codes = torch.cat([codes for kind in rule.codes for codes in kind])
        results.append((weights, codes, torch.cat([x.flatten() for x in decoded])))
        if fused:
            before = weights.clone(), codes.clone()
            gradients.fill_(math.nan)
            rule.step(0.01, skip=torch.ones(()))
            assert torch.equal(weights, before[0])
            assert torch.equal(torch.cat([codes for kind in rule.codes for codes in kind]), before[1])
    (weights, codes, moments), (fused_weights, fused_codes, fused_moments) = results
    assert (codes == fused_codes).float().mean() > 0.999  # rounding in float32 may decide between two codes
    assert (moments - fused_moments).abs().max() < 0.02 * moments.abs().max()
    if dtype == torch.float32:
        torch.testing.assert_close(fused_weights, weights, rtol=1e-4, atol=1e-4)
    else:
        assert (weights == fused_weights).float().mean() > 0.99
        torch.testing.assert_close(fused_weights, weights, rtol=2.0**-6, atol=1e-3)


CUTS = [[], [2000, 7000]]  # the second splits rows, so that blocks are in two shards


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", CUTS, ids=["complete", "split"])
def test_operator_equals_the_rule_of_the_cpu(dtype: torch.dtype, cuts: list[int]) -> None:
    compare(dtype, cuts)


@pytest.mark.parametrize(("cuts", "dtype"), [(CUTS[0], torch.float32), (CUTS[1], torch.bfloat16)])
def test_program_equals_the_rule_of_the_cpu(interpreted, cuts: list[int], dtype: torch.dtype) -> None:
    interpreted(check_program, cuts, dtype)


def check_program(cuts: list[int], dtype: torch.dtype) -> None:
    from shoal.engine.kernels.programs import adam8bit as programs

    adam8bit.adam8bit_ = partial(programs.update, width=WIDTH)
    compare(dtype, cuts)


def test_operator() -> None:
    """Registrations: schema and fake tensors."""
    weights, gradient = torch.rand(2, 4, WIDTH)
    codes, scales = torch.zeros(2, 4, WIDTH, dtype=torch.uint8), torch.ones(2, 4, 1)
    levels = torch.stack([dynamic_map(signed).float() for signed in (True, False)])
    nearest = torch.stack([nearest_codes(signed) for signed in (True, False)])
    for moments in (torch.empty(0), torch.empty(2, 4, WIDTH)):
        arguments = (
            weights, gradient, *codes, *scales, levels, nearest, torch.zeros(0, dtype=torch.int64), moments,
            torch.ones(()), torch.zeros(()), 1, 0.1, 0.1, 0.9, 0.95, 1e-8, 1,
        )  # fmt: skip
        torch.library.opcheck(adam8bit_, arguments, test_utils=OPERATOR_CHECKS)


@pytest.mark.parametrize("capability", TARGETS.values(), ids=TARGETS)
def test_program_compiles(capability: int) -> None:
    from shoal.engine.kernels.programs import adam8bit as programs

    program = programs.adam8bit_program
    types = {name: "fp32" for name in program.arg_names if name.islower()} | {
        **dict.fromkeys(("weights", "gradient"), "*bf16"), **dict.fromkeys(("mean_codes", "square_codes"), "*u8"),
        **dict.fromkeys(("mean_scales", "square_scales", "levels", "moments", "scale", "skip"), "*fp32"),
        **dict.fromkeys(("key", "rows", "columns", "blocks", "stride"), "i32"), "nearest": "*u8", "starts": "*i64",
    }  # fmt: skip
    constants = {"BLOCKS": programs.BLOCKS, "WIDTH": WIDTH}
    ptx = compile_program(program, capability, types, SHARED=False, **constants)
    assert "ld.global.v4" in ptx  # 16 bytes at a time
    one = {"rows": 1, "blocks": 1}  # Triton makes numbers that are 1 constants
    types = {name: kind for name, kind in types.items() if name not in one}
    compile_program(program, capability, types, SHARED=True, **constants, **one)
