"""Many ranks on one device: layouts against one rank by `shoal.verify`, and a world of one rank on its backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import shoal
from shoal.engine.device import init_world
from shoal.labs.bench.benchmark import Row
from shoal.labs.bench.gpu.item import GpuSetting
from shoal.spec.config.run import build_config
from shoal.testing.verify.verify import Verification

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp 2, ZeRO-3": {"dp": 2, "zero": 3}, "tp 2, sequence parallel": {"tp": 2, "sequence_parallel": True},
    "pp 2, zb-v": {"pp": 2, "schedule": "zb-v"}, "cp 2": {"cp": 2}, "ep 2": {"dp": 2, "ep": 2},
    "tp 2, documents": {"tp": 2}, "cp 2, documents": {"cp": 2},
    **{f"dp 2, ZeRO-{zero}": {"dp": 2, "zero": zero} for zero in range(3)}, "tp 2": {"tp": 2},
}  # fmt: skip
PRECISIONS = ("fp64", "bf16", "fp32")
"""Fused operators and attention kernels run in bf16 and fp32 only; in fp64 no rounding hides a difference."""


def verify_layout(setting: GpuSetting, name: str, precision: str) -> Iterator[Row]:
    """Compare one layout in one of `PRECISIONS` with one device, which computes in float64."""
    exact = precision == "fp64"
    # A token goes to 2 of 4 experts in fp64 only: rounding may change which ones, so otherwise it goes to all.
    experts = {"experts": {"count": 4, "ffn": 32, "per_token": 2 if exact else 4}} if "ep" in LAYOUTS[name] else {}
    found = shoal.verify(build_config({
        "model": {"name": "tiny", "layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 32, **experts},
        "parallel": LAYOUTS[name], "train": {"global_batch": 8, "precision": precision},
        "data": {"source": "synthetic", "sequence_length": 16, "document_mask": "documents" in name},
    }), steps=setting.pick(3, 1), own_precision=not exact, device=setting.device, show=True)  # fmt: skip
    yield _judge(found)


def verify_drawn(setting: GpuSetting, count: int, seed: int) -> Iterator[Row]:
    """Compare randomly drawn layouts of up to 8 ranks with one device."""
    config = build_config({"train": {"seed": seed}})
    yield _judge(shoal.verify(config, random=count, steps=setting.pick(3, 1), device=setting.device, show=True))


def _judge(found: Verification) -> Row:
    text = found.findings[0].text.partition("\n")[0] if found.findings else ""
    return {"layouts": found.layouts, "differ": found.differing,
            "largest error of a gradient": found.worst_gradient, "first": text, "passed": found.same}  # fmt: skip


def check_backend(setting: GpuSetting) -> Iterator[Row]:
    """Call the collectives of a world of one rank: NCCL on a GPU, gloo in a rehearsal."""
    init_world(0, 1, dist.HashStore(), setting.torch_device, 60.0)
    x = torch.arange(8.0, device=setting.torch_device)
    out = torch.empty_like(x)
    for name, call in {
        "all-reduce": lambda: (out.copy_(x), dist.all_reduce(out)),
        "all-gather": lambda: dist.all_gather_into_tensor(out, x),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(out, x),
        "all-to-all": lambda: dist.all_to_all_single(out, x), "broadcast": lambda: dist.broadcast(out.copy_(x), 0),
    }.items():  # fmt: skip
        out.zero_()
        call()
        yield {"collective": name, "backend": dist.get_backend(), "passed": torch.equal(out, x)}
    dist.destroy_process_group()
