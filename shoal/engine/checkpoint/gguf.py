"""A model as one GGUF file, the format of llama.cpp, written by the library ``gguf`` (the extra ``shoal[gguf]``).

Tensors and values have the names that llama.cpp's ``convert_hf_to_gguf.py`` gives them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shoal.base.addresses import AnyPath
from shoal.base.boxes import Box, Piece
from shoal.base.errors import UsageError
from shoal.base.files import read_text
from shoal.engine.checkpoint.hugging_face_export import find_saved
from shoal.engine.checkpoint.load import load
from shoal.engine.checkpoint.manifest import DTYPES, read_manifest
from shoal.engine.data.tokenizer import BytesTokenizer, FileTokenizer, Tokenizer
from shoal.engine.models.attention import rotary_frequencies
from shoal.spec.catalog import ModelShape
from shoal.spec.hugging_face import model_type

if TYPE_CHECKING:
    from gguf import GGUFWriter

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}  # fmt: skip
"""Architectures of llama.cpp by family."""

NAMES = {
    "embed.token": "token_embd", "norm": "output_norm", "head": "output", "attention_norm": "attn_norm",
    "mlp_norm": "ffn_norm", "attention.q": "attn_q", "attention.k": "attn_k", "attention.v": "attn_v",
    "attention.out": "attn_output", "attention.q_norm": "attn_q_norm", "attention.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate", "mlp.up": "ffn_up", "mlp.down": "ffn_down", "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate": "ffn_gate_exps", "mlp.experts.up": "ffn_up_exps", "mlp.experts.down": "ffn_down_exps",
}  # fmt: skip
"""Names of modules."""

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
SPLITS = {rf"{_SHORT}{_WORDS}|\p{{N}}{{1,3}}{_REST}": "llama-bpe", rf"{_SHORT}{_WORDS}|\p{{N}}{_REST}": "qwen2"}
"""How texts are split before byte pairs are merged, by the expression, besides GPT-2's."""


def check_gguf(shape: ModelShape, tokenizer: Tokenizer, where: str) -> str:
    """Return the architecture of a model in llama.cpp.

    Raises:
        UsageError: llama.cpp would compute something else, or split text in another way.
    """
    kind = model_type(shape, where)
    unlike = ""
    if kind not in ARCHITECTURES:
        unlike = f"the family {kind}; {', '.join(ARCHITECTURES)} can be"
    elif shape.window:
        unlike = "windows"
    elif shape.rope_scaling and shape.rope_scaling.kind == "yarn":
        unlike = "rope_scaling of the kind yarn"
    elif shape.experts and not shape.experts.normalise:
        unlike = "experts whose weights are not divided by their sum"
    if unlike:
        raise UsageError(f"{where}: a model with {unlike} is not written as GGUF.\n  Write a folder: shoal export hf.")
    if isinstance(tokenizer, FileTokenizer):
        _name_split(tokenizer)
        text, around = tokenizer.encode("a").tolist(), tokenizer.encode("a", begin=True).tolist()
        if around[-len(text):] != text or len(around) > len(text) + 1:
            raise UsageError(f"{tokenizer.path}: GGUF says nothing of a tokenizer that adds tokens after a text, or "
                             "several before it.\n  Write a folder: shoal export hf.")
    return ARCHITECTURES[kind]


def export_gguf(
    checkpoint: AnyPath, shape: ModelShape, path: Path, dtype: torch.dtype | None, *, architecture: str, name: str,
    tokenizer: Tokenizer, template: str,
) -> None:
    """Write the model of a checkpoint as a file, one tensor in memory at a time.

    Args:
        dtype: number format of matrices; None keeps the checkpoint's. Vectors and routers are always float32.
        architecture: as `check_gguf` returned it.
        template: chat template; "" for none.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    import gguf

    saved = find_saved(read_manifest(checkpoint), shape)
    kinds = {torch.float32: gguf.GGMLQuantizationType.F32, torch.bfloat16: gguf.GGMLQuantizationType.BF16,
             torch.float16: gguf.GGMLQuantizationType.F16, torch.float64: gguf.GGMLQuantizationType.F64}  # fmt: skip
    writer = gguf.GGUFWriter(path, architecture)
    try:
        _write_values(writer, shape, name)
        _write_tokenizer(writer, shape.vocab, tokenizer, template)
        formats: dict[str, torch.dtype] = {}
        if scale := shape.rope_scaling:
            if scale.kind == "linear":
                writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
                writer.add_rope_scaling_factor(scale.factor)
            elif scale.kind == "llama3":
                writer.add_tensor_info("rope_freqs.weight", (shape.head_dim // 2,), np.dtype("float32"),
                                       2 * shape.head_dim)  # fmt: skip
        for key, each in saved.items():
            vector = len(each.shape) == 1 or ".router." in key
            formats[key] = torch.float32 if vector else dtype or DTYPES[each.dtype]
            writer.add_tensor_info(_name(key), each.shape, np.dtype("float32"),
                                   Box.full(each.shape).numel * formats[key].itemsize, raw_dtype=kinds[formats[key]])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if scale and scale.kind == "llama3":
            writer.write_tensor_data(_divisors(shape).numpy())
        for key, each in saved.items():
            tensor = torch.empty(each.shape, dtype=formats[key])
            load(checkpoint, {f"model.{key}": [Piece.full(tensor)]}, convert=True, ignore_prefixes=("",))
            if architecture == "llama" and key.endswith(("attention.q.weight", "attention.k.weight")):
                tensor = _pair(tensor, shape.head_dim)
            writer.write_tensor_data(tensor.view(torch.uint8).numpy())
    finally:
        writer.close()


def _name(parameter: str) -> str:
    """Return the name of a tensor.

    >>> _name("layers.3.attention.q.weight"), _name("layers.0.mlp.experts.up"), _name("norm.weight")
    ('blk.3.attn_q.weight', 'blk.0.ffn_up_exps.weight', 'output_norm.weight')
    """
    module, part = (parameter, "weight") if ".experts." in parameter else parameter.rsplit(".", 1)
    prefix = ""
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
        prefix = f"blk.{layer}."
    return f"{prefix}{NAMES[module]}.{part}"


def _pair(rows: Tensor, head_dim: int) -> Tensor:
    """Order the rows of each head so that rotated pairs are neighbours, as llama.cpp's llama has them, not halves."""
    return rows.view(-1, 2, head_dim // 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _divisors(shape: ModelShape) -> Tensor:
    """Return by what each rotary frequency is divided, [head_dim / 2] float32."""
    unscaled = rotary_frequencies(shape.head_dim, shape.rope_theta)
    return unscaled / rotary_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling)


def _write_values(writer: GGUFWriter, shape: ModelShape, name: str) -> None:
    writer.add_name(name)
    writer.add_context_length(shape.max_sequence)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    mixtral = model_type(shape) == "mixtral"  # of which llama.cpp reads the width of experts here: no layer is dense
    writer.add_feed_forward_length(shape.experts.ffn if shape.experts and mixtral else shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_vocab_size(shape.vocab)
    if experts := shape.experts:
        writer.add_expert_count(experts.count)
        writer.add_expert_used_count(experts.per_token)
        writer.add_expert_feed_forward_length(experts.ffn)


def _write_tokenizer(writer: GGUFWriter, vocab: int, tokenizer: Tokenizer, template: str) -> None:
    if isinstance(tokenizer, BytesTokenizer):
        writer.add_tokenizer_model("none")  # llama.cpp takes ids alone
        return
    from gguf import TokenType

    values = _read(tokenizer)
    tokens, kinds = [f"[PAD{i}]" for i in range(vocab)], [TokenType.UNUSED] * vocab
    for token, number in values["model"]["vocab"].items():
        tokens[number], kinds[number] = token, TokenType.NORMAL
    for added in values.get("added_tokens", ()):
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_name_split(tokenizer))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in values["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.end_of_document)
    begin = tokenizer.encode("", begin=True)  # at most one token, before a text: `check_gguf`
    writer.add_add_bos_token(len(begin) > 0)
    if len(begin):
        writer.add_bos_token_id(int(begin[0]))
    if template:
        writer.add_chat_template(template)


def _read(tokenizer: FileTokenizer) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(read_text(tokenizer.path))
    return values


def _name_split(tokenizer: FileTokenizer) -> str:
    """Return what llama.cpp calls the rule by which a byte-level BPE tokenizer splits texts."""
    values = _read(tokenizer)
    splitter, name = values.get("pre_tokenizer") or {}, None
    steps = splitter.get("pretokenizers", [splitter])
    # llama.cpp leaves out Qwen2's normaliser, NFC, and knows no other.
    normaliser = (values.get("normalizer") or {"type": "NFC"}).get("type")
    if normaliser == "NFC" and values["model"].get("type") == "BPE" and values["model"].get("merges") and not any(
        step.get("add_prefix_space") for step in steps
    ):
        match steps:
            case [{"type": "ByteLevel", **options}] if options.get("use_regex", True):
                name = "gpt-2"
            case [{"type": "Split", "pattern": {"Regex": rule}}, {"type": "ByteLevel", "use_regex": False}]:
                name = SPLITS.get(rule)
    if name is None:
        raise UsageError(f"{tokenizer.path}: GGUF has no name for the way in which this tokenizer splits texts; "
                         "GPT-2's, Llama 3's and Qwen2's have one.\n  Write a folder: shoal export hf.")
    return name
