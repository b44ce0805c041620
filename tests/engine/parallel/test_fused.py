"""Steps with fused operators, by their references on the CPU, compute what steps without them compute."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.engine import kernels
from shoal.engine.models import feedforward, transformer
from shoal.engine.models.experts.router import find_modules
from shoal.engine.parallel import weight_grad
from shoal.launch.worker_pool import Pool
from shoal.spec.config import Float8Config, RunConfig
from shoal.training.step import model_state
from tests.engine.parallel.counting import engine_of
from tests.testing.verify.runs import small_run

CALLS = {"swiglu": feedforward, "rotate_packed": transformer, "find_owner": weight_grad}


def gradients(
    config: RunConfig, fused: bool, compile: bool = False, alone: int = weight_grad.ALONE
) -> tuple[float, dict[str, Tensor], dict[str, int]]:
    """Loss, gradients of this rank and number of calls of an operator in a step."""
    calls = dict.fromkeys(CALLS, 0)

    def count(name: str, operator: Any) -> Any:
        def counted(*args: Any) -> Any:
            calls[name] += 1
            return operator(*args)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "use_fused", lambda x: fused)
        patch.setattr(weight_grad, "ALONE", alone)
        for name, module in CALLS.items():
            patch.setattr(module, name, count(name, getattr(module, name)))
        if compile:  # captured and differentiated, but not made into C++
            patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
            build = model_state.build_stages
            patch.setattr(model_state, "build_stages", lambda *args, **kw: build(*args, **kw | {"compile": True}))
        engine = engine_of(config)
        loss = engine.step(0).loss
    pieces = {
        f"{name} {i}": piece.tensor.clone()
        for name, parts in engine.parameters.reduced_gradients().items() for i, piece in enumerate(parts)
    }
    return loss, pieces, calls


@pytest.mark.parametrize(("parallel", "model", "calls"), [
    ({}, {}, 4),
    ({"recompute": "full", "pp": 2, "schedule": "zb-h1"}, {"layers": 2}, 4),
    ({"tp": 2, "sequence_parallel": True}, {"vocab": 259}, 4),
    ({"tp": 4}, {}, 0),  # keys and values are held by two ranks each: not one matrix with the queries
    ({"tp": 4, "tp_x": 2}, {}, 0),
    ({"dp": 2, "zero": 3}, {"name": "tiny-gpt"}, 0),
    ({"tp": 2, "sequence_parallel": True, "tp_overlap": True}, {"name": "tiny-gpt"}, 0),
    ({"pp": 2, "schedule": "zb-h1"}, {"layers": 2, "qkv_bias": True}, 2),
], ids=["one rank", "split backward", "tp", "tp > kv heads", "grid", "gpt", "gpt, tp", "biases"])  # fmt: skip
def test_steps_are_equal(pool: Pool, parallel: dict[str, Any], model: dict[str, Any], calls: int) -> None:
    config = small_run(parallel, model, precision="fp64")
    ranks = config.parallel.world_size
    plain = pool.run(gradients, ranks, config, False)
    fused = pool.run(gradients, ranks, config, True)
    for (loss, expected, none), (fused_loss, actual, called) in zip(plain, fused, strict=True):
        assert fused_loss == pytest.approx(loss, rel=1e-12)
        assert not any(none.values()) and called["rotate_packed"] == calls
        for name, gradient in expected.items():
            scale = gradient.abs().max().clamp_min(1e-6)
            assert (actual[name] - gradient).abs().max() / scale < 1e-9, name


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}], ids=["one rank", "tp"])
def test_matrices_are_multiplied_alone_or_together(pool: Pool, parallel: dict[str, Any]) -> None:
    config = small_run(parallel, {"qkv_bias": True}, precision="fp64")
    together = pool.run(gradients, config.parallel.world_size, config, False)
    alone = pool.run(partial(gradients, alone=1), config.parallel.world_size, config, False)
    for (loss, expected, _), (same_loss, actual, _) in zip(together, alone, strict=True):
        assert same_loss == loss
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize(("device", "rows", "together"), [
    ("cpu", weight_grad.ALONE - 1, True), ("cpu", weight_grad.ALONE, False), ("meta", weight_grad.ALONE, True),
])  # fmt: skip
def test_only_the_cpu_multiplies_wide_matrices_alone(device: str, rows: int, together: bool) -> None:
    grouped: list[Any] = []
    sink = SimpleNamespace(group_adjacent=lambda weights: grouped.append(weights) or [slice(0, 2)])
    x, *weights = (torch.empty(n, 4, device=device) for n in (3, rows, 2 * rows))
    weight_grad.LinearFunction.apply(sink, weight_grad.NO_COMM, False, False, 2, x, *weights, None, None)
    assert bool(grouped) == together


@pytest.mark.parametrize(("parallel", "scales"), [({}, "row"), ({"tp": 2, "sequence_parallel": True}, "tensor")])
def test_products_in_8_bits_are_joined_like_others(pool: Pool, parallel: dict[str, Any], scales: str) -> None:
    config = small_run(parallel, precision="fp64-fp8").model_copy(update={"float8": Float8Config(scales=scales)})
    plain = pool.run(gradients, config.parallel.world_size, config, False)
    fused = pool.run(gradients, config.parallel.world_size, config, True)
    for (loss, expected, _), (fused_loss, actual, called) in zip(plain, fused, strict=True):
        assert fused_loss == pytest.approx(loss, rel=1e-12)
        assert called["rotate_packed"] == 4
        for name, gradient in expected.items():
            assert (actual[name] - gradient).abs().max() <= 1e-9 * gradient.abs().max(), name


def test_in_bf16_products_are_accumulated_in_float32(pool: Pool) -> None:
    config = small_run({}, precision="bf16")
    ((loss, expected, _),) = pool.run(gradients, 1, config, False)
    ((fused_loss, actual, _),) = pool.run(gradients, 1, config, True)
    assert fused_loss == pytest.approx(loss, rel=1e-3)
    for name, gradient in expected.items():
        assert actual[name].dtype == torch.float32
        assert (actual[name] - gradient).norm() < 0.05 * gradient.norm() + 1e-6, name


@pytest.mark.parametrize(("fused", "precision", "model"), [
    (True, "bf16", {}), (False, "fp32", {}), (True, "fp32", {"qkv_bias": True}),
])  # fmt: skip
def test_compiled_layers_hold_the_operators(
    pool: Pool, fused: bool, precision: str, model: dict[str, Any]
) -> None:  # fmt: skip
    """Also the ones that give the gradients of weights to their buffers; adjacent matrices are one product."""
    config = small_run({}, {"layers": 1} | model, precision=precision, global_batch=2)
    ((loss, expected, _),) = pool.run(gradients, 1, config, fused)
    ((compiled_loss, actual, called),) = pool.run(gradients, 1, config, fused, True)
    layers, matrices = 1, 7
    assert called["find_owner"] == 2 * layers * matrices  # forward and backward
    assert compiled_loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in expected.items():
        assert actual[name].dtype == torch.float32
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("parallel", [{}, {"tp": 2, "ep": 2, "etp": 1, "recompute": "full"}], ids=str)
def test_experts_between_compiled_parts_of_a_layer(pool: Pool, parallel: dict[str, Any]) -> None:
    """The compiled function is the layer, or what it recomputes."""
    experts = {"count": 4, "per_token": 2, "ffn": 12, "shared": 1, "balance_loss": 0.1, "bias_update": 0.01}
    config = small_run(parallel, {"layers": 1, "experts": experts}, precision="fp64")
    plain = pool.run(gradients, config.parallel.world_size, config, True)
    compiled = pool.run(gradients, config.parallel.world_size, config, True, True)
    for (loss, expected, _), (compiled_loss, actual, called) in zip(plain, compiled, strict=True):
        assert compiled_loss == pytest.approx(loss, rel=1e-12) and called["find_owner"]
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], gradient, rtol=1e-9, atol=1e-12)


def forward_with_hooks(config: RunConfig) -> list[int]:
    """Sizes of the outputs that hooks of queries see, with fused operators."""
    engine = engine_of(config)
    sizes: list[int] = []
    for module in find_modules(engine.stages[0].module, transformer.Attention):
        module.q.register_forward_hook(lambda module, args, output: sizes.append(output.shape[-1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "use_fused", lambda x: True)
        engine.step(0)
    return sizes


def test_a_hook_sees_the_result_of_its_layer(pool: Pool) -> None:
    ((*sizes,),) = pool.run(forward_with_hooks, 1, small_run({}, {"layers": 1}))
    assert sizes == [16, 16]
