"""Count the FLOPs of torch operations in a thread, and the bytes of live tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import shoal.engine.kernels.add_product
import shoal.engine.kernels.flash_attention  # noqa: F401  # both register operators


def _attention(q: Tensor, k: Tensor, *_: Any, **__: Any) -> int:
    """Count two products of [s, d] and [d, t] for each query head, unmasked. q: [b, a, s, d]."""
    return 4 * q.numel() * k.shape[2]


def _attention_backward(_: Tensor, q: Tensor, k: Tensor, *__: Any, **___: Any) -> int:
    """Count four products; the kernel's recomputation of its forward does not count (`shoal.planning.cost.flops`)."""
    return 8 * q.numel() * k.shape[2]


def _flash(q: Tensor, k: Tensor, *more: Any, **_: Any) -> int:
    """Count `_attention` of the keys in the window alone (`shoal.engine.kernels.flash_attention`)."""
    keys, window = k.shape[2], more[5] if len(more) > 5 else None  # after v, causal, and the segments
    return 4 * q.numel() * (keys if window is None else min(keys, window))


def _flash_backward(_: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *more: Any, **__: Any) -> int:
    return 2 * _flash(q, k, *more)


def _product(_: Tensor, d_y: Tensor, x: Tensor, *__: Any, **___: Any) -> int:
    return 2 * d_y.numel() * x.shape[1]


def _grouped_product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Count a product of all rows: [m, k], [E, k, n], or [n, m], [m, k] for each row's group."""
    return 2 * a.numel() * b.shape[-1]


COUNTS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm],
    torch.ops.shoal.add_product: _product,
    torch.ops.aten._grouped_mm: _grouped_product,
    torch.ops.aten.baddbmm_: flop_registry[torch.ops.aten.baddbmm],
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.shoal.flash_attention: _flash,
    torch.ops.shoal.flash_attention_backward: _flash_backward,
}
"""FLOPs of one call, by operation: matrix products and convolutions (torch's table), and attention."""


class Tracker(TorchDispatchMode):
    """Counter of the operations in a context, and of the storages that they read or create.

    A storage is live until nothing refers to it; views share theirs. Memory inside a kernel is not counted.

    Attributes:
        alive: current live bytes.
        peak: maximum live bytes since `rewind`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()
        self.alive = self.peak = 0
        self._known: dict[int, weakref.ref] = {}
        self._sizes: dict[int, int] = {}

    def __enter__(self) -> Tracker:
        # Resizing a storage in place, as ZeRO-3 does with gathered parameters, is not an operation.
        self._resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            return self._resized(storage, size)

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]  # torch has no hook for it
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]  # as it was
        super().__exit__(*exception)

    def rewind(self) -> int:
        """Return the peak since the last call."""
        peak, self.peak = self.peak, self.alive
        return peak

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            # A query, as frequent as operations: not asked for through torch's fakes.
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.overloadpacket in COUNTS:
            self.flops[func.overloadpacket.__name__] += COUNTS[func.overloadpacket](*args, **kwargs, out_val=out)
        for tensor in tensors_in((*args, *kwargs.values(), out)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._see(storage)
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._known[key] = weakref.ref(storage, lambda _: self._gone(key))
        self._sizes[key] = 0
        self._count(key, storage.nbytes())

    def _resized(self, storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        out = self._resize(storage, size)
        if storage._cdata in self._known:
            self._count(storage._cdata, size)
        return out

    def _count(self, key: int, size: int) -> None:
        self.alive += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.alive)

    def _gone(self, key: int) -> None:
        self.alive -= self._sizes.pop(key)
        del self._known[key]


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments or results, including those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
