"""Models in Hugging Face's format: ``config.json`` to a config section and back.

A family is one architecture of transformers that `ModelShape` describes exactly. What it does not describe is refused:
another model with the same weights would compute something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.base.errors import UsageError
from shoal.spec import deepseek
from shoal.spec.catalog import ModelShape

Config = Mapping[str, Any]
EXPERTS_PER_TOKEN = "num_experts_per_tok"


@dataclass(frozen=True)
class HFFamily:
    """One architecture of transformers.

    Attributes:
        architecture: name of its class.
        fixed: fields of ``config.json`` with the only value that shoal computes.
        parts: fields of `ModelShape` that it always sets.
        experts: name of the number of experts, and of the width of one; "" without experts.
    """

    architecture: str
    fixed: Config
    parts: Config
    experts: tuple[str, str] = ("", "")


_LLAMA = {"hidden_act": "silu", "mlp_bias": False, "pretraining_tp": 1}
_QWEN = {**_LLAMA, "use_sliding_window": False}
FAMILIES = {
    "llama": HFFamily("LlamaForCausalLM", {**_LLAMA, "attention_bias": False}, {"family": "llama"}),
    "mistral": HFFamily("MistralForCausalLM", _LLAMA, {"family": "llama"}),
    "qwen2": HFFamily("Qwen2ForCausalLM", _QWEN, {"family": "llama", "qkv_bias": True}),
    "qwen3": HFFamily(
        "Qwen3ForCausalLM", {**_QWEN, "attention_bias": False}, {"family": "llama", "qk_norm": True},
    ),
    "mixtral": HFFamily(
        "MixtralForCausalLM", {"hidden_act": "silu"}, {"family": "llama"}, ("num_local_experts", "intermediate_size")
    ),
    "qwen3_moe": HFFamily(
        "Qwen3MoeForCausalLM",
        {**_QWEN, "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        {"family": "llama", "qk_norm": True}, ("num_experts", "moe_intermediate_size"),
    ),
    "deepseek_v2": HFFamily(
        "DeepseekV2ForCausalLM", {**_LLAMA, "attention_bias": False, "scoring_func": "softmax", "moe_layer_freq": 1},
        {"family": "llama"},
    ),
    "deepseek_v3": HFFamily(
        "DeepseekV3ForCausalLM",
        {**_LLAMA, "attention_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
         "rope_interleave": True}, {"family": "llama"},
    ),
    "gpt2": HFFamily(
        "GPT2LMHeadModel",
        {"activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
         "reorder_and_upcast_attn": False, "add_cross_attention": False}, {"family": "gpt"},
    ),
}  # fmt: skip
"""Families by the ``model_type`` of their config."""


def model_fields(config: Config, where: str) -> dict[str, Any]:
    """Return the fields of the config section `model` for a ``config.json``.

    Raises:
        UsageError: the architecture, or a value of it, is not one that shoal computes.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise UsageError(f"{where}: model_type = {kind!r} is not a family that shoal trains.\n"
                         f"  These are: {', '.join(FAMILIES)}.")
    if config.get("quantization_config"):
        raise UsageError(f"{where}: quantization_config: quantised weights are not read.\n"
                         "  Name a folder with the weights in float32, bfloat16 or float16.")
    for name, only in family.fixed.items():
        if config.get(name, only) not in (only, None):
            raise UsageError(f"{where}: {name} = {config[name]!r}, but shoal computes {kind} with {only!r} alone.")
    try:
        fields = _gpt_fields(config) if kind == "gpt2" else _llama_fields(config, family, where)
    except KeyError as error:
        raise UsageError(f"{where}: it has no value for {error}.") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UsageError(f"{where}: one of its values is wrong: {error}.") from None
    parts = fields | fields.get("rope_scaling", {}) | fields.get("experts", {}) | fields.get("latent", {})
    if missing := [name for name, value in parts.items() if value is None]:
        raise UsageError(f"{where}: it has no value for {', '.join(missing)}.")
    return fields


def _gpt_fields(config: Config) -> dict[str, Any]:
    hidden, heads = int(config["n_embd"]), int(config["n_head"])
    return {
        "family": "gpt", "layers": config["n_layer"], "hidden": hidden, "heads": heads, "kv_heads": heads,
        "head_dim": hidden // heads, "ffn": config.get("n_inner") or 4 * hidden, "vocab": config["vocab_size"],
        "max_sequence": config["n_positions"], "tied": config.get("tie_word_embeddings", True),
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
    }  # fmt: skip


def _llama_fields(config: Config, family: HFFamily, where: str) -> dict[str, Any]:
    hidden, heads, longest = config["hidden_size"], config["num_attention_heads"], config["max_position_embeddings"]
    window = config.get("sliding_window", 4096 if config["model_type"] == "mistral" else None)  # its default
    if window and config.get("model_type") in ("mistral", "mixtral") and window < longest:
        raise UsageError(f"{where}: sliding_window = {window}: shoal computes full attention alone.\n"
                         f"  Trained on sequences of at most {window} tokens the model is the same: set "
                         f"max_position_embeddings = {window} in a copy of the folder.")
    rotary = {"rope_theta": config.get("rope_theta", 10000.0)} | (
        config.get("rope_parameters") or config.get("rope_scaling") or {})
    fields = {
        **family.parts, "layers": config["num_hidden_layers"], "hidden": hidden, "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads, "head_dim": config.get("head_dim") or hidden // heads,
        "ffn": config["intermediate_size"], "vocab": config["vocab_size"], "max_sequence": longest,
        "tied": config.get("tie_word_embeddings", False), "norm_eps": config["rms_norm_eps"],
        "rope_theta": float(rotary["rope_theta"]),
    }  # fmt: skip
    deep = config.get("model_type") in ("deepseek_v2", "deepseek_v3")
    if deep:
        fields |= deepseek.latent_fields(config) | {"experts": deepseek.expert_fields(config, where)}
    match rotary.get("rope_type", rotary.get("type", "default")):
        case "default":
            pass
        case "llama3":
            fields["rope_scaling"] = {
                "factor": rotary["factor"], "low_frequency": rotary["low_freq_factor"],
                "high_frequency": rotary["high_freq_factor"],
                "original_max_sequence": rotary["original_max_position_embeddings"],
            }
        case "yarn" if deep:
            fields["rope_scaling"] = deepseek.yarn_fields(rotary, where)
        case other:
            raise UsageError(f"{where}: rope_type = {other!r}: shoal computes 'default' and 'llama3', and 'yarn' for "
                             "deepseek_v2 and deepseek_v3.")
    count, width = family.experts
    if count:
        fields["experts"] = {
            "count": config.get(count) or config["num_local_experts"], "per_token": config[EXPERTS_PER_TOKEN],
            "ffn": config[width],
            "normalise": count == "num_local_experts" or config["norm_topk_prob"],  # Mixtral always
            "balance_loss": config.get("router_aux_loss_coef", 0.0),
        }  # fmt: skip
    return fields


def hf_config(shape: ModelShape, dtype: str, where: str) -> dict[str, Any]:
    """Return the ``config.json`` of a model.

    Args:
        dtype: number format of the saved weights, as torch names it.

    Raises:
        UsageError: transformers has no such model.
    """
    kind = _model_type(shape, where)
    family = FAMILIES[kind]
    common = {"model_type": kind, "architectures": [family.architecture], "dtype": dtype, "vocab_size": shape.vocab,
              "tie_word_embeddings": shape.tied, **family.fixed}  # fmt: skip
    if kind == "gpt2":
        return common | {
            "n_layer": shape.layers, "n_embd": shape.hidden, "n_head": shape.heads, "n_inner": shape.ffn,
            "n_positions": shape.max_sequence, "layer_norm_epsilon": shape.norm_eps,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        }
    values = common | {
        "num_hidden_layers": shape.layers, "hidden_size": shape.hidden, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "intermediate_size": shape.ffn,
        "max_position_embeddings": shape.max_sequence, "rms_norm_eps": shape.norm_eps, "rope_theta": shape.rope_theta,
    }
    if (scaling := shape.rope_scaling) is not None and scaling.kind == "yarn":
        values["rope_scaling"] = deepseek.yarn_config(scaling)
    elif scaling is not None:
        values["rope_scaling"] = {
            "rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_frequency,
            "high_freq_factor": scaling.high_frequency,
            "original_max_position_embeddings": scaling.original_max_sequence,
        }
    if shape.latent is not None:
        del values["head_dim"]  # which transformers takes for the rotated part
        values |= deepseek.config_fields(shape, kind)
    elif (experts := shape.experts) is not None:
        count, width = family.experts
        values |= {count: experts.count, EXPERTS_PER_TOKEN: experts.per_token, width: experts.ffn,
                   "norm_topk_prob": experts.normalise, "router_aux_loss_coef": experts.balance_loss}  # fmt: skip
    return values


def _model_type(shape: ModelShape, where: str) -> str:
    experts, unlike = shape.experts, ""
    if shape.latent:
        unlike = deepseek.find_unlike(shape)
    elif shape.rope_scaling and shape.rope_scaling.kind == "yarn":
        unlike = "YaRN without latent attention"
    elif shape.depths:
        unlike = "layers that skip tokens"
    elif experts and (experts.groups > 1 or
                      (experts.gate, experts.score, experts.scale, experts.shared) != ("top-k", "softmax", 1.0, 0)):
        unlike = "this gate, or shared experts"
    elif experts and (experts.bias_update or experts.capacity_factor):
        unlike = "a selection bias, or a capacity of experts"
    elif experts and len(experts.layers(shape.layers)) < shape.layers:
        unlike = "experts in some layers only"
    elif shape.family == "gpt" and (experts or shape.heads * shape.head_dim != shape.hidden or
                                    shape.kv_heads != shape.heads):
        unlike = "experts or other widths of heads in the family gpt"
    elif shape.qkv_bias and (experts or shape.qk_norm or shape.head_dim * shape.heads != shape.hidden):
        unlike = "biases of queries, keys and values with these other parts"
    elif experts and not shape.qk_norm and (not experts.normalise or experts.ffn != shape.ffn):
        unlike = "experts of this width or weights without norms of queries and keys"
    if unlike:
        raise UsageError(f"{where}: no family of transformers that shoal writes has {unlike}.")
    if shape.latent:
        return deepseek.name_family(shape)
    if shape.family == "gpt":
        return "gpt2"
    if experts:
        return "qwen3_moe" if shape.qk_norm else "mixtral"
    return "qwen2" if shape.qkv_bias else "qwen3" if shape.qk_norm else "llama"
