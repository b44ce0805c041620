"""Shapes of the catalog beside transformers' own classes, built from the configs that the authors published."""

from typing import Any

import pytest
import torch

from shoal.spec.catalog import model_shape
from shoal.spec.hugging_face import model_fields

DEEPSEEK = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 1536,
            "kv_lora_rank": 512, "n_group": 8, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False}

GPT_OSS = {"head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128, "rms_norm_eps": 1e-5,
           "tie_word_embeddings": False, "rope_parameters": {
               "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
               "truncate": False, "original_max_position_embeddings": 4096}}

CONFIGS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "mistral-7b": ("mistral", (4096, 14336, 32, 32, 8, 32000), {
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "sliding_window": 4096, "tie_word_embeddings": False}),
    "olmo-2-7b": ("olmo2", (4096, 11008, 32, 32, 32, 100352), {
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 5e5, "tie_word_embeddings": False}),
    "qwen2-7b": ("qwen2", (3584, 18944, 28, 28, 4, 152064), {
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "use_sliding_window": False, "tie_word_embeddings": False}),
    "qwen3-8b": ("qwen3", (4096, 12288, 36, 32, 8, 151936), {
        "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "use_sliding_window": False,
        "tie_word_embeddings": False}),
    "qwen3-30b-a3b": ("qwen3_moe", (2048, 6144, 48, 32, 4, 151936), {
        "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "use_sliding_window": False, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "tie_word_embeddings": False}),
    # The reports print the counts of 256,128 rows; the files on the hub have 256,000.
    "gemma-2-2b": ("gemma2", (2304, 9216, 26, 8, 4, 256128), {"head_dim": 256, "query_pre_attn_scalar": 256}),
    "gemma-2-9b": ("gemma2", (3584, 14336, 42, 16, 8, 256128), {"head_dim": 256, "query_pre_attn_scalar": 256}),
    "gemma-2-27b": ("gemma2", (4608, 36864, 46, 32, 16, 256128), {"head_dim": 128, "query_pre_attn_scalar": 144}),
    "gemma-3-1b": ("gemma3_text", (1152, 6912, 26, 4, 1, 262144), {
        "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 512, "max_position_embeddings": 32768}),
    "mixtral-8x7b": ("mixtral", (4096, 14336, 32, 32, 8, 32000), {
        "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
        "tie_word_embeddings": False}),
    "llama-4-scout": ("llama4_text", (5120, 8192, 48, 40, 8, 202048), {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192}}),
    "llama-4-maverick": ("llama4_text", (5120, 8192, 48, 40, 8, 202048), {
        "num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False}),
    "gpt-oss-20b": ("gpt_oss", (2880, 2880, 24, 64, 8, 201088), GPT_OSS | {"num_local_experts": 32}),
    "gpt-oss-120b": ("gpt_oss", (2880, 2880, 36, 64, 8, 201088), GPT_OSS | {"num_local_experts": 128}),
    "deepseek-v2": ("deepseek_v2", (5120, 12288, 60, 128, 128, 102400), {
        **DEEPSEEK, "moe_intermediate_size": 1536, "n_routed_experts": 160, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "topk_group": 3, "topk_method": "group_limited_greedy", "first_k_dense_replace": 1,
        "routed_scaling_factor": 16.0, "norm_topk_prob": False}),
    "deepseek-v3": ("deepseek_v3", (7168, 18432, 61, 128, 128, 129280), {
        **DEEPSEEK, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
        "norm_topk_prob": True}),
}  # fmt: skip
"""Type of each model, its sizes (in the order of `SIZES`), and other fields of its config.json."""

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "vocab_size")
TRAINING = ("balance_loss", "z_loss", "bias_update")  # of experts: not in a config.json
LENGTH = "max_sequence"  # a config.json gives the length that inference allows


@pytest.mark.parametrize("name", CONFIGS)
def test_a_shape_is_that_of_the_published_config(name):
    transformers = pytest.importorskip("transformers")
    kind, sizes, more = CONFIGS[name]
    config = transformers.AutoConfig.for_model(kind, **dict(zip(SIZES, sizes, strict=True)), **more)
    shape = model_shape(name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert shape.parameters() == sum(weight.numel() for weight in model.parameters())
    given, fields = shape.model_dump(mode="json"), model_fields(config.to_dict(), name)
    for field, value in fields.items():
        if field == "query_scalar" and given[field] is None:
            assert value == shape.head_dim  # its default
        elif field == "latent":
            assert {**given[field], "value_dim": given[field]["value_dim"] or shape.head_dim} == value
        elif field == "rope_scaling":
            assert {**given[field], **value} == given[field]
        elif field == "experts":
            assert {n: v for n, v in value.items() if n not in TRAINING and v != given[field][n]} == {}
        elif field not in (LENGTH, "name", "mtp_depth"):  # no class has these modules
            assert given[field] == value, field
