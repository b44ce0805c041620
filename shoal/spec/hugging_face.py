"""Models in Hugging Face's format: ``config.json`` to a config section and back.

A family is one architecture of transformers that `ModelShape` describes exactly. What it does not describe is refused:
another model with the same weights would compute something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from shoal.base.errors import UsageError
from shoal.base.section import truncate
from shoal.spec import deepseek, llama4
from shoal.spec.catalog import ModelShape
from shoal.spec.catalog.experts import Experts
from shoal.spec.config.model import ModelConfig
from shoal.spec.deepseek import EXPERTS_PER_TOKEN

Config = Mapping[str, Any]


@dataclass(frozen=True)
class HFFamily:
    """One architecture of transformers."""

    architecture: str  # name of its class
    fixed: Config  # fields of ``config.json`` with the only value that shoal computes
    parts: Config  # fields of `ModelShape` that it always sets
    experts: tuple[str, str] = ("", "")  # name of the number of experts, and of the width of one; "" without experts
    # whether ``sliding_window`` holds for all layers, or for those that ``layer_types`` names
    windows: Literal["none", "all", "by layer"] = "none"
    # whether scores and logits may be capped, and local layers have other rotary frequencies; norms are stored as
    # differences from one, and embeddings are tied unless the config says otherwise
    gemma: bool = False


_LLAMA = {"hidden_act": "silu", "mlp_bias": False, "pretraining_tp": 1}
_GEMMA = {"family": "llama", "post_norm": "also", "activation": "gelu", "scaled_embedding": True}
FAMILIES = {
    "llama": HFFamily("LlamaForCausalLM", {**_LLAMA, "attention_bias": False}, {"family": "llama"}),
    "mistral": HFFamily("MistralForCausalLM", _LLAMA, {"family": "llama"}, windows="all"),
    "qwen2": HFFamily("Qwen2ForCausalLM", _LLAMA, {"family": "llama", "qkv_bias": True}, windows="by layer"),
    "qwen3": HFFamily(
        "Qwen3ForCausalLM", {**_LLAMA, "attention_bias": False}, {"family": "llama", "qk_norm": True},
        windows="by layer",
    ),
    "mixtral": HFFamily(
        "MixtralForCausalLM", {"hidden_act": "silu"}, {"family": "llama"}, ("num_local_experts", "intermediate_size"),
        "all",
    ),
    "qwen3_moe": HFFamily(
        "Qwen3MoeForCausalLM",
        {**_LLAMA, "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        {"family": "llama", "qk_norm": True}, ("num_experts", "moe_intermediate_size"), "all",
    ),
    "gpt_oss": HFFamily(
        "GptOssForCausalLM",
        {"hidden_act": "silu", "attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        {"family": "llama", "qkv_bias": True, "out_bias": True, "sinks": True, "activation": "clamped"},
        ("num_local_experts", "intermediate_size"), "by layer",
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
    "olmo2": HFFamily(
        "Olmo2ForCausalLM", {"hidden_act": "silu", "attention_bias": False},
        {"family": "llama", "qk_norm": True, "joint_qk_norm": True, "post_norm": "only"},
    ),
    "gemma2": HFFamily(
        "Gemma2ForCausalLM",
        {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "use_bidirectional_attention": None},
        _GEMMA, windows="by layer", gemma=True,
    ),
    "gemma3_text": HFFamily(
        "Gemma3ForCausalLM",
        {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "use_bidirectional_attention": False},
        _GEMMA | {"qk_norm": True}, windows="by layer", gemma=True,
    ),
    "llama4_text": HFFamily(
        "Llama4ForCausalLM", {"hidden_act": "silu", "attention_bias": False, "num_experts_per_tok": 1},
        {"family": "llama", "chunked": True, "global_rope": False},
    ),
    "gpt2": HFFamily(
        "GPT2LMHeadModel",
        {"activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
         "reorder_and_upcast_attn": False, "add_cross_attention": False}, {"family": "gpt"},
    ),
}  # fmt: skip
"""Families by the ``model_type`` of their config."""

_ROPE = {"factor": "factor", "original_max_sequence": "original_max_position_embeddings"}
ROPE_SCALING = {
    "linear": {"factor": "factor"},
    "llama3": {**_ROPE, "low_frequency": "low_freq_factor", "high_frequency": "high_freq_factor"},
    "yarn": {
        **_ROPE, "low_frequency": "beta_slow", "high_frequency": "beta_fast", "mscale": "mscale",
        "mscale_all": "mscale_all_dim", "truncate": "truncate",
    },
}  # fmt: skip
"""Names of the fields of `RopeScaling` in a ``config.json``, by its ``rope_type``."""

YARN_DEFAULTS = {"low_frequency": 1.0, "high_frequency": 32.0, "mscale": 0.0, "mscale_all": 0.0, "truncate": True}
"""transformers' values of what a config of yarn leaves out."""


def model_fields(config: Config, where: str) -> dict[str, Any]:
    """Return the fields of the config section `model` for a ``config.json``.

    Raises:
        UsageError: the architecture, or a value of it, is not one that shoal computes.
    """
    kind = config.get("model_type")
    if kind == "llama4" and isinstance(text := config.get("text_config"), Mapping):  # with images; its text model alone
        config = {"quantization_config": config.get("quantization_config"), **text}
        kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise UsageError(f"{where}: model_type = {kind!r} is not a family that shoal trains.\n"
                         f"  These are: {', '.join(FAMILIES)}.")
    quantised = config.get("quantization_config") or {}
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else "?"
    if quantised and (kind, method) != ("gpt_oss", "mxfp4"):
        raise UsageError(f"{where}: quantization_config: quantised weights are not read, but for gpt-oss in MXFP4.\n"
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
    kind = config["model_type"]
    by_layer = config.get("rope_parameters") or {}
    base = {"gemma3_text": 1e6, "llama4_text": 5e5}.get(kind, 1e4)
    rotary: Config = {"rope_theta": config.get("rope_theta", base)} | (
        by_layer.get("full_attention") or by_layer or config.get("rope_scaling") or {})
    fields = {
        **family.parts, "layers": config["num_hidden_layers"], "hidden": hidden, "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads, "head_dim": config.get("head_dim") or hidden // heads,
        "ffn": config["intermediate_size"], "vocab": config["vocab_size"], "max_sequence": longest,
        "tied": config.get("tie_word_embeddings", family.gemma), "norm_eps": config["rms_norm_eps"],
        "rope_theta": float(rotary["rope_theta"]), **_windows(config, family),
    }  # fmt: skip
    if kind in ("deepseek_v2", "deepseek_v3"):
        fields |= deepseek.latent_fields(config) | {"experts": deepseek.expert_fields(config, where)}
        if kind == "deepseek_v3" and config.get("num_nextn_predict_layers"):
            fields["mtp_depth"] = config["num_nextn_predict_layers"]
    if kind == "llama4_text":
        fields |= llama4.model_fields(config, where)
    if family.gemma:
        fields |= _gemma_fields(config, fields)
    if (scaling := rotary.get("rope_type", rotary.get("type", "default"))) != "default":
        fields["rope_scaling"] = _rope_fields(scaling, rotary, where)
    count, width = family.experts
    if count:
        fields["experts"] = {
            "count": config.get(count) or config["num_local_experts"], "per_token": config[EXPERTS_PER_TOKEN],
            "ffn": config[width],
            "normalise": count == "num_local_experts" or config["norm_topk_prob"],  # Mixtral and gpt-oss always
            "balance_loss": config.get("router_aux_loss_coef", 0.0), "biases": kind == "gpt_oss",
        }  # fmt: skip
    return fields


def _rope_fields(kind: object, rotary: Config, where: str) -> dict[str, Any]:
    """Return the fields of `model.rope_scaling`.

    Raises:
        UsageError: it is of a kind, or has a value, that shoal does not compute.
    """
    if not isinstance(kind, str) or kind not in ROPE_SCALING:
        raise UsageError(f"{where}: rope_type = {kind!r}: shoal computes 'default', 'linear', 'llama3' and 'yarn'.")
    if kind == "yarn" and rotary.get("attention_factor") is not None:
        raise UsageError(f"{where}: rope_parameters.attention_factor = {rotary['attention_factor']!r}: shoal computes "
                         "yarn without it.")
    names, defaults = ROPE_SCALING[kind], YARN_DEFAULTS if kind == "yarn" else {}
    given = {ours: rotary.get(theirs) if ours in defaults else rotary[theirs] for ours, theirs in names.items()}
    missing = {ours: value for ours, value in defaults.items() if not given[ours] and given[ours] is not False}
    return {"kind": kind} | given | missing


def _gemma_fields(config: Config, fields: Config) -> dict[str, Any]:
    """Return Gemma's own parts, with transformers' defaults."""
    second = config["model_type"] == "gemma2"
    found = {
        "query_scalar": config.get("query_pre_attn_scalar", 256),
        "softcap": config.get("attn_logit_softcapping", 50.0 if second else None),
        "logit_softcap": config.get("final_logit_softcapping", 30.0 if second else None),
    }
    if not second and "window" in fields:
        local: Config = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
        if local.get("rope_type", "default") != "default":
            raise ValueError("rotary frequencies of sliding_attention may not be rescaled")
        found["local_rope_theta"] = float(local.get("rope_theta", config.get("rope_local_base_freq", 10000.0)))
    return {name: value for name, value in found.items() if value is not None}


def _windows(config: Config, family: HFFamily) -> dict[str, Any]:
    """Return the window and the pattern of local layers, if there are any, with transformers' defaults."""
    kind, layers = config["model_type"], config["num_hidden_layers"]
    window = config.get("sliding_window", {"mixtral": None, "gpt_oss": 128}.get(kind, 4096))
    if family.windows == "none" or not window or (kind.startswith("qwen") and not config.get("use_sliding_window")):
        return {}
    if family.windows == "all":
        return {"window": window}
    if kind.startswith("gemma") or kind == "gpt_oss":
        every = config.get("sliding_window_pattern", 6) if kind == "gemma3_text" else 2
        local = [(layer + 1) % every > 0 for layer in range(layers)]
    else:
        local = [layer >= config.get("max_window_layers", 28) for layer in range(layers)]
    if types := config.get("layer_types"):
        local = [each == "sliding_attention" for each in types]
    if True not in local:
        return {}
    pattern = llama4.find_pattern(local)
    return {"window": window} | ({"pattern": pattern} if "global" in pattern else {})


def hf_config(shape: ModelShape, dtype: str, where: str) -> dict[str, Any]:
    """Return the ``config.json`` of a model.

    Args:
        dtype: number format of the saved weights, as torch names it.

    Raises:
        UsageError: transformers has no such model.
    """
    return _config(shape, model_type(shape, where)) | {"dtype": dtype}


def _config(shape: ModelShape, kind: str) -> dict[str, Any]:
    """Return the ``config.json`` of a model as one of a family, which may lack some of its parts."""
    family = FAMILIES[kind]
    common = {"model_type": kind, "architectures": [family.architecture], "vocab_size": shape.vocab,
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
    if (scaling := shape.rope_scaling) is not None:
        given = {theirs: getattr(scaling, ours) for ours, theirs in ROPE_SCALING[scaling.kind].items()}
        given = {name: value for name, value in given.items() if value or name == "truncate"}
        values["rope_scaling"] = {"rope_type": scaling.kind, **given}
    if family.gemma:
        values |= {
            "query_pre_attn_scalar": shape.query_scalar or shape.head_dim, "attn_logit_softcapping": shape.softcap,
            "final_logit_softcapping": shape.logit_softcap,
        }
        if kind == "gemma3_text":
            own = {"rope_theta": shape.rope_theta} | (values.pop("rope_scaling", None) or {"rope_type": "default"})
            other = shape.local_rope_theta or shape.rope_theta
            values["rope_parameters"] = {
                "full_attention": own, "sliding_attention": {"rope_type": "default", "rope_theta": other},
            }
    local = [shape.reach(layer) is not None for layer in range(shape.layers)]
    if family.windows == "by layer":
        values["layer_types"] = ["sliding_attention" if each else "full_attention" for each in local]
    if family.windows != "none":
        values |= {"sliding_window": shape.window} | ({"use_sliding_window": True} if shape.window else {})
    count, width = family.experts
    if kind in ("deepseek_v2", "deepseek_v3"):
        del values["head_dim"]  # which transformers takes for the rotated part
        values |= deepseek.config_fields(shape, kind)
    elif kind == "llama4_text":
        values |= llama4.config_fields(shape)
    elif kind == "qwen2":
        del values["head_dim"]  # which its class derives
    elif count:
        experts = shape.moe
        values |= {count: experts.count, EXPERTS_PER_TOKEN: experts.per_token, width: experts.ffn,
                   "norm_topk_prob": experts.normalise, "router_aux_loss_coef": experts.balance_loss}  # fmt: skip
    return values


@cache
def model_type(shape: ModelShape, where: str = "model") -> str:
    """Return the family of a model, as ``config.json`` names it: one whose config, read again, gives this model.

    Raises:
        UsageError: transformers has no such model; the message names what differs from the nearest family.
    """
    wanted, found = _read_parts(shape), dict[str, dict[str, Any]]()
    for kind in FAMILIES:
        with suppress(UsageError, ValueError):  # without experts, or without chunks in local layers
            fields = model_fields(_config(shape, kind), where)
            read = _read_parts(ModelConfig(name="", **fields).shape(vocab=1, sequence_length=1))
            found[kind] = {name: value for name, value in read.items() if value != wanted[name]}
            if not found[kind]:
                return kind
    nearest = min(found, key=lambda kind: len(found[kind]))
    values = ((name, truncate(wanted[name]), truncate(value)) for name, value in found[nearest].items())
    raise UsageError(f"{where}: no family of transformers that shoal writes is this model; the nearest, {nearest}, has "
                     f"others of {', '.join(f'{name} = {own} ({value})' for name, own, value in values)}.")


def _read_parts(shape: ModelShape) -> dict[str, Any]:
    """Return what a config has to say of a model, each in one way, but for what only training reads."""
    parts, experts, latent = shape.model_dump(), shape.experts, shape.latent
    for name in ("mtp_depth", "mtp_weight", "window", "pattern", "latent", "experts"):
        del parts[name]
    sparse = experts.layers(shape.layers) if experts else []
    windows = [shape.reach(layer) for layer in range(shape.layers)]
    theta = shape.rope_theta if shape.family == "llama" else None
    local_theta = shape.local_rope_theta or (None if shape.rope_scaling else theta)
    parts |= {
        "query_scalar": shape.query_scalar or shape.head_dim, "ffn": shape.ffn if len(sparse) < shape.layers else None,
        "rope_theta": theta, "local_rope_theta": local_theta if any(windows) else None, "windows": windows,
        "experts.layers": sparse, "value_dim": shape.value_dim,
        "temperature_floor": shape.temperature_floor if shape.temperature else None,
    }  # fmt: skip
    parts["experts.bias_update"] = 0.0
    for name in Experts.model_fields.keys() - {"first", "every", "balance_loss", "z_loss", "bias_update"}:
        parts[f"experts.{name}"] = getattr(experts, name) if experts else None
    for name in ("query_rank", "key_value_rank", "rotary_dim"):
        parts[f"latent.{name}"] = getattr(latent, name) if latent else None
    if experts:
        parts["experts.groups_per_token"] = min(experts.groups_per_token, experts.groups)
        if latent is None or experts.score == "softmax":  # DeepSeek-V3's selection bias is stored, and may be 0
            parts["experts.bias_update"] = experts.bias_update
    return parts
