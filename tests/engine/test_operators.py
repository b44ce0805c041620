"""Operators called directly compute and differentiate what torch's calls of them do."""

from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.engine.operators import custom_op

CALLS: list[str] = []


@custom_op("shoal_tests::scaled_sum")
def scaled_sum(x: Tensor, y: Tensor | None, factor: float, twice: bool = False) -> tuple[Tensor, Tensor]:
    """Return factor (x + y), and its sign."""
    raise NotImplementedError


@scaled_sum.register_kernel("cpu")
def _(x: Tensor, y: Tensor | None, factor: float, twice: bool = False) -> tuple[Tensor, Tensor]:
    CALLS.append("kernel")
    total = factor * (x if y is None else x + y) * (2 if twice else 1)
    return total, total.sign()


@scaled_sum.register_fake
def _(x: Tensor, y: Tensor | None, factor: float, twice: bool = False) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _save(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.added, ctx.factor = inputs[1] is not None, inputs[2]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _differentiate(ctx, d_total: Tensor, _: Tensor):
    (sign,) = ctx.saved_tensors
    assert sign.shape == d_total.shape
    return ctx.factor * d_total, ctx.factor * d_total if ctx.added else None, None, None


scaled_sum.register_autograd(_differentiate, setup_context=_save)


def test_a_direct_call_equals_torchs() -> None:
    for y in (None, torch.randn(3, requires_grad=True)):
        leaves = [torch.randn(3, requires_grad=True), *([] if y is None else [y])]
        found = []
        for operator in (scaled_sum, scaled_sum.definition):
            total, sign = operator(leaves[0], y, 0.5)
            assert total.requires_grad and not sign.requires_grad
            found.append([total.detach(), sign, *torch.autograd.grad(total.sum(), leaves)])
        torch.testing.assert_close(*found)


def test_torch_sees_a_call_only_where_it_has_to() -> None:
    x = torch.ones(3)
    with patch.object(scaled_sum, "definition", wraps=scaled_sum.definition) as definition:
        scaled_sum(x.requires_grad_(), None, 2.0)[0].sum().backward()
        scaled_sum(x.detach(), None, 2.0, True)
        assert definition.call_count == 0
        with FakeTensorMode() as mode:
            scaled_sum(torch.ones(3), None, 2.0)
        scaled_sum(mode.from_tensor(x.detach()), None, 2.0)
        assert definition.call_count == 2


def test_the_compiler_captures_the_operator() -> None:
    x = torch.randn(3, requires_grad=True)
    compiled = torch.compile(lambda x: scaled_sum(x, x, 2.0)[0].sum(), backend="aot_eager", fullgraph=True)
    assert torch.equal(torch.autograd.grad(compiled(x), x)[0], torch.full((3,), 4.0))
