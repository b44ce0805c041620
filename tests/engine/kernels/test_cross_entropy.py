"""Softmax statistics of logits, and the gradient that overwrites them."""

import pytest
import torch

from shoal.engine.kernels.cross_entropy import examples, overwrite_with_gradient, softmax_statistics
from tests.engine.kernels.triton_tools import OPERATOR_CHECKS, TARGETS, compile_program

EXAMPLES = {example.name: example for example in examples()}
TYPES = {"logits": "*bf16", "target": "*i64", "n": "i32", "columns": "i32"}
TYPES |= dict.fromkeys(("total", "at_target", "scale"), "*fp32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EXAMPLES)
def test_programs_equal_float64(interpreted, name: str, dtype: torch.dtype) -> None:
    interpreted(check_programs, name, dtype)


def check_programs(name: str, dtype: torch.dtype) -> None:
    from shoal.engine.kernels.programs import cross_entropy as programs

    logits, target, scale = EXAMPLES[name].inputs
    columns, logits = EXAMPLES[name].operator.keywords["columns"], logits.to(dtype)
    total, at_target, gradient = EXAMPLES[name].reference(logits.double(), target, scale.double())
    statistics = programs.statistics(logits, target, columns)
    torch.testing.assert_close(statistics, (total.float(), at_target.float()))
    programs.gradient(logits, target, statistics[0], scale, columns)
    torch.testing.assert_close(logits, gradient.to(dtype), rtol=2e-5 if dtype == torch.float32 else 2e-2, atol=1e-6)


def test_a_rank_may_hold_only_padding(interpreted) -> None:
    interpreted(check_padding)
    logits, target = torch.randn(3, 4), torch.full((3,), -1)
    total, at_target = softmax_statistics(logits, target, 0)
    assert total.isfinite().all() and not at_target.any()


def check_padding() -> None:
    from shoal.engine.kernels.programs import cross_entropy as programs

    logits, target = torch.randn(3, 4), torch.full((3,), -1)
    total, at_target = programs.statistics(logits, target, 0)
    assert torch.equal(total, torch.full((3,), torch.finfo(torch.float32).min)) and not at_target.any()
    programs.gradient(logits, target, torch.ones(3), torch.ones(3), 0)
    assert not logits.any()


def test_operators() -> None:
    """Registrations: schema and fake tensors."""
    logits, target = torch.randn(3, 10), torch.tensor([1, -1, 8])
    torch.library.opcheck(softmax_statistics, (logits, target, 9), test_utils=OPERATOR_CHECKS)
    arguments = (logits, target, torch.ones(3), torch.ones(3), 9)
    torch.library.opcheck(overwrite_with_gradient, arguments, test_utils=OPERATOR_CHECKS)


@pytest.mark.parametrize("capability", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("name", ["statistics_program", "gradient_program"])
def test_programs_compile(name: str, capability: int) -> None:
    from shoal.engine.kernels.programs import cross_entropy as programs

    constants = {"LEAST": programs.LEAST} if name == "statistics_program" else {}
    ptx = compile_program(getattr(programs, name), capability, TYPES, BLOCK=programs.BLOCK, **constants)
    assert "ld.global.v4" in ptx  # 16 bytes at a time
