"""Histograms of the weights, gradients and activations of a step, for each tensor over all ranks; a small file a step.

    weights            each parameter, before the update
    gradients          of each parameter, before clipping and without the loss scale
    activations        the input of each linear layer
    output gradients   of each linear layer, without the loss scale

Experts and routers are no linear layers: they have weights and gradients alone. A step that ends the run with a NaN is
written too.

What tensor-parallel ranks have in common is counted on one of them, and terms are summed before: so the counts are
those of one device.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.base.errors import UsageError
from shoal.base.files import read_json, write_whole
from shoal.engine.collectives.ops import all_reduce
from shoal.engine.models.transformer import Transformer
from shoal.engine.parallel.apply import LocalStage
from shoal.engine.precision.histogram import BINS, count
from shoal.training.step.engine import Engine
from shoal.training.step.optimizer_step import NonFinite

FOLDER = "histograms"
KINDS = ("weights", "gradients", "activations", "output gradients")


@dataclass(frozen=True)
class Histogram:
    """Of one tensor in one step.

    Attributes:
        kind: one of `KINDS`.
        name: of the parameter or the linear layer.
        counts: [BINS].
    """

    kind: str
    name: str
    counts: tuple[int, ...]


@dataclass(frozen=True)
class _Layer:
    """A linear layer, and which tensor-parallel ranks have the same values (names of axes, "tp/1" for this rank alone).

    Attributes:
        name: in the full model.
        input: ranks with the same input, unless each has its own tokens.
        output: ranks with the same output, likewise.
        units: of its outputs here, without padding.
        terms: whether ranks with the same output have a term of its gradient each.
    """

    name: str
    input: str
    output: str
    units: int
    terms: bool = False


class Histograms:
    """Records some steps of an engine.

    Args:
        every: steps between two that are recorded; the first is.
        folder: of the run.
    """

    def __init__(self, engine: Engine, every: int, folder: Path):
        self.engine, self.every, self.folder = engine, every, folder / FOLDER
        with torch.device("meta"):
            model = Transformer(engine.shape)
        names = dict(model.named_parameters())
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        rows = [*((kind, name) for kind in KINDS[:2] for name in names),
                *((kind, name) for kind in KINDS[2:] for name in linear)]
        self.place = {row: i for i, row in enumerate(rows)}
        self.vocabulary = next(
            (slot.split.box.shape[0] for bucket in engine.parameters.buckets for slot in bucket.slots
             if slot.split.name == self._weight("head")), 0,
        )
        # Keys and values of one head are made on several ranks where there are more than heads.
        self.shared = f"tp/{max(1, engine.mesh.size('tp') // engine.shape.kv_heads)}"
        self.sharers = engine.mesh.group(self.shared)
        self._counts: Tensor | None = None
        self._forward = False

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Record the step inside (0 is the first), if that is due; collective."""
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
            except NonFinite:  # raised on all ranks: the most interesting step
                self._end(step)
                raise
        self._end(step)

    @property
    def counts(self) -> Tensor:
        """[rows, BINS] of the step that is being recorded."""
        assert self._counts is not None, "no step is being recorded"
        return self._counts

    def _end(self, step: int) -> None:
        all_reduce(self.counts, self.engine.mesh.group("world"))
        if self.engine.mesh.rank == 0:
            self._write(step + 1, self.counts.tolist())
        self._counts = None

    def _add(self, kind: str, name: str, x: Tensor, scale: float = 1.0) -> None:
        wide = x.detach().float() / scale  # in the tensor's own format, the scale could not be taken out
        self.counts[self.place[kind, name]] += count(wide).to(self.counts.device)

    def _parameters(self) -> None:
        parameters = self.engine.parameters
        for kind, held, scale in (("weights", parameters.weights(), 1.0),
                                  ("gradients", parameters.reduced_gradients(), self.scale)):
            for name, pieces in held.items():
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
                undo.callback(module.register_forward_hook(partial(self._called, self._layer(name, module))).remove)

    def _layer(self, name: str, module: nn.Linear) -> _Layer:
        if name == "head":
            return _Layer(name, "tp_y", "tp/1", self.vocabulary)
        if name.endswith((".out", ".down")):
            return _Layer(name, "tp/1", "tp_y", module.out_features)
        heads = name.endswith((".attention.k", ".attention.v"))
        shared = self.shared if heads else "tp/1"
        return _Layer(name, "tp_y", shared, module.out_features, terms=heads and self.sharers is not None)

    def _weight(self, name: str) -> str:
        """A tied head has the embedding's."""
        return "embed.token.weight" if name == "head" and self.engine.shape.tied else f"{name}.weight"

    def _called(self, layer: _Layer, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        x = args[0]
        if not self._forward or self.engine.estimating:  # it is computed again in backward, or for Sophia
            return
        entering, leaving = (tensor.shape[:-1].numel() for tensor in (x, output))
        # With sequence parallelism a rank's tokens are its own before a region, whose products gather them, and after.
        if entering < leaving or self.engine.mesh.index(layer.input) == 0:
            self._add("activations", layer.name, x)
        counted = leaving < entering or self.engine.mesh.index(layer.output) == 0
        if output.requires_grad and (counted or layer.terms):
            output.register_hook(partial(self._returned, layer, counted))

    def _returned(self, layer: _Layer, counted: bool, gradient: Tensor) -> None:
        gradient = gradient[..., : layer.units]
        if layer.terms:
            gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True).contiguous()
            all_reduce(gradient, self.sharers)
        if counted:
            self._add("output gradients", layer.name, gradient, self.scale)

    def _write(self, step: int, counts: list[list[int]]) -> None:
        tensors = []
        for (kind, name), row in zip(self.place, counts, strict=True):
            seen = [i for i, n in enumerate(row) if n]
            if seen:
                first = seen[0]
                tensors.append({"kind": kind, "name": name, "first": first, "counts": row[first : seen[-1] + 1]})
        self.folder.mkdir(exist_ok=True)
        text = json.dumps({"step": step, "loss_scale": self.scale, "tensors": tensors}, separators=(",", ":"))
        write_whole(self.folder / f"step-{step:08d}.json", text)


def read_histograms(folder: Path) -> tuple[int, list[Histogram]] | None:
    """The newest recorded step of a run, and what it has; None where nothing was recorded.

    Raises:
        UsageError: its file is damaged.
    """
    files = sorted((folder / FOLDER).glob("step-*.json"))
    if not files:
        return None
    found = read_json(files[-1])
    try:
        tensors = []
        for tensor in found["tensors"]:
            before, counts = [0] * tensor["first"], [int(count) for count in tensor["counts"]]
            after = [0] * (BINS - len(before) - len(counts))
            tensors.append(Histogram(str(tensor["kind"]), str(tensor["name"]), (*before, *counts, *after)))
        return int(found["step"]), tensors
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{files[-1]} is no record of histograms: {type(error).__name__}: {error}"
            "\n  Remove it: the report needs none."
        ) from None
