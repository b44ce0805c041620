"""Which of torch's kernels a rule asks for on a device: what torch itself checks, it checks of fake tensors too."""

import sys
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import _device_dtype_check_for_fused

from shoal.engine.optim.build import build
from shoal.engine.optim.from_torch import TORCH
from shoal.engine.optim.shards import Shards
from shoal.spec.config import OptimizerConfig


def built(name, weights, gradient):
    return build(OptimizerConfig(name=name), Shards.from_parameters([("w", weights, gradient)], lambda name, w: 0.1))


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize(("device", "version"), [("cpu", "2.11.0"), ("cuda", "2.12.1"), ("cuda", "2.13.0+cu130")])
def test_one_kernel_where_torch_has_it(name, device, version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    with FakeTensorMode():
        rule = built(name, torch.ones(8, device=device), torch.ones(8, device=device))
    missing = name == "adagrad" and (device, version) == ("cuda", "2.12.1")
    assert {group["fused"] for group in rule.rule.param_groups} == {not missing}


def test_adagrad_steps_on_cuda_where_its_kernel_is_for_the_cpu_alone(monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.12.1"))
    check = partial(_device_dtype_check_for_fused, cuda_unsupported=True)  # as that version has it
    module = sys.modules[torch.optim.Adagrad.__module__]
    monkeypatch.setattr(module, "_device_dtype_check_for_fused", check)
    monkeypatch.setattr(module, "_get_value", lambda step: 1.0)  # a fake count has no value
    with FakeTensorMode():
        rule = built("adagrad", torch.ones(8, device="cuda"), torch.ones(8, device="cuda"))
        rule.step(0.1)
    assert [state["sum"].device.type for state in rule.rule.state.values()] == ["cuda"]


def test_updates_without_that_kernel_are_the_same(monkeypatch):
    found = []
    for fused in (True, False):
        monkeypatch.setattr("shoal.engine.optim.from_torch.has_fused", lambda name, device, fused=fused: fused)
        weights, gradient = torch.randn(2, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        rule = built("adagrad", weights.clone(), gradient)
        rule.step(0.1)
        rule.resume_at(7)
        rule.step(0.1)
        found.append(rule.shards.shards[0].weights)
        assert not torch.equal(found[-1], weights)
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)
