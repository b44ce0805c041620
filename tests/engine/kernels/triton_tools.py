"""Run Triton programs without a GPU: on the CPU by Triton's interpreter, and compiled ahead of time for real GPUs."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed: its programs are neither interpreted nor compiled", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {"sm_80": 80, "sm_90a": 90, "sm_100a": 100}  # A100, H100 and H200, B200
OPERATOR_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")  # without a compilation of seconds


def compile_program(
    program: Any, capability: int, types: dict[str, str], *, num_warps: int = 4, **constants: object
) -> str:
    """Compile a program for a GPU and return its PTX.

    Args:
        capability: compute capability times ten.
        types: Triton type of each argument that is no constant ("*bf16" a pointer, "i32" a number). Pointers and
            numbers count as multiples of 16, as in training.
    """
    types = {name: kind for name, kind in types.items() if name in program.arg_names}
    signature = {name: types.get(name, "constexpr") for name in program.arg_names}
    aligned: dict = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(program.arg_names) if name in types}
    source = ASTSource(fn=program, signature=signature, constexprs=dict(constants), attrs=aligned)
    target, options = GPUTarget("cuda", capability, 32), {"num_warps": num_warps}
    return triton.compile(source, target=target, options=options).asm["ptx"]
