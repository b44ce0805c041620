"""The fused SwiGLU activation and its backward."""

import pytest
import torch

from shoal.engine.kernels.swiglu import swiglu, swiglu_reference
from tests.engine.kernels.triton_tools import OPERATOR_CHECKS, TARGETS, compile_program

TYPES = {"gate_up": "*bf16", "gradient": "*bf16", "out": "*bf16", "f": "i32"}


@pytest.mark.parametrize("f", [7, 1300])
def test_programs_equal_float64(interpreted, f: int) -> None:
    interpreted(check_programs, f)


def check_programs(f: int) -> None:
    from shoal.engine.kernels.programs import swiglu as programs

    gate_up, gradient = torch.randn(3, 2, 2 * f), torch.randn(3, 2, f)
    exact = gate_up.double().requires_grad_()
    expected = swiglu_reference(exact)
    expected.backward(gradient.double())
    torch.testing.assert_close(programs.forward(gate_up), expected.float())
    torch.testing.assert_close(programs.backward(gradient, gate_up), exact.grad.float())


def test_operator() -> None:
    """Registrations: schema, fake tensors and autograd."""
    sample = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(swiglu, (sample,), test_utils=OPERATOR_CHECKS)
    assert torch.autograd.gradcheck(swiglu, (sample,))


@pytest.mark.parametrize("capability", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("name", ["forward_program", "backward_program"])
def test_programs_compile(name: str, capability: int) -> None:
    from shoal.engine.kernels.programs import swiglu as programs

    ptx = compile_program(getattr(programs, name), capability, TYPES, BLOCK=programs.BLOCK)
    assert "ld.global.v4" in ptx  # 16 bytes at a time
