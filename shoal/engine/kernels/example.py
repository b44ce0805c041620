"""Examples of operators, compared with float64: by the suite on the CPU, by `shoal bench gpu` on the GPU."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.engine import kernels

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest error by number format, relative to the largest value of the result."""


@dataclass(frozen=True)
class Example:
    """One call of an operator.

    Attributes:
        operator: function that calls the operator on the inputs and returns a tensor or a tuple of tensors. One that
            changes its inputs in place is wrapped to clone and to return them.
        reference: the same function in plain PyTorch, called on float64.
        inputs: CPU tensors and other arguments. Floating-point tensors are cast to each of ``dtypes``, then to float64
            for the reference; a tensor in another format than float32 is only moved to the device.
        gradients: positions of the inputs whose gradients are compared; None for all that are cast, () for none.
        tolerance: largest relative error, if not that of `TOLERANCES`.
    """

    name: str
    operator: Callable[..., Any]
    reference: Callable[..., Any]
    inputs: tuple[Any, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    gradients: tuple[int, ...] | None = None
    tolerance: float | None = None

    def errors(self, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
        """Return the largest error of each output and gradient, relative to its largest expected value."""
        cast = [isinstance(x, Tensor) and x.dtype == torch.float32 for x in self.inputs]
        wanted = self.gradients if self.gradients is not None else [i for i, is_cast in enumerate(cast) if is_cast]
        values = [x.to(dtype) if is_cast else x for x, is_cast in zip(self.inputs, cast, strict=True)]

        def run(function: Callable[..., Any], move: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
            arguments = [move(x.detach().clone()) if isinstance(x, Tensor) else x for x in values]
            leaves = [arguments[i].requires_grad_() for i in wanted]
            found = function(*arguments)
            outputs = [found] if isinstance(found, Tensor) else [*found]
            results = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
            traced = [output for output in outputs if output.requires_grad]
            if leaves and traced:
                generator = torch.Generator().manual_seed(1)
                upstream = [torch.randn(o.shape, generator=generator).to(dtype).to(o.device, o.dtype) for o in traced]
                found = torch.autograd.grad(traced, leaves, upstream)
                results |= {f"gradient of input {i}": gradient for i, gradient in zip(wanted, found, strict=True)}
            return results

        actual = run(self.operator, lambda x: x.to(device))
        expected = run(self.reference, lambda x: x.double() if x.dtype == dtype else x)
        if actual.keys() != expected.keys():
            raise ValueError(f"{self.name}: the operator gives {[*actual]}, the reference {[*expected]}")
        return {name: relative_error(actual[name], value) for name, value in expected.items()}

    def allowed(self, dtype: torch.dtype) -> float:
        """Return the largest error that counts as rounding."""
        return self.tolerance or TOLERANCES[dtype]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest finite expected value; infinite for NaN or other shapes."""
    if actual.shape != expected.shape:
        return torch.inf
    if not expected.numel():
        return 0.0
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    difference = (actual - expected).abs().masked_fill(actual == expected, 0.0)  # equal infinities too
    largest = expected.abs().masked_fill(~expected.isfinite(), 0.0).max().clamp_min(1e-30)
    return float((difference.max() / largest).nan_to_num(torch.inf, torch.inf))


def list_kernels() -> list[str]:
    """Return the names of the modules in this package that may have examples."""
    return [module.name for module in pkgutil.iter_modules(kernels.__path__) if not module.ispkg]


def examples_of_kernel(name: str) -> Iterator[Example]:
    yield from getattr(importlib.import_module(f"{kernels.__name__}.{name}"), "examples", tuple)()
