"""Run steps on fake CUDA tensors, and list what would delay or stop them on a GPU."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shoal.engine import streams
from shoal.engine.collectives.mesh import DryMesh
from shoal.spec.config import RunConfig
from shoal.training.async_dp.engines import engine_class
from shoal.training.check import check
from shoal.training.dry_run.dry_run import DryEngine, make_samples
from shoal.training.dry_run.tracker import tensors_in
from tests.fake_cuda.library import on_wait
from tests.fake_cuda.values import KnownValues, is_on_cuda

_NO_KERNEL = {
    "_local_scalar_dense", "_reshape_alias", "_unsafe_view", "empty", "empty_like", "empty_strided", "lift_fresh",
    "new_empty", "new_empty_strided", "resize_", "set_",
}  # and views
_NOT_CODE_OF_A_STEP = ("shoal/training/dry_run/", "shoal/engine/collectives/pending.py")
_ROOT = f"{Path(__file__).parents[2]}/"  # a checkout may itself be in a folder named shoal
_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


@dataclass
class Census:
    """Counts of one step of one rank, each by operation and source line."""

    # operations on tensors of several devices, which raise; the step ended at the first
    mismatches: Counter[str] = field(default_factory=Counter)
    # points at which the host waits for the device, such as a copy that is not ``non_blocking``
    synchronisations: Counter[str] = field(default_factory=Counter)
    # copies between host and device, including numbers of the host that become tensors
    copies: Counter[str] = field(default_factory=Counter)
    # kernels. An operation counts as one, but some need several, and torch's CPU build divides a few that are one on
    # CUDA (RMSNorm without `shoal.engine.kernels`).
    launches: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)  # bytes that the kernels read and write

    def lines(self, most: int = 12) -> list[str]:
        """Return a description with the ``most`` frequent lines of each kind."""
        text = []
        for name, counts in vars(self).items():
            unit, of = (10**6, " [MB]") if name == "moved" else (1, "")
            text.append(f"{name}{of}: {counts.total() // unit:,}")
            text += [f"  {number // unit:>9,}  {where}" for where, number in counts.most_common(most)]
        return text


class OperationRecorder(TorchDispatchMode):
    """Dispatch mode that counts operations on CUDA tensors."""

    def __init__(self, values: KnownValues) -> None:
        super().__init__()
        self.census, self.values = Census(), values

    def synchronised(self, what: str) -> None:
        self.census.synchronisations[f"{what} at {_source_line()}"] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # a query, as frequent as operations; not asked for through the other modes
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        read = [*tensors_in((*args, *kwargs.values()))]
        try:
            out = func(*args, **kwargs)
        except RuntimeError as error:
            if "device" in str(error).lower():
                self.census.mismatches[f"{name} at {_source_line()}: {error}"] += 1
            raise
        made = [*tensors_in((out,))]
        on_cuda = [x for x in (*read, *made) if is_on_cuda(x)]
        if not on_cuda:
            return out
        where = f"{name} at {_source_line()}"
        waits = name == "_local_scalar_dense" or torch.Tag.dynamic_output_shape in func.tags
        if name in ("index", "index_put", "index_put_"):  # a mask becomes indices
            waits = any(x.dtype in (torch.bool, torch.uint8) for x in tensors_in((args[1],)))
        copied = name in ("_to_copy", "copy_")
        # Operators of shoal may read host tensors on the host.
        if func.namespace != "shoal" and any((x.dim() or copied) and not is_on_cuda(x) for x in (*read, *made)):
            kinds = ["cuda" if is_on_cuda(x) else "cpu" for x in (read[-1], made[0])]
            self.census.copies[f"{' -> '.join(kinds)} {[*made[0].shape]} {where}"] += 1
            waits = waits or not (kwargs.get("non_blocking") or (copied and args[2:] == (True,)))
        if waits:
            self.census.synchronisations[where] += 1
        if not func.is_view and name not in _NO_KERNEL:
            self.census.launches[where] += 1
            self.census.moved[where] += sum(x.nbytes for x in on_cuda)
        return out

    def read_values(self, x: FakeTensor) -> Any:
        """Replace `Tensor.tolist`: one synchronisation; an unknown number is 1."""
        if is_on_cuda(x):
            self.synchronised("tolist")
        with _disable_current_modes():
            values = self.values.get(x)
            return (torch.ones(x.shape, dtype=x.dtype) if values is None else values).tolist()


def _source_line() -> str:
    """Return the innermost source line of a step, or in backward the node if torch runs it without Python code."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not _BACKWARD:
        path = frame.f_code.co_filename
        place = path.removeprefix(_ROOT)
        if path.startswith(f"{_ROOT}shoal/") and not place.startswith(_NOT_CODE_OF_A_STEP):
            return f"{place}:{frame.f_lineno}"
        frame = frame.f_back
    node = torch._C._current_autograd_node() if frame else None
    return node.name() if node else "?"


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:
    """Replace `F.scaled_dot_product_attention`: the kernel that CUDA takes for this mask and dtype."""
    if attn_mask is None and q.dtype in (torch.float16, torch.bfloat16):
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf).expand(
            *q.shape[:3], k.shape[2]
        )
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]


@contextmanager
def fake_cuda() -> Iterator[OperationRecorder]:
    """Create fake tensors in the enclosed code, on `cuda` as on the CPU, and record what it does to the device.

    Use it in a process of `tests.fake_cuda.library.start_process`.
    """
    values = KnownValues()
    recorder = OperationRecorder(values)
    replaced = {
        (FakeTensor, "tolist"): lambda x: recorder.read_values(x),  # torch's reads one number at a time
        (F, "scaled_dot_product_attention"): _attention,
        (FakeTensor, "record_stream"): lambda x, stream: None,
        (streams, "lock_pages"): lambda memory, device, what: None,
        (streams, "map_zeros"): lambda numel, dtype: torch.zeros(numel, dtype=dtype),
        (torch.cuda, "get_device_capability"): lambda device=None: (9, 0),
    }
    before = {(owner, name): getattr(owner, name) for owner, name in replaced}
    try:
        for (owner, name), function in replaced.items():
            setattr(owner, name, function)
        with (
            torch.autograd.set_multithreading_enabled(False),  # one thread, whose modes and stack are known
            on_wait(partial(recorder.synchronised, "wait")),
            FakeTensorMode(allow_non_fake_inputs=True), values, recorder,
        ):
            yield recorder
    finally:
        for (owner, name), function in before.items():
            setattr(owner, name, function)


def take_census(config: RunConfig, rank: int = 0, *, step: int = 1) -> Census:
    """Count one step of one rank of a run on CUDA, without compiler.

    Args:
        step: step that is counted, after the ones before it.
    """
    shape = check(config)
    config = config.replace(train={"compile": False, "device": "cuda"})
    mesh = DryMesh(config.parallel, rank, device="cuda")
    with fake_cuda() as recorder:
        try:
            kind = type("Fake", (DryEngine, engine_class(config)), {})
            engine = kind(config, shape, mesh, make_samples(config, shape))
            for number in range(step + 1):
                recorder.census = Census()
                (engine.start if engine.starts_early else engine.step)(number)
        except RuntimeError:
            if not recorder.census.mismatches:
                raise
        return recorder.census
