"""Other implementations on the same shapes: torch's FSDP2, and the Llama of transformers, plain or with liger's layers.

Packages are imported only here, when an item needs them; a missing one is a row that reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal.engine.device import init_world
from shoal.engine.models.transformer import Transformer, initialise
from shoal.labs.bench.benchmark import Row
from shoal.labs.bench.gpu.ceilings import attained_flops
from shoal.labs.bench.gpu.engine_run import RunPoint, describe_rates, time_each
from shoal.labs.bench.gpu.item import GpuSetting, attempt
from shoal.spec.catalog import ModelShape
from shoal.training.check import check

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Summed loss of tokens and targets [b, s]."""


def time_rival(setting: GpuSetting, name: str, point: RunPoint) -> Iterator[Row]:
    """Time steps of another implementation: float32 weights, bf16 products, fused AdamW, accumulated gradients."""
    shape = check(point.config)
    row: dict[str, Any] = {"layers": shape.layers, "s": point.sequence, "b": point.batch}
    with attempt(row):
        device = setting.torch_device
        attained = attained_flops(shape, point.batch * point.sequence, device)
        module, compute_loss = RIVALS[name](setting, shape)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
        ids = torch.randint(shape.vocab, (point.batch, point.sequence + 1), device=device)

        def step(number: int) -> None:
            for _ in range(point.microbatches):
                (compute_loss(ids[:, :-1], ids[:, 1:]) / point.tokens).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        seconds = median(time_each(step, setting, together=2))  # as shoal's
        row |= {
            "tokens/s": point.tokens / seconds, **describe_rates(setting, point, seconds, attained),
            "allocated GB": None if setting.rehearsal else torch.cuda.max_memory_allocated() / 1e9,
        }
    yield row


def _fsdp(setting: GpuSetting, shape: ModelShape) -> tuple[nn.Module, Loss]:
    """FSDP2 with each block compiled, on shoal's plain model, as torchtitan does."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    init_world(0, 1, dist.HashStore(), setting.torch_device)
    with torch.device(setting.torch_device):
        model = Transformer(shape)
    initialise(model, 0)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh = dist.init_device_mesh(setting.device, (1,))
    for block in model.layers.values():
        if not setting.rehearsal:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, model


def _transformers(setting: GpuSetting, shape: ModelShape, *, liger: bool = False) -> tuple[nn.Module, Loss]:
    from transformers import LlamaConfig, LlamaForCausalLM

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    attention: dict[str, Any] = {"attn_implementation": "sdpa"}  # of the base class: type checkers do not know it
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, use_cache=False,
        tie_word_embeddings=shape.tied, **attention,
    )  # fmt: skip
    with torch.device(setting.torch_device):
        model = LlamaForCausalLM(config)
    if not setting.rehearsal and not liger:
        for block in model.model.layers:
            block.compile()

    def compute_loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(setting.device, torch.bfloat16):  # it shifts its labels by itself
            return model(tokens, labels=tokens).loss * targets.numel()

    return model, compute_loss


RIVALS: dict[str, Callable[[GpuSetting, ModelShape], tuple[nn.Module, Loss]]] = {
    "fsdp": _fsdp,
    "transformers": _transformers,
    "liger": lambda setting, shape: _transformers(setting, shape, liger=True),
}
