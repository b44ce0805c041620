"""Models of transformers, with tiny random weights."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (  # loads their code once, not on each rank: that takes longer than a test
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from shoal.engine.own.definition import OwnModel
from tests.testing.own.plain import CLASSES, VOCAB, Images, Tokens, cross_entropy

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
}
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
EAGER = {"attn_implementation": "eager"}


def next_token(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    targets = torch.where(batch["counts"], batch["ids"], -100)
    return cross_entropy(model(input_ids=batch["ids"]).logits[:, :-1], targets[:, 1:])


def masked_token(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits = model(input_ids=torch.where(batch["counts"], batch["ids"], 3)).logits
    return cross_entropy(logits, torch.where(batch["counts"], -100, batch["ids"]))


def copied(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return cross_entropy(model(input_ids=batch["ids"], decoder_input_ids=batch["ids"]).logits, batch["ids"])


def classified(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    images, classes = batch
    return F.cross_entropy(model(images).logits, classes, reduction="sum"), len(classes)


llama = OwnModel(
    lambda: LlamaForCausalLM(LlamaConfig(**SMALL, **EAGER, num_key_value_heads=1, tie_word_embeddings=True)),
    next_token, Tokens, blocks=("model.layers.0", "model.layers.1"), pipeline=("model.layers",),
)


def build_qwen3_moe(kv_heads: int) -> nn.Module:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        **SMALL, **EAGER, num_key_value_heads=kv_heads, head_dim=16, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, experts_implementation="eager",
    ))  # fmt: skip


qwen3_moe = OwnModel(lambda: build_qwen3_moe(kv_heads=1), next_token, Tokens, pipeline=("model.layers",))
gpt2 = OwnModel(
    lambda: GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=2, **IDS, **EAGER)),
    next_token, Tokens, blocks=("transformer.h.0", "transformer.h.1"), pipeline="auto",
)
wide_llama = OwnModel(
    lambda: LlamaForCausalLM(LlamaConfig(**SMALL, **EAGER, num_key_value_heads=2, mlp_bias=True)),
    next_token, Tokens, blocks=("model.layers.0", "model.layers.1"), pipeline=("model.layers",),
)
wide_qwen3_moe = OwnModel(lambda: build_qwen3_moe(kv_heads=2), next_token, Tokens, pipeline=("model.layers",))
bert = OwnModel(
    lambda: BertForMaskedLM(BertConfig(**SMALL)), masked_token, Tokens,
    pipeline=("bert.encoder.layer",),
)
split_bert = OwnModel(
    lambda: BertForMaskedLM(BertConfig(**SMALL, **EAGER)),  # with dropout in and between split layers
    masked_token, Tokens, tensor_parallel={
        "bert.encoder.layer.*.attention.self.{query,key,value}": "colwise",
        "bert.encoder.layer.*.attention.output.dense": "rowwise", "bert.encoder.layer.*": "sequence_parallel",
        "bert.encoder.layer.*.intermediate.dense": "colwise", "bert.encoder.layer.*.output.dense": "rowwise",
    },
    pipeline=("bert.encoder.layer",),
)  # fmt: skip
t5 = OwnModel(
    lambda: T5ForConditionalGeneration(T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2)),
    copied, Tokens, blocks=tuple(f"{part}.block.{i}" for part in ("encoder", "decoder") for i in range(2)),
    pipeline=("encoder.block", "decoder.block"),
)
vit = OwnModel(
    lambda: ViTForImageClassification(ViTConfig(
        **{k: v for k, v in SMALL.items() if k != "vocab_size"}, image_size=16, patch_size=4, num_labels=CLASSES)),
    classified, Images, pipeline=("vit.layers",),
)  # fmt: skip
