"""The calls of part 1 and the runs of parts 4 and 5 on fake CUDA tensors: layouts, shapes and devices."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.labs.bench.gpu import parts
from shoal.labs.bench.gpu.engine_run import RunPoint
from shoal.labs.bench.gpu.item import GpuSetting
from shoal.spec.config import RunConfig
from shoal.testing.fake_cuda.library import start_process, why_unavailable


@pytest.fixture(scope="module")
def on_fake_cuda():
    """Return a callable that calls a function with arguments in a process with a fake CUDA device."""
    if reason := why_unavailable():
        pytest.skip(reason)
    with start_process() as process:
        yield lambda function, *args: process.submit(function, *args).result(timeout=300)


def make_calls() -> tuple[dict[str, tuple], list[str]]:
    """Make calls of part 1 at full size; return the shapes of their results, and operands on different devices."""
    import torch

    from shoal.labs.bench.gpu import ceilings, smoke
    from shoal.testing.fake_cuda.census import fake_cuda

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
    from shoal.testing.fake_cuda.census import take_census

    return {name: [*take_census(config).mismatches] for name, config in configs.items()}


def test_runs_of_parts_4_and_5(on_fake_cuda: Callable) -> None:
    """The last run of each table, with tiny sizes."""
    setting = GpuSetting("cpu", Path())
    configs = {
        item.title: item.args[0].config
        for part in (4, 5) for item in parts.PARTS[part][1](setting) if isinstance(item.args[0], RunPoint)
    }  # fmt: skip
    assert {"mxfp8", "bf16"} == {config.train.precision for config in configs.values()}
    found = on_fake_cuda(count_mismatches, configs)
    assert found == {name: [] for name in configs}
