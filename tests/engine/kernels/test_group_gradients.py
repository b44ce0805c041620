"""Weight gradients of groups, some of them empty."""

import pytest
import torch

from shoal.engine.kernels.group_gradients import add_group_gradients
from tests.engine.kernels.triton_tools import OPERATOR_CHECKS, TARGETS, compile_program

ENDS = torch.tensor([0, 5, 5, 9], dtype=torch.int32)
EMPTY = [0, 2]


@pytest.mark.parametrize("fresh", [True, False])
def test_empty_groups_add_nothing(interpreted, fresh: bool) -> None:
    """The kernel of the products may leave anything in their places."""
    interpreted(check_program, fresh)


def check_program(fresh: bool) -> None:
    from shoal.engine.kernels.programs import group_gradients as programs

    products = torch.randn(4, 50, 70)
    products[EMPTY] = torch.nan
    total = torch.randn(4, 50, 70)
    expected = products + (0 if fresh else total)
    expected[EMPTY] = 0 if fresh else total[EMPTY]
    for add in (add_group_gradients, programs.add_group_gradients):
        found = total.clone()
        add(found, products, ENDS, fresh)
        assert torch.equal(found, expected)


def test_operator() -> None:
    arguments = torch.randn(4, 3, 2), torch.randn(4, 3, 2), ENDS, False
    torch.library.opcheck(add_group_gradients, arguments, test_utils=OPERATOR_CHECKS)


@pytest.mark.parametrize("capability", TARGETS.values(), ids=TARGETS)
def test_program_compiles(capability: int) -> None:
    from shoal.engine.kernels.programs import group_gradients as programs

    types = {"total": "*fp32", "products": "*bf16", "ends": "*i32", "size": "i32"}
    ptx = compile_program(programs.add_program, capability, types, FRESH=False, BLOCK=programs.BLOCK)
    assert "ld.global.v4" in ptx  # 16 bytes at a time
