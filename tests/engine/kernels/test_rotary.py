"""Rotary positions of a packed product of q, k and v, and their backward."""

import pytest
import torch

from shoal.engine.kernels.rotary import examples, rotate_packed, rotate_packed_backward, rotate_packed_reference
from tests.engine.kernels.triton_tools import OPERATOR_CHECKS, TARGETS, compile_program

EXAMPLES = {example.name: example for example in examples()}
POINTERS = ("packed", "cos", "sin", "q", "k", "v", "d_q", "d_k", "d_v", "out")
TYPES = dict.fromkeys(POINTERS, "*bf16") | dict.fromkeys(("positions", "heads", "kv_heads", "half"), "i32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EXAMPLES)
def test_programs_equal_float64(interpreted, name: str, dtype: torch.dtype) -> None:
    interpreted(check_programs, name, dtype)


def check_programs(name: str, dtype: torch.dtype) -> None:
    from shoal.engine.kernels.programs import rotary as programs

    *tensors, heads, kv_heads = EXAMPLES[name].inputs
    packed, cos, sin = (x.to(dtype) for x in tensors)
    exact = packed.double().requires_grad_()
    expected = rotate_packed_reference(exact, cos.double(), sin.double(), heads, kv_heads)
    results = programs.forward(packed, cos, sin, heads, kv_heads)
    torch.testing.assert_close(results, tuple(x.detach().to(dtype) for x in expected))
    gradients = tuple(torch.randn_like(x) for x in results)
    torch.autograd.backward(expected, [gradient.double() for gradient in gradients])
    torch.testing.assert_close(programs.backward(*gradients, cos, sin), exact.grad.to(dtype))


def test_operator() -> None:
    """Registrations: schema, fake tensors and autograd."""
    packed, cos, sin = (torch.randn(n, dtype=torch.float64) for n in ((2, 3, 16), (3, 2), (3, 2)))
    packed.requires_grad_()
    torch.library.opcheck(rotate_packed.definition, (packed, cos, sin, 2, 1), test_utils=OPERATOR_CHECKS)
    assert torch.autograd.gradcheck(lambda x: rotate_packed(x, cos, sin, 2, 1), (packed,))
    gradients = [x.detach() for x in rotate_packed(packed, cos, sin, 2, 1)]
    torch.library.opcheck(rotate_packed_backward.definition, (*gradients, cos, sin), test_utils=OPERATOR_CHECKS)


@pytest.mark.parametrize("capability", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("backward", [False, True])
def test_the_program_compiles(backward: bool, capability: int) -> None:
    from shoal.engine.kernels.programs import rotary as programs

    ptx = compile_program(
        programs.rotary_program, capability, TYPES, BACKWARD=backward, HEADS=programs.HEADS, HALF=64
    )
    assert "ld.global.v4" in ptx  # 16 bytes at a time
