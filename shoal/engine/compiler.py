"""Functions that `torch.compile` does not trace.

torch's own decorators import its compiler, which takes a second of every process. These are applied before a process
first compiles a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])

_methods: list[tuple[type, str]] = []
_constants: list[Callable[..., Any]] = []


class _Untraced:
    """Method of a class body, replaced by the plain function when the class is made."""

    def __init__(self, method: Callable[..., Any]):
        self.method = method

    def __set_name__(self, owner: type, name: str) -> None:  # called for each name that the method has in the class
        setattr(owner, name, self.method)
        _methods.append((owner, name))


def untraced(method: F) -> F:
    """Mark a method that compiled code calls as it is, with all that it calls (`torch.compiler.disable`)."""
    return cast(F, _Untraced(method))


def constant(function: F) -> F:
    """Mark a function that is called once, while it is traced (`torch.compiler.assume_constant_result`)."""
    _constants.append(function)
    return function


def prepare_compiler() -> None:
    """Apply the marks of `untraced` and `constant`. Call it before `torch.compile` of a model or of a part of one."""
    while _methods:
        owner, name = _methods.pop()
        setattr(owner, name, torch.compiler.disable(getattr(owner, name)))
    while _constants:
        torch.compiler.assume_constant_result(_constants.pop())
