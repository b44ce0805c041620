"""DeepSeek-V2 and V3 in Hugging Face's format: the fields of ``config.json`` for what the family llama has not.

That is latent attention, and experts in groups after some dense layers (transformers, models deepseek_v2 and
deepseek_v3).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.base.errors import UsageError
from shoal.spec.catalog import ModelShape

BIAS_UPDATE = 0.001  # of DeepSeek-V3's training (DeepSeek-AI 2024, section 4.2); its config does not have it
EXPERTS_PER_TOKEN = "num_experts_per_tok"


def latent_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `model` for latent attention; heads of keys and their widths are in it alone."""
    return {
        "kv_heads": config["num_attention_heads"], "head_dim": config["qk_nope_head_dim"],
        "latent": {
            "key_value_rank": config["kv_lora_rank"], "rotary_dim": config["qk_rope_head_dim"],
            "value_dim": config["v_head_dim"],
        } | ({"query_rank": config["q_lora_rank"]} if config.get("q_lora_rank") is not None else {}),
    }  # fmt: skip


def expert_fields(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of `model.experts`.

    Raises:
        UsageError: a value that shoal does not compute.
    """
    third = config["model_type"] == "deepseek_v3"
    grouped = third or config.get("topk_method", "greedy") == "group_limited_greedy"
    if not third and config.get("topk_method", "greedy") not in ("greedy", "group_limited_greedy"):
        raise UsageError(f"{where}: topk_method = {config['topk_method']!r}: shoal computes 'greedy' and "
                         "'group_limited_greedy'.")
    if not config["n_shared_experts"]:
        raise UsageError(f"{where}: n_shared_experts = {config['n_shared_experts']!r}: transformers has no such model.")
    return {
        "count": config["n_routed_experts"], "per_token": config[EXPERTS_PER_TOKEN],
        "ffn": config["moe_intermediate_size"], "shared": config["n_shared_experts"],
        "first": config["first_k_dense_replace"], "scale": float(config["routed_scaling_factor"]),
        "normalise": third and bool(config["norm_topk_prob"]),  # transformers' DeepSeek-V2 never does
        "score": "sigmoid" if third else "softmax", "bias_update": BIAS_UPDATE if third else 0.0,
        "balance_loss": config.get("aux_loss_alpha") or 0.0,
        "groups": (config["n_group"] or 1) if grouped else 1,
        "groups_per_token": (config["topk_group"] or 1) if grouped else 1,
    }  # fmt: skip


def config_fields(shape: ModelShape, kind: str) -> dict[str, Any]:
    """Return the entries of ``config.json`` that these families have besides llama's."""
    latent, experts = shape.latent, shape.moe
    if latent is None:
        raise ValueError("the model has no latent attention")
    third = {"rope_interleave": True, "num_nextn_predict_layers": shape.mtp_depth} if kind == "deepseek_v3" else {
        "topk_method": "greedy" if experts.groups == 1 else "group_limited_greedy"}  # fmt: skip
    return third | {
        "q_lora_rank": latent.query_rank, "kv_lora_rank": latent.key_value_rank,
        "qk_rope_head_dim": latent.rotary_dim, "qk_nope_head_dim": shape.head_dim, "v_head_dim": shape.value_dim,
        "n_routed_experts": experts.count, EXPERTS_PER_TOKEN: experts.per_token,
        "moe_intermediate_size": experts.ffn, "n_shared_experts": experts.shared,
        "first_k_dense_replace": experts.first, "routed_scaling_factor": experts.scale,
        "norm_topk_prob": experts.normalise, "aux_loss_alpha": experts.balance_loss,
        "n_group": experts.groups, "topk_group": experts.groups_per_token,
    }  # fmt: skip
