"""Residual addition and RMSNorm in one kernel, and their backward."""

import pytest
import torch

from shoal.engine.kernels.rms_norm import rms_norm, rms_norm_backward, rms_norm_reference, rms_statistics
from tests.engine.kernels.triton_tools import OPERATOR_CHECKS, TARGETS, compile_program

POINTERS = ("x", "update", "weight", "total", "y", "d_y", "d_total", "d_x")
TYPES = dict.fromkeys(POINTERS, "*bf16") | dict.fromkeys(("inverse", "d_weights"), "*fp32") | {"most": "*i32"}
TYPES |= {"eps": "fp32", "h": "i32", "rows": "i32", "each": "i32"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("rows", "h"), [(0, 5), (1, 7), (5, 70)])
def test_programs_equal_float64(interpreted, rows: int, h: int, add: bool, dtype: torch.dtype) -> None:
    interpreted(check_programs, rows, h, add, dtype)


def check_programs(rows: int, h: int, add: bool, dtype: torch.dtype) -> None:
    from shoal.engine.kernels.programs import rms_norm as programs

    programs.PROGRAMS = 2  # this process only interprets: some programs take several rows
    x, update, d_y, d_total = (torch.randn(rows, h).to(dtype) for _ in range(4))
    update, weight = update if add else None, (1 + torch.randn(h) / 8).to(dtype)
    total, y, inverse = programs.forward(x, update, weight, 1e-5)
    if rows:
        *found, most = programs.statistics(x, update, weight, 1e-5)
        assert all(torch.equal(*pair) for pair in zip(found, (total, inverse), strict=True))
        assert most == y.abs().max()
    # As in training, backward reads the sum in its own format.
    summed = (total if add else x).double().requires_grad_()
    scale = weight.double().requires_grad_()
    _, expected = rms_norm_reference(summed, None, scale, 1e-5)
    if add:
        torch.testing.assert_close(total, (x.double() + update.double()).to(dtype))
    torch.testing.assert_close(y, expected.detach().to(dtype))
    torch.autograd.backward([expected, summed], [d_y.double(), d_total.double() * add])
    d_x, d_weight = programs.backward(d_y, d_total if add else None, total if add else x, weight, inverse)
    rounding = {"rtol": 1.6e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(d_x, summed.grad.to(dtype), **rounding)
    torch.testing.assert_close(d_weight, scale.grad.to(dtype), **rounding)


@pytest.mark.parametrize("add", [False, True])
def test_operator(add: bool) -> None:
    """Registrations: schema, fake tensors and autograd; without a gradient of the sum, too."""
    x, update, weight = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in ((3, 5), (3, 5), (5,)))
    arguments = (x, update if add else None, weight, 1e-5)
    torch.library.opcheck(rms_norm.definition, arguments, test_utils=OPERATOR_CHECKS)
    if add:
        assert torch.autograd.gradcheck(lambda *inputs: rms_norm(*inputs, 1e-5)[:2], (x, update, weight))
        assert torch.autograd.gradcheck(lambda *inputs: rms_norm(*inputs, 1e-5)[0], (x, update, weight))
    assert torch.autograd.gradcheck(lambda *inputs: rms_norm(*inputs, 1e-5)[1], (x, arguments[1], weight))
    detached = [each.detach() if isinstance(each, torch.Tensor) else each for each in arguments]
    torch.library.opcheck(rms_statistics.definition, detached, test_utils=OPERATOR_CHECKS)
    _, y, inverse = rms_norm(*arguments)
    arguments = (y.detach(), None, x.detach(), weight.detach(), inverse)
    torch.library.opcheck(rms_norm_backward.definition, arguments, test_utils=OPERATOR_CHECKS)


@pytest.mark.parametrize("capability", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize(("name", "options"), [
    ("forward_program", {"WRITE": True}), ("forward_program", {"WRITE": False}), ("backward_program", {}),
])
def test_programs_compile(name: str, options: dict, capability: int) -> None:
    from shoal.engine.kernels.programs import rms_norm as programs

    ptx = compile_program(getattr(programs, name), capability, TYPES, ADD=True, BLOCK=4096, **options)
    assert "ld.global.v4" in ptx  # 16 bytes at a time
