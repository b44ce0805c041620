"""Weights in Hugging Face's format: safetensors files, of which each rank reads only its own boxes.

The names are transformers' of the families in `shoal.spec.hugging_face`. Safetensors are read, or a checkpoint of torch
(`shoal.engine.checkpoint.dcp`); no code of a model folder is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.base.boxes import Box, Piece
from shoal.base.errors import UsageError
from shoal.base.files import open_to_read, read_json
from shoal.base.terminal import quote
from shoal.engine.checkpoint.mxfp4 import Mxfp4Slice
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RUN_FILE, build_config
from shoal.spec.hugging_face import FAMILIES, model_fields, model_type

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
DCP_LIST = ".metadata"
READ = ("F64", "F32", "BF16", "F16")  # number formats of weights; the others need scales

_LLAMA = {
    "embed.token": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    **{f"attention.{part}": f"self_attn.{part}_proj" for part in "qkv"}, "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
    **{f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_MIXTRAL = {
    "mlp.router": "block_sparse_moe.gate", "mlp.experts.gate": "block_sparse_moe.experts.{}.w1",
    "mlp.experts.up": "block_sparse_moe.experts.{}.w3", "mlp.experts.down": "block_sparse_moe.experts.{}.w2",
}
_QWEN3_MOE = {
    "mlp.router": "mlp.gate",
    **{f"mlp.experts.{part}": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
}
_DEEPSEEK = {
    **_QWEN3_MOE, "mlp.router.bias": "mlp.gate.e_score_correction_bias",
    **{f"mlp.shared.{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
    "attention.q_down": "self_attn.q_a_proj", "attention.q_latent_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj", "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_latent_norm": "self_attn.kv_a_layernorm", "attention.kv_up": "self_attn.kv_b_proj",
    "embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj", "last_norm": "shared_head.norm",
}
_GPT_OSS = {
    "attention.sinks.weight": "self_attn.sinks", "mlp.router": "mlp.router", "mlp.router.logit_bias": "mlp.router.bias",
    "mlp.down_bias": "mlp.experts.down_proj_bias", "mlp.experts.down": "mlp.experts.down_proj",
    "mlp.experts.gate": "mlp.experts.gate_up_proj", "mlp.experts.up": "mlp.experts.gate_up_proj",
    "mlp.experts.gate_bias": "mlp.experts.gate_up_proj_bias", "mlp.experts.up_bias": "mlp.experts.gate_up_proj_bias",
}
_LLAMA4 = {
    **{f"mlp.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    **{f"mlp.shared.{part}": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "mlp.router": "feed_forward.router", "mlp.experts.down": "feed_forward.experts.down_proj",
    "mlp.experts.gate": "feed_forward.experts.gate_up_proj", "mlp.experts.up": "feed_forward.experts.gate_up_proj",
}
_OLMO2 = {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
_GEMMA = _OLMO2 | {"mlp_norm": "pre_feedforward_layernorm"}
_GPT2 = {
    "embed.token": "transformer.wte", "embed.position": "transformer.wpe", "norm": "transformer.ln_f",
    "head": "lm_head", "attention_norm": "ln_1", "mlp_norm": "ln_2",
    **{f"attention.{part}": "attn.c_attn" for part in "qkv"}, "attention.out": "attn.c_proj",
    "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
}  # fmt: skip

NAMES = {
    "gpt2": _GPT2, "mixtral": _LLAMA | _MIXTRAL, "qwen3_moe": _LLAMA | _QWEN3_MOE, "olmo2": _LLAMA | _OLMO2,
    "gpt_oss": _LLAMA | _GPT_OSS, "deepseek_v2": _LLAMA | _DEEPSEEK, "deepseek_v3": _LLAMA | _DEEPSEEK,
    "llama4_text": _LLAMA | _LLAMA4, "gemma2": _LLAMA | _GEMMA, "gemma3_text": _LLAMA | _GEMMA,
}  # fmt: skip
"""Names of modules by family; other families have llama's."""


class HFTensor(NamedTuple):
    """Where a parameter, or one expert of it, is in Hugging Face's format.

    Attributes:
        transposed: whether a matrix is stored [in, out] (GPT-2).
        parts: number of parameters of this size that the tensor joins.
        start: first of its outputs in a tensor that joins several parameters (GPT-2's q, k, v).
        less: what the stored value is less than the parameter (1 in norms of Gemma).
        step: distance of its outputs in a tensor that joins several (2 in gpt-oss, whose gate and up alternate).
        expert: index in a tensor that has all experts of a layer; None if each has its own.
    """

    name: str
    transposed: bool = False
    parts: int = 1
    start: int = 0
    less: float = 0.0
    step: int = 1
    expert: int | None = None


def hf_tensor(name: str, shape: ModelShape, expert: int = 0) -> HFTensor:
    """Return where a parameter of a model is.

    >>> from shoal.spec.catalog import model_shape
    >>> hf_tensor("layers.3.attention.q.weight", model_shape("tiny"))
    HFTensor(name='model.layers.3.self_attn.q_proj.weight', transposed=False, parts=1, start=0, less=0.0, \
step=1, expert=None)
    """
    kind = model_type(shape)
    gpt, names = kind == "gpt2", NAMES.get(kind, _LLAMA)
    module, _, part = name.rpartition(".")
    if ".experts." in name:  # the parameter itself has the name of a layer of one expert
        module, part = name, "weight"
    prefix = ""
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
        prefix = f"{'transformer.h' if gpt else 'model.layers'}.{layer}."
    joined = gpt and module in ("attention.q", "attention.k", "attention.v")
    start = "qkv".index(module[-1]) * shape.hidden if joined else 0
    matrix = part == "weight" and module.startswith(("attention.", "mlp."))
    stored = names.get(f"{module}.{part}") or names[module].format(expert)
    if kind in ("gpt_oss", "llama4_text") and ".experts." in name:
        alternate, parts = kind == "gpt_oss", 1 + module.endswith(("gate", "up", "gate_bias", "up_bias"))
        start = ("up" in module) * (1 if alternate else shape.moe.ffn)
        return HFTensor(
            f"{prefix}{stored}", not module.endswith("bias"), parts, start, step=parts if alternate else 1,
            expert=expert,
        )
    stored = stored if f"{module}.{part}" in names else f"{stored}.{part}"
    less = float(FAMILIES[kind].gemma and "norm" in module)
    return HFTensor(f"{prefix}{stored}", gpt and matrix, 3 if joined else 1, start, less)


def stored_rows(name: str, shape: ModelShape) -> Tensor | None:
    """Return where each row of a parameter is stored, [rows]; None if in place.

    DeepSeek's and Llama 4's rotate the pairs (2 i, 2 i + 1) of a query, shoal (i, i + r/2).
    """
    latent, kind, r = shape.latent, name.removesuffix(".weight").rpartition(".")[2], shape.rotary_dim
    if latent is not None and name.endswith((".attention.q.weight", ".q_up.weight", ".kv_down.weight")):
        before, blocks = (latent.key_value_rank, 1) if kind == "kv_down" else (shape.head_dim, shape.heads)
    elif not shape.global_rope and name.endswith((".attention.q.weight", ".attention.k.weight")):
        before, blocks = 0, shape.heads if kind == "q" else shape.kv_heads
    else:
        return None
    inside = torch.cat((torch.arange(before), before + torch.arange(r).view(-1, 2).t().flatten()))
    return (torch.arange(blocks).unsqueeze(1) * (before + r) + inside).flatten()


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Return ``config.json`` of a model folder as fields of the config section `model`.

    Raises:
        UsageError: no such file, a wrong value in it, or a model that shoal does not compute.
    """
    path = folder / "config.json"
    if not path.is_file() and (folder / RUN_FILE).is_file():
        raise UsageError(f"{folder} is the folder of a run, not of a model in Hugging Face's format."
                         f"\n  Write one, and name that: shoal export hf {quote(folder)} --out MODEL")
    fields = model_fields(_read_object(path), str(path))
    first = f"model.layers.{fields['layers']}.eh_proj.weight"
    if fields.get("mtp_depth") and not (folder / DCP_LIST).is_file() and first not in _files_of_tensors(folder):
        del fields["mtp_depth"]  # transformers leaves the modules out, and their number in the config
    try:
        build_config({"model": {"name": folder.name or "model", **fields}})
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    return fields


def _read_object(path: Path) -> dict[str, Any]:
    values = read_json(path)
    if not isinstance(values, dict):
        raise UsageError(f"{path}: it must hold a JSON object.")
    return values


class HFWeights:
    """The weights of a model folder: safetensors files, or a checkpoint of torch.distributed.checkpoint, which may also
    have the moments of AdamW.

    Attributes:
        optimizer: settings of the optimizer whose moments are stored, as torch names them; empty without moments.

    Raises:
        UsageError: neither, a missing tensor, or one of another shape than the model's.
    """

    def __init__(self, folder: Path, shape: ModelShape):
        self.folder, self.shape = folder, shape
        self._dcp: Mapping[str, Any] = {}
        self._states: Mapping[str, Any] = {}
        self.optimizer: dict[str, Any] = {}
        if (folder / DCP_LIST).is_file():
            from shoal.engine.checkpoint.dcp import open_dcp  # loading it takes a second

            self._dcp, self._states, self.optimizer = open_dcp(folder / DCP_LIST)
        self._files = {} if self._dcp else _files_of_tensors(folder)
        self._opened = cache(lambda file: _open_tensors(folder / file))

    def check(self, parameters: Mapping[str, tuple[int, ...]], moment: str = "") -> None:
        """Check that every parameter is stored with its shape and as plain numbers, by the headers of the files.

        Args:
            moment: "exp_avg" or "exp_avg_sq", to check these states of AdamW instead.
        """
        for name, size in parameters.items():
            for expert in range(size[0] if ".experts." in name else 1):
                at = hf_tensor(name, self.shape, expert)
                stored = self._slice(at.name, moment)
                if (kind := stored.get_dtype()) not in READ:
                    raise UsageError(f"{self.folder}: tensor '{at.name}' is stored as {kind}; "
                                     f"{', '.join(READ)} are read.")
                found = tuple(stored.get_shape())
                of_one = size[1:] if ".experts." in name else size
                *others, last = of_one[::-1] if at.transposed else of_one
                last *= at.parts
                wanted = (*others, last) if at.expert is None else (size[0], *others, last)
                if found != wanted:
                    raise UsageError(f"{self.folder}: tensor '{at.name}' has the shape {found}, this model {wanted}.")

    def updates(self, parameters: Iterable[str]) -> int:
        """Return the number of updates after which AdamW's moments were stored.

        Raises:
            UsageError: parameters have had different numbers of updates.
        """
        counts = {name: int(self._slice(hf_tensor(name, self.shape).name, "step")[()]) for name in parameters}
        if len(different := {*counts.values()}) > 1:
            raise UsageError(f"{self.folder}: its parameters have had different numbers of updates, {min(different)} "
                             f"to {max(different)}.\n  Leave optimizer.from_weights out: AdamW then starts without "
                             "moments.")
        return counts.popitem()[1]

    def fill(self, name: str, piece: Piece, moment: str = "") -> None:
        """Read one piece of a parameter, or of its moment, into its tensor."""
        box = piece.box
        if (order := stored_rows(name, self.shape)) is not None:
            rows = order[box.offset[0] : box.offset[0] + box.shape[0]]
            if len(rows):
                first, last = int(rows.min()), int(rows.max())
                wide = Box((first, *box.offset[1:]), (last + 1 - first, *box.shape[1:]))
                piece.tensor.copy_(self._read(hf_tensor(name, self.shape), wide, moment)[rows - first])
            return
        if ".experts." not in name:
            at = hf_tensor(name, self.shape)
            piece.tensor.copy_(self._read(at, box, moment))
            if at.less and not moment:
                piece.tensor.add_(at.less)
            return
        of_one = Box(box.offset[1:], box.shape[1:])
        for i in range(box.shape[0]):
            piece.tensor[i].copy_(self._read(hf_tensor(name, self.shape, box.offset[0] + i), of_one, moment))

    def _read(self, at: HFTensor, box: Box, moment: str) -> Tensor:
        begin, others = at.start + at.step * box.offset[0], zip(box.offset[1:], box.shape[1:], strict=True)
        first = slice(begin, begin + max(0, at.step * (box.shape[0] - 1) + 1))
        slices = [first, *(slice(o, o + n) for o, n in others)]
        slices = slices[::-1] if at.transposed else slices
        if at.expert is None:
            stored = self._slice(at.name, moment)[tuple(slices)]
        else:
            stored = self._slice(at.name, moment)[(slice(at.expert, at.expert + 1), *slices)][0]
        return (stored.t() if at.transposed else stored)[:: at.step]

    def _slice(self, name: str, moment: str = "") -> Any:
        # The first GPT-2 files lack the prefix, and Llama 4 with images has one more.
        for known in (name, name.removeprefix("transformer."), f"language_model.{name}"):
            if moment:
                if (state := f"{known}.{moment}") in self._states:
                    return self._states[state]
                continue
            if known in self._dcp:
                return self._dcp[known]
            if f"{known}_blocks" in self._files:
                return Mxfp4Slice(self._slice(f"{known}_blocks"), self._slice(f"{known}_scales"))
            if known in self._files:
                try:
                    return self._opened(self._files[known]).get_slice(known)
                except (SafetensorError, OSError) as error:
                    raise UsageError(f"{self.folder / self._files[known]}: it cannot be read: {error}") from None
        raise UsageError(f"{self.folder}: no file has the tensor '{name}'.")


def _open_tensors(path: Path) -> Any:
    """Open a file of safetensors.

    Raises:
        OSError: no regular file; `safe_open` would wait for the other end of a pipe.
        SafetensorError: its content is damaged.
    """
    open_to_read(path).close()
    return safe_open(path, "pt")


def _files_of_tensors(folder: Path) -> dict[str, str]:
    if (folder / INDEX).exists():
        index = _read_object(folder / INDEX).get("weight_map")
        if isinstance(index, dict) and all(isinstance(f, str) and Path(f).name == f for f in index.values()):
            return index
        raise UsageError(f"{folder / INDEX}: weight_map must map tensors to files of this folder.")
    path = folder / ONE_FILE
    try:
        with _open_tensors(path) as file:
            return dict.fromkeys(file.keys(), ONE_FILE)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path}: it cannot be read: {error}\n  Name a folder with config.json and the weights as "
                         "safetensors or as a checkpoint of torch (DCP); other formats are not read.") from None
