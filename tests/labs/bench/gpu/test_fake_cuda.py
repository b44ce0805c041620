"""The calls of part 1 and the runs of parts 4 and 5 on fake CUDA tensors: layouts, shapes and devices."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.labs.bench.gpu import parts
from shoal.labs.bench.gpu.engine_run import RunPoint
from shoal.labs.bench.gpu.item import GpuSetting
from shoal.spec.config import RunConfig


def make_calls() -> tuple[dict[str, tuple], list[str]]:
    """Make calls of part 1 at full size; return the shapes of their results, and operands on different devices."""
    import torch

    from shoal.labs.bench.gpu import ceilings, smoke
    from tests.fake_cuda.census import fake_cuda

    shapes: dict[str, tuple] = {}
    with fake_cuda() as recorder:
        a = torch.randn(8192, 4096, device="cuda").to(torch.float8_e4m3fn)
        b = torch.randn(6144, 4096, device="cuda").to(torch.float8_e4m3fn).t()
        for scales in ("tensor", "row", "block"):
            shapes[scales] = tuple(ceilings._scaled_product(a, b, scales, True)().shape)
        for kernel in (*ceilings.BACKENDS, "documents, lengths"):
            q, k, v = (
                torch.randn(2, n, 4096, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                for n in (32, 8, 8)
            )
            out = ceilings._attention(kernel, q, k, v)()
            gradients = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
            shapes[kernel] = tuple(gradients[1].shape)
        for name, (call, needs_gpu) in smoke.CALLS.items():
            if not needs_gpu or "scaled" in name or "addmm" in name:
                call(GpuSetting("cuda", Path()))
    return shapes, [*recorder.census.mismatches]


def test_calls_of_part_1(on_fake_cuda: Callable) -> None:
    shapes, mismatches = on_fake_cuda(make_calls)
    assert not mismatches
    assert {shapes[scales] for scales in ("tensor", "row", "block")} == {(8192, 6144)}
    assert {shapes[kernel] for kernel in ("flash", "cudnn", "documents, lengths")} == {(2, 8, 4096, 128)}


def count_mismatches(configs: dict[str, RunConfig]) -> dict[str, list[str]]:
    from tests.fake_cuda.census import take_census

    return {name: [*take_census(config).mismatches] for name, config in configs.items()}


def test_runs_of_parts_4_and_5(on_fake_cuda: Callable) -> None:
    """The last run of each table, with tiny sizes."""
    setting = GpuSetting("cpu", Path())
    configs = {
        item.title: item.args[0].config
        for part in (4, 5) for item in parts.PARTS[part][1](setting) if isinstance(item.args[0], RunPoint)
    }  # fmt: skip
    assert {"nvfp4", "fp8", "bf16"} == {config.train.precision for config in configs.values()}
    found = on_fake_cuda(count_mismatches, configs)
    assert found == {name: [] for name in configs}


def measure_as_on_a_gpu() -> tuple[dict, dict, dict]:
    """Measure a run, an optimizer and this machine with the code for GPUs; only the profiler needs a real one."""
    import torch

    from shoal.engine.collectives.mesh import DryMesh
    from shoal.labs.bench.gpu import ceilings, engine_run, item, speed
    from shoal.training.check import check
    from shoal.training.dry_run.dry_run import DryEngine, make_samples
    from tests.fake_cuda.census import fake_cuda

    def build_engine(config: RunConfig, device: torch.device, masked: float = 0.0, repeats: int = 0) -> DryEngine:
        train = config.train.model_copy(update={"device": "cuda", "compile": False})
        config, shape = config.model_copy(update={"train": train}), check(config)
        return DryEngine(config, shape, DryMesh(config.parallel, 0, device="cuda"), make_samples(config, shape))

    h200 = SimpleNamespace(name="NVIDIA H200", total_memory=141 * 10**9, multi_processor_count=132, major=9, minor=0)
    fakes = {
        "synchronize": None, "empty_cache": None, "reset_peak_memory_stats": None, "get_device_name": h200.name,
        "max_memory_allocated": 10**9, "max_memory_reserved": 2 * 10**9, "memory_allocated": 10**9,
        "get_device_properties": h200, "device_count": 1,
    }  # fmt: skip
    setting = GpuSetting("cuda", Path())
    with pytest.MonkeyPatch.context() as patch, fake_cuda():
        for name, value in fakes.items():
            patch.setattr(torch.cuda, name, lambda *_, value=value: value)
        for module in (engine_run, speed):
            patch.setattr(module, "build_engine", build_engine)
        patch.setattr(engine_run, "profile_step", lambda *_: engine_run.StepKernels(0.001, 300, []))
        patch.setattr(ceilings, "SECONDS", 1e-6)
        patch.setattr(speed, "model_point", lambda *_, **changes: RunPoint(speed.TINY, 32, 1, changes=changes))
        (step,) = speed.time_point(setting, RunPoint(speed.TINY, 64, 2, compile=True))
        (update,) = speed.measure_optimizer(setting, "adamw", "bf16")
        return step, update, item.describe_machine(setting)


def test_code_for_gpus(on_fake_cuda: Callable) -> None:
    step, update, machine = on_fake_cuda(measure_as_on_a_gpu)
    assert "result" not in step and "result" not in update, (step, update)
    assert step["MFU %"] > step["causal %"] > 0 and step["allocated GB"] == 1 and step["launches"] == 300
    assert step["estimated GB"] > 0 and step["more"]["reserved GB"] == 2 and len(step["more"]["seconds"]) == 3
    assert update["states B/param"] == 8 and update["allocated B/param"] > 0
    assert machine["device"] == "NVIDIA H200" and machine["capability"] == [9, 0] and machine["driver"]
