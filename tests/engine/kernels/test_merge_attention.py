"""The merge of attention over several sets of keys."""

import pytest
import torch

from shoal.engine.kernels.merge_attention import examples, merge_attention_, merge_attention_reference
from tests.engine.kernels.triton_tools import OPERATOR_CHECKS, TARGETS, compile_program

EXAMPLES = {example.name: example.inputs for example in examples()}
POINTERS = {"out": "*fp32", "total": "*fp32", "block_out": "*bf16", "block_total": "*fp32"}
SIZES = dict.fromkeys(
    ("heads", "n", "d", *(f"{x}_{dim}" for x in ("out", "total", "new", "new_total") for dim in "ban")), "i32"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EXAMPLES)
def test_program_equals_float64(interpreted, name: str, dtype: torch.dtype) -> None:
    interpreted(check_program, name, dtype)


def check_program(name: str, dtype: torch.dtype) -> None:
    from shoal.engine.kernels.programs import merge_attention as programs

    out, total, block_out, block_total = (x.clone() for x in EXAMPLES[name])
    total[1, 2, 20] = block_total[1, 2, 17] = -torch.inf  # nothing seen in either
    block_out = block_out.to(dtype)
    exact = [x.double() for x in (out, total)]
    merge_attention_reference(*(x[:, :, 3:] for x in exact), block_out.double(), block_total.double())
    programs.merge(out[:, :, 3:], total[:, :, 3:], block_out, block_total)
    torch.testing.assert_close((out, total), tuple(x.float() for x in exact))


def test_operator() -> None:
    """Registrations: schema and fake tensors."""
    inputs = (torch.randn(2, 3, 4, 8), torch.zeros(2, 3, 4), torch.randn(2, 3, 4, 8), torch.zeros(2, 3, 4))
    torch.library.opcheck(merge_attention_, inputs, test_utils=OPERATOR_CHECKS)


@pytest.mark.parametrize("capability", TARGETS.values(), ids=TARGETS)
def test_program_compiles(capability: int) -> None:
    from shoal.engine.kernels.programs import merge_attention as programs

    ptx = compile_program(programs.merge_program, capability, POINTERS | SIZES, ROWS=programs.ROWS, WIDTH=128)
    assert "st.global.v4" in ptx  # 16 bytes at a time
