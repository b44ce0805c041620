"""Steps on a device that is not the CPU: ``python -m tests.training.dry_run.elsewhere``. Prints what mixed its tensors
with the host's.

The device is torch's for backends written in Python, and has no memory and no kernels: tensors are fakes. So what runs
is what would run on CUDA, but for `is_cuda` and for kernels of CUDA's own.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, unset_fake_temporarily
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from shoal.engine.collectives.mesh import DryMesh, Mesh
from shoal.engine.optim import low_precision_state
from shoal.engine.parallel.zero import zero_engine
from shoal.spec.layout import Layout
from shoal.training.check import check
from shoal.training.dry_run import dry_run
from shoal.training.dry_run.tracker import tensors_in
from tests.testing.verify.runs import small_run

PLANTED = "a mix that was planted"
CASES = {
    PLANTED: ({}, {}, {}),
    "one device": ({}, {}, {}),
    **{f"ZeRO-{zero}": ({"dp": 2, "zero": zero}, {}, {}) for zero in (0, 2, 3)},
    "hybrid shards": ({"dp": 4, "zero": 3, "zero_shard": 2}, {}, {}),
    "parameters in the host": ({"dp": 2, "zero": 3, "offload": "parameters"}, {}, {}),
    "states in the host": ({"dp": 2, "zero": 1, "offload": "optimizer"}, {}, {}),
    "tensor": ({"tp": 2}, {}, {}),
    "sequence": ({"tp": 2, "sequence_parallel": True}, {}, {}),
    "ring": ({"cp": 2}, {}, {}),
    "Ulysses": ({"cp": 2, "ulysses": 2}, {}, {}),
    "1F1B": ({"pp": 2, "micro_batch": 1}, {}, {}),
    "ZB-H1": ({"pp": 2, "micro_batch": 1, "schedule": "zb-h1"}, {}, {}),
    "PipeDream": ({"pp": 2, "micro_batch": 1, "schedule": "pipedream"}, {"clip_norm": 0.0}, {}),
    **{f"optimizer {name}": ({"dp": 2, "zero": 1}, {"name": name}, {}) for name in (
        "adafactor", "adam8bit", "muon", "sage", "sophia-g", "sophia-h",
    )},
    **{f"precision {name}": ({"dp": 2, "zero": 1}, {}, {"precision": name}) for name in (
        "bf16", "bf16-all", "fp16", "fp8", "mxfp8",
    )},
}  # fmt: skip
"""Layouts, shoal's own optimizers, and number formats; optimizers and formats are tested with ZeRO-1."""


class ElsewhereMesh(DryMesh):
    """A dry mesh on that device."""

    def __init__(self, layout: Layout, rank: int, device: torch.device):
        Mesh.__init__(self, layout, rank, device, transport="dry")
        self.by_gloo = False

    def real_index_tensors(self) -> AbstractContextManager[object]:
        return nullcontext()


def no_mixes(device: torch.device):
    """A dry run's `__torch_dispatch__`, that refuses the host's tensors beside the device's, but numbers and copies."""

    def dispatched(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [*tensors_in((*args, *kwargs.values()))]
        fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        asked = kwargs.get("device")
        if asked is not None and torch.device(asked).type == device.type and tensors and not fakes:
            return torch.empty(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype, device=device)
        if tensors and not fakes:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if any(fake.device.type == device.type for fake in fakes) and func is not torch.ops.aten.copy_.default:
            host = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.dim()]
            if host:
                raise RuntimeError(f"{func} of the device's tensors and the host's {tuple(host[0].shape)}")
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            return 1.0 if args[0].is_floating_point() else 1

    return dispatched


def made_on(make: Callable[..., torch.Tensor], device: torch.device) -> Callable[..., torch.Tensor]:
    """`torch.tensor`, which backends in Python lack, for that device too."""

    def tensor(numbers, *, device_of=device, device=None, dtype=None):
        made = make(numbers, dtype=dtype)
        if device is None or torch.device(device).type != device_of.type:
            return made
        return torch.empty(made.shape, dtype=made.dtype, device=device_of)

    return tensor


def main(names: list[str]) -> int:
    """Run some of the cases, or all."""
    _setup_privateuseone_for_python_backend("elsewhere")
    device = torch.device("elsewhere", 0)
    dry_run._Numberless.__torch_dispatch__ = no_mixes(device)
    zero_engine.broadcast_ints = lambda numbers, group, device: list(numbers)
    low_precision_state._BLOCK[device.type] = low_precision_state._BLOCK["cuda"]
    torch.tensor = made_on(torch.tensor, device)
    bad = 0
    for name in names or CASES:
        parallel, optimizer, train = CASES[name]
        config = small_run(parallel, {"layers": parallel.get("pp", 1), "hidden": 64, "ffn": 96})
        config = config.model_copy(update={
            "optimizer": config.optimizer.model_copy(update=optimizer),
            "train": config.train.model_copy(update={"attention": "sdpa"} | train),
        })
        shape = check(config)
        try:
            mesh = ElsewhereMesh(config.parallel, config.parallel.world_size - 1, device)
            with dry_run._faked(fused=True):
                engine = dry_run.DryEngine(config, shape, mesh, dry_run.make_samples(config, shape))
                for step in range(2 if optimizer or train else 1):  # a later step finds the optimizer's states
                    engine.step(step)
                if name == PLANTED:
                    engine.parameters.buckets[0].full.add_(torch.zeros(engine.parameters.buckets[0].full.shape))
            print(f"{name}: ok", flush=True)
        except Exception as error:
            bad += 1
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "shoal/" in frame.filename]
            where = ", ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-3:])
            print(f"{name}: {type(error).__name__} at {where}: {str(error).splitlines()[0]}", flush=True)
    return bad


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # autograd's thread of that device never ends
