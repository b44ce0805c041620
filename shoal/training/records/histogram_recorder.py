"""Recording of histograms (`shoal.training.records.histograms`) in a step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.base.files import make_folder, write_atomically
from shoal.base.journal import best_effort
from shoal.engine.collectives.ops import all_reduce
from shoal.engine.parallel.apply import LocalStage
from shoal.engine.precision.histogram import BINS, count
from shoal.training.records.histograms import FOLDER, KINDS
from shoal.training.step.engine import Engine
from shoal.training.step.optimizer_step import NonFinite


@dataclass(frozen=True)
class _Layer:
    """Linear layer, and the tensor-parallel ranks with equal values (an axis name; "tp/1" for this rank only).

    Attributes:
        input: ranks with equal inputs, unless each has its own tokens.
        output: ranks with equal outputs, likewise.
        units: number of local outputs that are no padding; None if all are.
        terms: whether ranks with equal outputs each have a partial sum of their gradient.
    """

    name: str
    input: str
    output: str
    units: int | None = None
    terms: bool = False


class Histograms:
    """Recorder of histograms in some steps of an engine.

    Args:
        every: period in steps, starting at the first step.
    """

    def __init__(self, engine: Engine, every: int, folder: Path):
        self.engine, self.every, self.folder = engine, every, folder / FOLDER
        model = engine.describe_module()
        names = dict(model.named_parameters())
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        rows = [*((kind, name) for kind in KINDS[:2] for name in names),
                *((kind, name) for kind in KINDS[2:] for name in linear)]
        self.place = {row: i for i, row in enumerate(rows)}
        head = "embed.token.weight" if engine.shape.tied else "head.weight"
        slots = (slot for bucket in engine.parameters.buckets for slot in bucket.slots)
        self.vocabulary = next((slot.placement.box.shape[0] for slot in slots if slot.placement.name == head), None)
        # If there are more tensor-parallel ranks than key/value heads, several ranks compute the same head.
        self.shared = f"tp/{max(1, engine.mesh.size('tp') // engine.shape.kv_heads)}"
        self.sharers = engine.mesh.group(self.shared)
        self._counts = torch.zeros(0)  # [rows, BINS], of the step being recorded
        self._forward = False

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Record the enclosed step (0 is the first) if due. Collective."""
        if step % self.every:
            yield
            return
        engine = self.engine
        self._counts = torch.zeros(len(self.place), BINS, dtype=torch.int64, device=engine.mesh.device)
        self.scale = engine.loss_scale.value if engine.loss_scale else 1.0
        with ExitStack() as undo:
            for stage in engine.stages:
                self._attach(stage, undo)
            engine.observe = self._parameters
            undo.callback(setattr, engine, "observe", None)
            try:
                yield
            except NonFinite:  # raised on all ranks; this step is the most interesting
                self._write(step + 1)
                raise
        self._write(step + 1)

    def _add(self, kind: str, name: str, x: Tensor, scale: float = 1.0) -> None:
        wide = x.detach().float() / scale  # in the tensor's own dtype, dividing by the scale could lose values
        self._counts[self.place[kind, name]] += count(wide).to(self._counts.device)

    def _parameters(self) -> None:
        parameters = self.engine.parameters
        for kind, tensors, scale in (("weights", parameters.weights(), 1.0),
                                  ("gradients", parameters.reduced_gradients(), self.scale)):
            for name, pieces in tensors.items():
                for piece in pieces:
                    if piece.primary:
                        self._add(kind, name, piece.tensor, scale)

    def _attach(self, stage: LocalStage, undo: ExitStack) -> None:
        def enter(*_: object) -> None:
            self._forward = True

        def leave(*_: object) -> None:
            self._forward = False

        undo.callback(stage.module.register_forward_pre_hook(enter).remove)
        undo.callback(stage.module.register_forward_hook(leave).remove)
        for name, module in stage.module.named_modules():
            if isinstance(module, nn.Linear):
                hook = partial(self._after_forward, self._layer(name))
                undo.callback(module.register_forward_hook(hook).remove)

    def _layer(self, name: str) -> _Layer:
        if name == "head":
            return _Layer(name, "tp_y", "tp/1", self.vocabulary)  # 0 on a rank whose rows are all padding
        if name.endswith((".out", ".down")):
            return _Layer(name, "tp/1", "tp_y")
        if name.endswith("_down"):  # of the latents: computed by every rank from its tokens
            ranks = "tp/1" if self.engine.mesh.layout.sequence_parallel else "tp_y"
            return _Layer(name, ranks, ranks)
        heads = name.endswith((".attention.k", ".attention.v"))
        return _Layer(name, "tp_y", self.shared if heads else "tp/1", terms=heads and self.sharers is not None)

    def _after_forward(self, layer: _Layer, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        x = args[0]
        if not self._forward or self.engine.estimating:  # recomputation in the backward pass, or Sophia's estimate
            return
        entering, leaving = (tensor.shape[:-1].numel() for tensor in (x, output))
        # With sequence parallelism, ranks have separate tokens before and after a region, and equal ones within it.
        if entering < leaving or self.engine.mesh.index(layer.input) == 0:
            self._add("activations", layer.name, x)
        counted = leaving < entering or self.engine.mesh.index(layer.output) == 0
        if output.requires_grad and (counted or layer.terms):
            output.register_hook(partial(self._after_backward, layer, counted))

    def _after_backward(self, layer: _Layer, counted: bool, gradient: Tensor) -> None:
        gradient = gradient[..., : layer.units]
        if layer.terms:
            gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True).contiguous()
            all_reduce(gradient, self.sharers)
        if counted:
            self._add("output gradients", layer.name, gradient, self.scale)

    def _write(self, step: int) -> None:
        all_reduce(self._counts, self.engine.mesh.group("world"))
        if self.engine.mesh.rank:
            return
        tensors = []
        for (kind, name), row in zip(self.place, self._counts.tolist(), strict=True):
            if seen := [i for i, n in enumerate(row) if n]:
                counts = row[seen[0] : seen[-1] + 1]
                tensors.append({"kind": kind, "name": name, "first": seen[0], "counts": counts})
        text = json.dumps({"step": step, "loss_scale": self.scale, "tensors": tensors}, separators=(",", ":"))
        with best_effort(self.folder):
            make_folder(self.folder)
            write_atomically(self.folder / f"step-{step:08d}.json", text)
