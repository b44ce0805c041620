"""The examples of all operators, on the CPU."""

import pytest
import torch

from shoal.engine.kernels.example import Example, all_examples

EXAMPLES = list(all_examples())


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.name for example in EXAMPLES])
def test_operators_equal_their_references(example: Example) -> None:
    for dtype in example.dtypes:
        errors = example.errors(torch.device("cpu"), dtype)
        assert all(error <= example.allowed(dtype) for error in errors.values()), (dtype, errors)


def test_a_wrong_gradient_is_found() -> None:
    wrong = Example("wrong", lambda x: x.detach() * x, lambda x: x * x, (torch.randn(5),))
    errors = wrong.errors(torch.device("cpu"), torch.float32)
    assert errors["output 0"] < 1e-6 and errors["gradient of input 0"] > 0.1
