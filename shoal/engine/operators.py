"""Custom operators of torch, called directly where nothing has to see them.

torch's call of an operator written in Python takes the host longer than a small kernel takes the device. The compiler,
fake tensors and dispatch modes need that call; plain tensors in eager code do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class DirectOperator:
    """A custom operator, which takes positional arguments.

    Its reference is the implementation on every kind of device without one of its own. Torch's own operations must do
    the mutations, if any, so that autograd sees them.

    Attributes:
        definition: torch's operator, which has all registrations.
    """

    def __init__(self, name: str, reference: Callable[..., Any], mutates: Sequence[str]):
        self.definition = torch.library.custom_op(name, reference, mutates_args=mutates)
        self.register_fake = self.definition.register_fake
        self.__doc__ = reference.__doc__
        self._reference, self._kernels = reference, dict[str, Callable[..., Any]]()
        self._differentiate: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    def register_kernel(self, device: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the implementation for a kind of device."""

        def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
            self._kernels[device] = kernel
            return self.definition.register_kernel(device)(kernel)

        return register

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., Any]) -> None:
        """Register the backward, as for torch's operator."""
        self._differentiate = backward, setup_context
        self.definition.register_autograd(backward, setup_context=setup_context)

    def __call__(self, *inputs: Any) -> Any:
        """Call the device's implementation, through torch if anything but eager code on plain tensors is active."""
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return self.definition(*inputs)
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        kernel = self._kernels.get(tensors[0].device.type, self._reference)
        if any(type(x) not in (Tensor, nn.Parameter) for x in tensors):
            return self.definition(*inputs)
        if self._differentiate and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return DirectCall.apply(kernel, *self._differentiate, *inputs)
        return kernel(*inputs)


class DirectCall(torch.autograd.Function):
    """Call of an implementation, with the operator's own backward."""

    @staticmethod
    def forward(ctx, kernel: Callable, backward: Callable, setup_context: Callable, *inputs: Any) -> Any:
        output = kernel(*inputs)
        ctx.differentiate = backward
        setup_context(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, *gradients: Tensor | None):
        found = ctx.differentiate(ctx, *gradients)
        return None, None, None, *(found if isinstance(found, tuple) else (found,))


def custom_op(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], DirectOperator]:
    """Make an operator of its plain PyTorch reference."""
    return lambda reference: DirectOperator(name, reference, mutates)
