"""Llama 4 in Hugging Face's format: the fields of ``config.json`` for what the family llama has not.

That is chunks in local layers, global layers without positions, and a shared expert (transformers, model llama4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.base.errors import UsageError
from shoal.spec.catalog import ModelShape


def model_fields(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of `model`, with transformers' defaults.

    Raises:
        UsageError: a value that shoal does not compute.
    """
    layers, step = config["num_hidden_layers"], config.get("interleave_moe_layer_step", 1)
    size, every = config.get("attention_chunk_size", 8192), config.get("no_rope_layer_interval", 4)
    local = [bool(each) for each in config.get("no_rope_layers") or [(i + 1) % every for i in range(layers)]]
    computed = {
        "moe_layers": list(range(step - 1, layers, step)),
        "layer_types": ["chunked_attention" if each else "full_attention" for each in local],
    }
    for name, only in computed.items():
        if config.get(name, only) not in (only, None):
            raise UsageError(f"{where}: {name} = {config[name]!r}, but with its other values shoal computes {only!r}.")
    if size is None or True not in local:
        raise UsageError(f"{where}: attention_chunk_size = {size!r}, no_rope_layers = {local!r}: shoal computes this "
                         "family with chunks, in layers with rotary positions.")
    normed = config.get("use_qk_norm", True)
    return {
        "ffn": config["intermediate_size_mlp"], "window": size, "pattern": find_pattern(local),
        "qk_norm": normed, "plain_qk_norm": normed, "temperature_floor": config.get("floor_scale", 8192),
        "temperature": config.get("attn_scale", 0.1) if config.get("attn_temperature_tuning", True) else 0.0,
        "experts": {
            "count": config["num_local_experts"], "ffn": config["intermediate_size"], "every": step, "shared": 1,
            "score": "sigmoid", "normalise": False, "scales_input": True,
            "balance_loss": config.get("router_aux_loss_coef", 0.001),
        },
    }  # fmt: skip


def config_fields(shape: ModelShape) -> dict[str, Any]:
    """Return the entries of ``config.json`` that the family has besides llama's."""
    experts = shape.moe
    return {
        "intermediate_size_mlp": shape.ffn, "intermediate_size": experts.ffn, "attention_chunk_size": shape.window,
        "no_rope_layers": [int(shape.rotated(layer)) for layer in range(shape.layers)], "use_qk_norm": shape.qk_norm,
        "attn_temperature_tuning": shape.temperature > 0, "attn_scale": shape.temperature,
        "floor_scale": shape.temperature_floor, "num_local_experts": experts.count,
        "interleave_moe_layer_step": experts.every, "router_aux_loss_coef": experts.balance_loss,
    }  # fmt: skip


def find_pattern(local: Sequence[bool]) -> list[str]:
    """Return the shortest pattern of `ModelShape.pattern` whose repetition has these layers local."""
    period = next(n for n in range(1, len(local) + 1) if all(x == local[i % n] for i, x in enumerate(local)))
    return ["local" if each else "global" for each in local[:period]]
