"""The fused SwiGLU activation and its backward."""

import pytest
import torch

from shoal.engine.kernels.swiglu import (
    swiglu,
    swiglu_backward,
    swiglu_pair,
    swiglu_pair_backward,
    swiglu_reference,
)
from tests.engine.kernels.triton_tools import OPERATOR_CHECKS, TARGETS, compile_program

TYPES = dict.fromkeys(("gate", "up", "gradient", "out", "d_gate", "d_up"), "*bf16") | {"f": "i32", "stride": "i32"}


@pytest.mark.parametrize("f", [7, 1300])
def test_programs_equal_float64(interpreted, f: int) -> None:
    interpreted(check_programs, f)


def check_programs(f: int) -> None:
    from shoal.engine.kernels.programs import swiglu as programs

    gate_up, gradient = torch.randn(6, 2 * f), torch.randn(6, f)
    exact = gate_up.double().requires_grad_()
    expected = swiglu_reference(exact)
    expected.backward(gradient.double())
    pair = gate_up.chunk(2, -1)
    for found in programs.forward(gate_up), programs.forward_pair(*pair):
        torch.testing.assert_close(found, expected.float())
    for found in programs.backward(gradient, gate_up), torch.cat(programs.backward_pair(gradient, *pair), -1):
        torch.testing.assert_close(found, exact.grad.float())
    found = programs.forward(exact.detach())
    torch.testing.assert_close(found, expected.detach(), rtol=1e-14, atol=1e-14)


def test_the_cuda_kernels_take_zero_rows(interpreted) -> None:
    interpreted(check_zero_rows)


def check_zero_rows() -> None:
    gate_up, pair = torch.empty(2, 0, 10), (torch.empty(2, 0, 5), torch.empty(2, 0, 5))
    for operator in (swiglu, swiglu_backward, swiglu_pair, swiglu_pair_backward):
        arguments = (gate_up,) if operator in (swiglu, swiglu_backward) else pair
        backward = operator in (swiglu_backward, swiglu_pair_backward)
        found = operator._kernels["cuda"](*([pair[0]] * backward), *arguments)
        expected = operator(*([pair[0]] * backward), *arguments)
        torch.testing.assert_close(found, expected)


def test_operators() -> None:
    """Registrations: schema, fake tensors and autograd."""
    sample = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    pair = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True).unbind()
    for operator, arguments in ((swiglu, (sample,)), (swiglu_pair, pair)):
        torch.library.opcheck(operator.definition, arguments, test_utils=OPERATOR_CHECKS)
        assert torch.autograd.gradcheck(operator, arguments)


@pytest.mark.parametrize("capability", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("name", ["forward_program", "backward_program"])
def test_programs_compile(name: str, capability: int) -> None:
    import triton.language as tl

    from shoal.engine.kernels.programs import swiglu as programs

    ptx = compile_program(getattr(programs, name), capability, TYPES, EXACT=tl.float32, BLOCK=programs.BLOCK)
    assert "ld.global.v4" in ptx  # 16 bytes at a time
