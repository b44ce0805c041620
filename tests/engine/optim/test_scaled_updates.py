"""Updates with scaled gradients, and updates that are skipped."""

from dataclasses import replace

import pytest
import torch

from shoal.engine.optim.build import RULES, build
from shoal.engine.optim.from_torch import FromTorch
from shoal.engine.optim.shards import Shards
from shoal.engine.optim.sophia import Sophia
from shoal.spec.config import OptimizerConfig

STEPS = 8  # RAdam's first steps have another rule


def train(name: str, dtype: torch.dtype, *, scales: list, skips: list, fused: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    weights, gradient = torch.randn(2, 80, 64, generator=generator, dtype=dtype)
    shards = Shards.from_parameters([("layers.0.w", weights, gradient)], lambda *_: 0.1)
    rule = build(OptimizerConfig(name=name), shards)
    if fused:
        rule.fuses_scale = rule.skips_on_device = True
    for scale, skip in zip(scales, skips, strict=True):
        if isinstance(rule, Sophia) and rule.due:
            rule.learn([torch.rand(shard.weights.shape, generator=generator, dtype=dtype) for shard in shards.shards])
        given = torch.randn(gradient.shape, generator=generator, dtype=dtype)
        if isinstance(scale, float):
            gradient.copy_(given * scale)
            if skip:
                continue
            rule.step(0.01)
        else:
            gradient.copy_(given if not skip else torch.full_like(given, torch.nan))
            rule.step(0.01, scale=scale, skip=skip)
            if skip:
                rule.resume_at(rule.count - 1)
    return weights


@pytest.mark.parametrize(("name", "fused"), [*((n, False) for n in RULES), ("adamw", True), ("radam", True),
                                             ("momentum", True), ("adagrad", True), ("muon", True)])
def test_a_scale_and_a_skip_on_the_device(name: str, fused: bool) -> None:
    """Tensors act as scaling on the host does, and as leaving an update out."""
    dtype = torch.float32 if fused or name == "adam8bit" else torch.float64
    numbers = [0.5 + 0.1 * i for i in range(STEPS)]
    skipped = [i == 6 and not name.startswith("sophia") for i in range(STEPS)]
    expected = train(name, dtype, scales=numbers, skips=skipped)
    tensors = [torch.tensor(x) for x in numbers]
    actual = train(name, dtype, scales=tensors, skips=[torch.tensor(float(s)) for s in skipped], fused=fused)
    torch.testing.assert_close(actual, expected, rtol=2e-4 if name == "adam8bit" else 1e-6, atol=1e-6)


def test_without_a_scale_gradients_are_not_read() -> None:
    weights, gradient = torch.ones(4), torch.ones(4)
    rule = build(OptimizerConfig(name="sage"), Shards.from_parameters([("w", weights, gradient)], lambda *_: 0.0))
    version = gradient._version
    rule.step(0.1)
    assert gradient._version == version
    rule.step(0.1, scale=0.5)
    assert torch.equal(gradient, torch.full((4,), 0.5))


@pytest.mark.parametrize(("dtype", "fused"), [(torch.float32, True), (torch.float64, False)])
def test_fused_rules_take_the_factor_unless_they_would_round_it(dtype: torch.dtype, fused: bool) -> None:
    """torch's kernels on CUDA read it as float32."""
    shards = Shards.from_parameters([("w", *torch.ones(2, 4, dtype=dtype))], lambda *_: 0.0)
    rule = FromTorch(OptimizerConfig(name="adamw"), replace(shards, device=torch.device("cuda")), name="adamw")
    assert (rule.fuses_scale, rule.skips_on_device) == (fused, fused)
