"""Weights of a checkpoint, and the moments of its optimizer, in Hugging Face's format or torch's own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from shoal.base.addresses import AnyPath
from shoal.base.boxes import Box, Piece
from shoal.base.files import write_atomically
from shoal.engine.checkpoint.hugging_face import INDEX, ONE_FILE, hf_tensor, stored_rows
from shoal.engine.checkpoint.load import load
from shoal.engine.checkpoint.manifest import DTYPES, Manifest, StoredTensor, read_manifest
from shoal.engine.optim.build import rate_factor, weight_decay
from shoal.engine.optim.from_torch import MOMENTS
from shoal.spec.catalog import ModelShape
from shoal.spec.config import OptimizerConfig
from shoal.spec.hugging_face import model_type

SHARD_BYTES = 5_000_000_000  # of one exported file, as transformers writes them


class HFExport:
    """The weights of a checkpoint in Hugging Face's format, read a few layers at a time.

    Attributes:
        dtype: number format of the weights, as torch names it.
        units: names of parameters that are read together: complete layers, since one tensor may join several.

    Args:
        dtype: number format of the weights; None keeps the checkpoint's.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """

    def __init__(self, checkpoint: AnyPath, shape: ModelShape, dtype: torch.dtype | None = None):
        self._checkpoint, self._shape = checkpoint, shape
        self._manifest = manifest = read_manifest(checkpoint)
        self.updates: int = manifest.extra.get("updates", manifest.step)
        self._saved = find_saved(manifest, shape)
        self._formats = {name: torch.float32 if name.endswith("router.bias") else dtype or DTYPES[each.dtype]
                         for name, each in self._saved.items()}  # fmt: skip
        weights = [each for name, each in self._formats.items() if not name.endswith("router.bias")]
        self.dtype = str(max(weights, key=lambda each: each.itemsize)).removeprefix("torch.")
        units: dict[str, list[str]] = {}
        for name in self._saved:
            units.setdefault(_unit(name), []).append(name)
        self.units = list(units.values())

    def size(self, names: Iterable[str]) -> int:
        """Return the bytes of parameters."""
        return sum(self._formats[name].itemsize * Box.full(self._saved[name].shape).numel *
                   (1 + len(_copies(name, self._shape))) for name in names)  # fmt: skip

    def read(self, names: Iterable[str], device: str = "cpu") -> dict[str, Tensor]:
        """Return the tensors of parameters by their names in Hugging Face's format; on "meta" nothing is read."""
        less = {name: hf_tensor(name, self._shape).less for name in names}
        tensors = {  # a difference from one keeps its digits if it is rounded last
            name: torch.empty(self._saved[name].shape, dtype=torch.float32 if less[name] else self._formats[name],
                              device=device)
            for name in names
        }  # fmt: skip
        self._fill("model", tensors)
        stored = {name: t.sub_(less[name]).to(self._formats[name]) if less[name] else t for name, t in tensors.items()}
        return _rename(stored, self._shape, copies=True)

    def read_moments(self, names: Iterable[str], kind: str, device: str = "cpu") -> dict[str, Tensor]:
        """Return a state of the optimizer as `read` returns parameters; a router's bias has none."""
        saved = {name: self._manifest.tensors[f"optimizer.{kind}.{name}"]
                 for name in names if not name.endswith("router.bias")}  # fmt: skip
        tensors = {n: torch.empty(each.shape, dtype=DTYPES[each.dtype], device=device) for n, each in saved.items()}
        self._fill(f"optimizer.{kind}", tensors)
        return _rename(tensors, self._shape)

    def _fill(self, prefix: str, tensors: Mapping[str, Tensor]) -> None:
        state = {f"{prefix}.{name}": [Piece.full(t)] for name, t in tensors.items() if not t.is_meta}
        if state:
            load(self._checkpoint, state, convert=True, ignore_prefixes=("",), read=lambda: self._manifest)

    def save_safetensors(self, folder: Path) -> None:
        """Write files of at most `SHARD_BYTES` into a folder, one in memory at a time."""
        shards: list[list[str]] = [[]]
        for unit in self.units:
            if shards[-1] and self.size(shards[-1] + unit) > SHARD_BYTES:
                shards.append([])
            shards[-1] += unit
        index: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            file = ONE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            tensors = self.read(names)
            save_file(tensors, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(tensors, file)
        if len(shards) > 1:
            total = {"metadata": {"total_size": self.size(self._saved)}, "weight_map": index}
            write_atomically(folder / INDEX, json.dumps(total, indent=2))

    def save_dcp(self, folder: Path, optimizer: OptimizerConfig | None = None, rate: float = 0.0) -> None:
        """Write a checkpoint of torch.distributed.checkpoint, one layer in memory at a time.

        Args:
            optimizer: also write the moments of this "adam" or "adamw", under the names of torch's
                `get_optimizer_state_dict`.
            rate: its learning rate.
        """
        from shoal.engine.checkpoint.dcp import save_dcp

        state: dict[str, Any] = {}
        unit_of: dict[str, tuple[str, ...]] = {}
        moments: dict[str, dict[str, Tensor]] = {}
        for unit in self.units:
            tensors = self.read(unit, "meta")
            state |= tensors
            unit_of |= dict.fromkeys(tensors, tuple(unit))
            for kind in MOMENTS if optimizer else ():
                for name, each in self.read_moments(unit, kind, "meta").items():
                    moments.setdefault(name, {"step": torch.tensor(float(self.updates))})[kind] = each
        if optimizer:
            state["optim"] = {"state": moments, "param_groups": self._groups(optimizer, rate)}
        read = lru_cache(maxsize=1)(self.read)
        read_moments = lru_cache(maxsize=len(MOMENTS))(self.read_moments)  # torch asks for them in turn, by tensor

        def find(name: str) -> Tensor:
            if name in unit_of:
                return read(unit_of[name])[name]
            name, _, kind = name.removeprefix("optim.state.").rpartition(".")
            return read_moments(unit_of[name], kind)[name]

        save_dcp(folder, state, find)

    def _groups(self, optimizer: OptimizerConfig, rate: float) -> list[dict[str, Any]]:
        """Return the groups of parameters with equal settings, as torch.optim has them: first those with decay."""
        names: dict[tuple[float, float], dict[str, None]] = {}
        for name in (name for unit in self.units for name in unit if not name.endswith("router.bias")):
            settings = weight_decay(optimizer, name, self._saved[name].shape), rate_factor(optimizer, name)
            experts = self._saved[name].shape[0] if ".experts." in name else 1
            stored = (hf_tensor(name, self._shape, expert).name for expert in range(experts))
            names.setdefault(settings, {}).update(dict.fromkeys(stored))
        make = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer.name]
        rule = make(
            [{"params": [torch.empty(0)], "weight_decay": decay, "lr": rate * factor} for decay, factor in names],
            betas=optimizer.betas, eps=optimizer.eps,
        )
        return [group | {"params": [*each]} for group, each in zip(rule.param_groups, names.values(), strict=True)]


def find_saved(manifest: Manifest, shape: ModelShape) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint that belong to a model in other formats.

    Modules of multi-token prediction do if its family has them: others compute the same without.
    """
    left = () if model_type(shape) == "deepseek_v3" else range(shape.layers, shape.blocks)
    without = tuple(f"model.layers.{i}." for i in left) + ("model.head.weight",) * shape.tied
    return {name.removeprefix("model."): each for name, each in manifest.tensors.items()
            if name.startswith("model.") and not name.startswith(without)}  # fmt: skip


def _copies(name: str, shape: ModelShape) -> list[str]:
    """Return the names of the copies that DeepSeek's modules of multi-token prediction have of a shared matrix."""
    head = ["shared_head.head"]
    own = {"embed.token.weight": ["embed_tokens", *head * shape.tied], "head.weight": head}
    modules = range(shape.layers, shape.blocks) if model_type(shape) == "deepseek_v3" else ()
    return [f"model.layers.{i}.{each}.weight" for i in modules for each in own.get(name, ())]


def _unit(name: str) -> str:
    return ".".join(name.split(".")[:2]) if name.startswith("layers.") else name


def _rename(tensors: Mapping[str, Tensor], shape: ModelShape, *, copies: bool = False) -> dict[str, Tensor]:
    parts: dict[str, dict[int | None, list[Tensor]]] = {}
    steps: dict[str, int] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: hf_tensor(item[0], shape).start):
        for expert, each in enumerate(tensor) if ".experts." in name else ((0, tensor),):
            at = hf_tensor(name, shape, expert)
            if (order := stored_rows(name, shape)) is not None:
                each = torch.empty_like(each).index_copy_(0, order.to(each.device), each)
            for stored in (at.name, *(_copies(name, shape) if copies else ())):
                parts.setdefault(stored, {}).setdefault(at.expert, []).append(each.t() if at.transposed else each)
                steps[stored] = at.step
    joined = {name: {expert: _join(each, steps[name]) for expert, each in of.items()} for name, of in parts.items()}
    return {name: of[None] if None in of else torch.stack([*of.values()]) for name, of in joined.items()}


def _join(each: list[Tensor], step: int) -> Tensor:
    """Join parameters along their outputs, in turn if ``step`` is more than 1."""
    if step > 1:
        return torch.stack(each, dim=-1).flatten(-2)
    return torch.cat(each, dim=-1).contiguous() if len(each) > 1 else each[0].clone(
        memory_format=torch.contiguous_format)
