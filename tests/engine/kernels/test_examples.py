"""The examples of all operators, on the CPU."""

import importlib

import pytest
import torch

from shoal.engine import kernels
from shoal.engine.kernels.example import Example, examples_of_kernel, list_kernels, relative_error

EXAMPLES = [example for name in list_kernels() for example in examples_of_kernel(name)]


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.name for example in EXAMPLES])
def test_operators_equal_their_references(example: Example) -> None:
    for dtype in example.dtypes:
        errors = example.errors(torch.device("cpu"), dtype)
        assert all(error <= example.allowed(dtype) for error in errors.values()), (dtype, errors)


def test_a_wrong_gradient_is_found() -> None:
    wrong = Example("wrong", lambda x: x.detach() * x, lambda x: x * x, (torch.randn(5),))
    errors = wrong.errors(torch.device("cpu"), torch.float32)
    assert errors["output 0"] < 1e-6 and errors["gradient of input 0"] > 0.1


def test_relative_error() -> None:
    inf, nan = torch.inf, torch.nan
    assert relative_error(torch.tensor([1.0, -inf]), torch.tensor([2.0, -inf])) == 0.5
    assert relative_error(torch.tensor([1.0, nan]), torch.tensor([1.0, 2.0])) == inf
    assert relative_error(torch.tensor([1.0, inf]), torch.tensor([1.0, 2.0])) == inf
    assert relative_error(torch.ones(2), torch.ones(3)) == inf and relative_error(torch.ones(0), torch.ones(0)) == 0


@pytest.mark.parametrize("name", list_kernels())
def test_every_operator_has_an_example(name: str) -> None:
    module = importlib.import_module(f"{kernels.__name__}.{name}")
    operators = [value for value in vars(module).values() if isinstance(value, torch.library.CustomOpDef)]
    assert hasattr(module, "examples") or not operators
