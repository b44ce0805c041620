"""Values of index tensors on a fake CUDA device, which decide shapes and communication."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shoal.training.dry_run.tracker import tensors_in


class KnownValues(TorchDispatchMode):
    """Dispatch mode that computes fake CUDA tensors on the CPU too, if all values that they depend on are known.

    Known are host tensors with values and integers created on the device. A storage in host memory of the same layout
    has the values of each fake storage, so that views and in-place operations need no care. An unknown number is 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[int, tuple[weakref.ref, torch.UntypedStorage]] = {}  # by address of the fake storage

    def get(self, x: Tensor) -> Tensor | None:
        """Return a host tensor with the values of a tensor, or None if they are unknown."""
        if not isinstance(x, FakeTensor):
            return x
        known = self._values.get(x.untyped_storage()._cdata)
        if known is None:
            return None
        return torch.empty(0, dtype=x.dtype).set_(known[1], x.storage_offset(), x.shape, x.stride())

    def remember(self, x: Tensor, values: Tensor) -> None:
        """Keep the values of a fake tensor that does not share its storage with a known one."""
        storage = x.untyped_storage()
        if (key := storage._cdata) not in self._values:
            kept = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(values).untyped_storage()
            self._values[key] = weakref.ref(storage, lambda _: self._values.pop(key, None)), kept

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        read = [*tensors_in((*args, *kwargs.values()))]
        target = torch.device(kwargs.get("device") or "cpu").type
        with unset_fake_temporarily():
            values = [self.get(x) for x in read]
            known = all(value is not None for value in values) and (bool(read) or _is_index(func, args, kwargs))
            if known and target != "meta" and torch.Tag.nondeterministic_seeded not in func.tags:
                on_host = {name: value for name, value in kwargs.items() if name != "pin_memory"}
                if target == "cuda":
                    on_host["device"] = "cpu"
                computed = func(*tree_map_only(Tensor, self.get, args), **tree_map_only(Tensor, self.get, on_host))
                if target == "cpu" and not any(isinstance(x, FakeTensor) for x in read):
                    return computed
            else:
                known = False
                self._forget_written(func, args, kwargs)
        if not known and func.overloadpacket in _WITHOUT_FAKE:
            return None
        if not known:
            try:
                return func(*args, **kwargs)
            except DataDependentOutputException:
                return 1.0 if args[0].is_floating_point() else 1
        if not isinstance(computed, (Tensor, list, tuple)):
            return computed
        if torch.Tag.dynamic_output_shape in func.tags:
            out = tree_map_only(Tensor, lambda x: torch.empty_like(x, device="cuda"), computed)
        else:
            out = func(*args, **kwargs)
        with unset_fake_temporarily():
            for x, value in zip(tensors_in((out,)), tensors_in((computed,)), strict=True):
                self.remember(x, value)
        return out

    def _forget_written(self, func, args, kwargs) -> None:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name in given:
                for x in tensors_in((given[argument.name],)):
                    if isinstance(x, FakeTensor):
                        self._values.pop(x.untyped_storage()._cdata, None)


def is_on_cuda(x: Tensor) -> bool:
    """Return whether a tensor is on the fake device; faster than `Tensor.is_cuda`, which modes dispatch."""
    return isinstance(x, FakeTensor) and x.fake_device.type == "cuda"


_WITHOUT_FAKE = {torch.ops.aten._fused_sgd_, torch.ops.aten._fused_adagrad_}
"""In-place operations for which torch has no fake implementation."""


def _is_index(func, args, kwargs) -> bool:
    """Return whether a function without tensor arguments creates integers or booleans."""
    dtype = kwargs.get("dtype")
    if dtype is None:
        return func.overloadpacket is torch.ops.aten.arange and all(isinstance(x, int) for x in args)
    return not (dtype.is_floating_point or dtype.is_complex)
