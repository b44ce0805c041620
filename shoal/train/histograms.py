"""Histograms of a step's weights, gradients and activations, tensor by tensor, over all ranks; one small file a step.

    weights            each parameter, before the update
    gradients          of each parameter, before clipping and without the loss scale
    activations        the input of each linear layer
    output gradients   of each linear layer, without the loss scale

Of what tensor-parallel ranks hold alike, one counts it, so that the counts are those of one device.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.comm.ops import all_reduce
from shoal.config import RunConfig
from shoal.errors import UsageError
from shoal.models.transformer import Transformer
from shoal.parallel.apply import Stage
from shoal.precision.histogram import BINS, count
from shoal.precision.rules import SEVERAL_UPDATES
from shoal.train.engine import Engine

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
        self.splits = {
            slot.split.name: slot.split for bucket in engine.parameters.buckets for slot in bucket.slots
        }
        self.counts: Tensor | None = None
        self._forward = False

    def due(self, step: int) -> bool:
        """Whether a step (0 is the first) is to be recorded."""
        return step % self.every == 0

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Record the step that is run inside; collective."""
        engine = self.engine
        self.counts = torch.zeros(len(self.place), BINS, dtype=torch.int64, device=engine.mesh.device)
        self.scale = engine.loss_scale.value if engine.loss_scale else 1.0
        hooks = [hook for stage in engine.stages for hook in self._attach(stage)]
        engine.observe = self._parameters
        try:
            yield
        finally:
            engine.observe = None
            for hook in hooks:
                hook.remove()
        all_reduce(self.counts, engine.mesh.group("world"))
        if engine.mesh.rank == 0:
            self._write(step + 1, self.counts.tolist())
        self.counts = None

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

    def _attach(self, stage: Stage) -> Iterator[RemovableHandle]:
        def enter(*_: object) -> None:
            self._forward = True

        def leave(*_: object) -> None:
            self._forward = False

        yield stage.module.register_forward_pre_hook(enter)
        yield stage.module.register_forward_hook(leave)
        mesh = self.engine.mesh
        for name, module in stage.module.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            split = self.splits[self._weight(name)]
            rows, columns = (part != all_of for part, all_of in zip(split.box.shape, split.whole, strict=True))
            first = mesh.index("tp") == 0
            summed = columns and mesh.layout.sequence_parallel  # its output is scattered along the sequence
            if columns and mesh.layout.tp_x > 1:
                rows = mesh.index("tp_y") == 0  # the others along y have the same output
            if columns or first:
                yield module.register_forward_pre_hook(partial(self._input, name))
            if rows or summed or first:
                yield module.register_forward_hook(partial(self._output, name))

    def _weight(self, name: str) -> str:
        """A tied head has the embedding's."""
        return "embed.token.weight" if name == "head" and self.engine.shape.tied else f"{name}.weight"

    def _input(self, name: str, module: nn.Module, args: tuple[Tensor]) -> None:
        if self._forward:  # else it is computed again, in backward
            self._add("activations", name, args[0])

    def _output(self, name: str, module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        if self._forward and output.requires_grad:
            output.register_hook(lambda gradient: self._add("output gradients", name, gradient, self.scale))

    def _write(self, step: int, counts: list[list[int]]) -> None:
        tensors = []
        for (kind, name), row in zip(self.place, counts, strict=True):
            seen = [i for i, n in enumerate(row) if n]
            if seen:
                first = seen[0]
                tensors.append({"kind": kind, "name": name, "first": first, "counts": row[first : seen[-1] + 1]})
        self.folder.mkdir(exist_ok=True)
        text = json.dumps({"step": step, "loss_scale": self.scale, "tensors": tensors}, separators=(",", ":"))
        partial_file = self.folder / ".partial"
        partial_file.write_text(text)
        partial_file.replace(self.folder / f"step-{step:08d}.json")


def read_histograms(folder: Path) -> tuple[int, list[Histogram]] | None:
    """The newest recorded step of a run, and what it has; None where nothing was recorded."""
    files = sorted((folder / FOLDER).glob("step-*.json"))
    if not files:
        return None
    found = json.loads(files[-1].read_text())
    tensors = []
    for tensor in found["tensors"]:
        before, counts = [0] * tensor["first"], tensor["counts"]
        after = [0] * (BINS - len(before) - len(counts))
        tensors.append(Histogram(tensor["kind"], tensor["name"], (*before, *counts, *after)))
    return found["step"], tensors


def check_histograms(config: RunConfig) -> None:
    """Refuse to record what cannot be seen.

    Raises:
        UsageError: naming the two fields.
    """
    if not config.metrics.histograms:
        return
    for field, bad, why in (
        ("train.compile = true", config.train.compile, "the compiler leaves no tensors between layers to count"),
        (f"parallel.sync = '{config.parallel.sync}'", config.parallel.sync != "all-reduce",
         "each replica has gradients of its own"),
        (f"parallel.schedule = '{config.parallel.schedule}'", config.parallel.schedule in SEVERAL_UPDATES,
         "a step has several gradients"),
    ):
        if bad:
            raise UsageError(f"metrics.histograms = {config.metrics.histograms} with {field}: {why}."
                             "\n  Leave one of them out.")
