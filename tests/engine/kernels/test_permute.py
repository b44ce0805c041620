"""Tokens to experts and back: every program against the reference in float64."""

import pytest
import torch

from shoal.engine.kernels.permute import (
    combine_rows,
    combine_rows_backward,
    copy_rows,
    sort_choices,
    sum_rows,
)
from tests.engine.kernels.triton_tools import OPERATOR_CHECKS, TARGETS, compile_program

CASES = {
    "each token twice": (9, 3, 2, 7, 1.0), "dropped": (9, 12, 4, 1030, 0.3), "one expert": (5, 1, 1, 16, 1.0),
    "none": (4, 3, 2, 8, 0.0), "no tokens": (0, 3, 2, 8, 1.0), "any number": (9, 5, 5, 8, 0.6),
}  # tokens, experts, choices of a token, columns, chance of a choice


def make(n: int, experts: int, k: int, h: int, kept: float) -> tuple[torch.Tensor, ...]:
    """Return (chosen, x, y, weights, gradient); rows after the last choice are NaN."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(n, experts, generator=generator).argsort(1) < k
    chosen &= torch.rand(n, experts, generator=generator) < kept
    x, gradient = torch.randn(2, n, h, generator=generator)
    y, weights = torch.randn(n * k, h, generator=generator), torch.rand(n, experts, generator=generator)
    y[int(chosen.sum()) :] = torch.nan
    return chosen, x, y, weights, gradient


@pytest.mark.parametrize("name", CASES)
def test_programs_equal_float64(interpreted, name: str) -> None:
    interpreted(check_programs, *CASES[name])


def check_programs(n: int, experts: int, k: int, h: int, kept: float) -> None:
    from shoal.engine.kernels.programs import permute as programs

    programs.TILE = 64  # so few tokens need several programs of the sort too
    chosen, x, y, weights, gradient = make(n, experts, k, h, kept)
    places = token, expert, rows, _ = sort_choices(chosen, n * k, k)
    for found, expected in zip(programs.sort_choices(chosen, n * k, k), places, strict=True):
        assert torch.equal(found, expected) and found.dtype == torch.int32
    exact = [t.double() for t in (x, y, weights, gradient)]
    m = int(chosen.sum())
    for cut in (n * k, m):  # with and without unused rows
        found = [
            programs.copy_rows(x, token), programs.sum_rows(y[:cut], rows),
            programs.combine_rows(y[:cut], weights, expert, rows),
            *programs.combine_rows_backward(gradient, y[:cut], weights, token, expert),
        ]
        expected = [
            copy_rows(exact[0], token, rows), sum_rows(exact[1][:cut], rows),
            combine_rows(exact[1][:cut], exact[2], token, expert, rows),
            *combine_rows_backward(exact[3], exact[1][:cut], exact[2], token, expert),
        ]
        torch.testing.assert_close(found, [t.float() for t in expected])
    assert programs.combine_rows(exact[1], exact[2], expert, rows).dtype == torch.float64
    torch.testing.assert_close(programs.combine_rows(exact[1], exact[2], expert, rows), expected[2], rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_sorted_by_expert_then_by_token(name: str) -> None:
    n, _, k, *_ = CASES[name]
    chosen, *_ = make(*CASES[name])
    token, expert, rows, ends = sort_choices(chosen, n * k, k)
    pairs = [(e, t) for t, e in chosen.nonzero().tolist()]
    assert [*zip(expert.tolist(), token.tolist(), strict=True)] == sorted(pairs) + [(-1, -1)] * (n * k - len(pairs))
    assert ends.tolist() == chosen.sum(0).cumsum(0).tolist()
    for t, own in enumerate(rows.tolist()):
        assert [row for row in own if row >= 0] == [row for row, other in enumerate(token.tolist()) if other == t]


def test_operators() -> None:
    """Registrations: schema, fake tensors and autograd."""
    chosen, x, _, weights, _ = make(*CASES["dropped"])
    n, k = len(chosen), 4
    x, weights = x[:, :5].double().requires_grad_(), weights.double().requires_grad_()
    token, expert, rows, _ = sort_choices(chosen, n * k, k)
    y = torch.randn(n * k, 5, dtype=torch.float64, requires_grad=True)
    checks = {
        sort_choices: (chosen, n * k, k), copy_rows: (x, token, rows), sum_rows: (y.detach(), rows),
        combine_rows: (y, weights, token, expert, rows),
        combine_rows_backward: (x.detach(), y.detach(), weights.detach(), token, expert),
    }
    for operator, arguments in checks.items():
        torch.library.opcheck(operator, arguments, test_utils=OPERATOR_CHECKS)
    chosen, x, _, weights, _ = make(*CASES["each token twice"])
    x, weights = x.double().requires_grad_(), weights.double().requires_grad_()
    token, expert, rows, _ = sort_choices(chosen, 18, 2)
    assert torch.autograd.gradcheck(copy_rows, (x, token, rows))
    y = torch.randn(18, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(combine_rows, (y, weights, token, expert, rows))


TYPES = dict.fromkeys(("position", "token", "expert", "rows", "ends"), "*i32") | dict.fromkeys(
    ("x", "y", "out", "gradient", "d_y"), "*bf16"
) | dict.fromkeys(("weights", "d_weights"), "*fp32") | dict.fromkeys(("n", "m", "experts", "k", "h"), "i32")


@pytest.mark.parametrize("capability", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("sort_program", {"TOKENS": 32, "EXPERTS": 64, "K": 8}),
        ("copy_program", {"BLOCK": 1024}),
        ("sum_program", {"WEIGHTED": True, "BLOCK": 1024}),
        ("spread_program", {"BLOCK": 1024}),
    ],
)
def test_programs_compile(name: str, constants: dict, capability: int) -> None:
    import triton.language as tl

    from shoal.engine.kernels.programs import permute as programs

    program = getattr(programs, name)
    if "EXACT" in program.arg_names:
        constants = {**constants, "EXACT": tl.float32}
    ptx = compile_program(program, capability, TYPES, **constants)
    assert name == "sort_program" or "ld.global.v4" in ptx  # 16 bytes at a time
