"""Runtime of a pipeline of one's own modules, whose messages hold tensors of the module's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from shoal.engine.collectives.mesh import Mesh
from shoal.engine.own.chain import Crossing
from shoal.engine.own.links import StageLinks
from shoal.engine.own.stage import OwnStage
from shoal.engine.runtime import Place, Runtime
from shoal.pipeline.program import Action, Op, Program

_ALIGN = 16  # bytes


@dataclass(frozen=True)
class Packing:
    """Shapes and dtypes of tensors that are sent as one: as it is if there is one, else as bytes."""

    formats: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @property
    def format(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of what is sent."""
        return self.formats[0] if len(self.formats) == 1 else ((self._ends[-1],), torch.uint8)

    @property
    def _ends(self) -> list[int]:
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in self.formats]
        return [0, *accumulate(-(-size // _ALIGN) * _ALIGN for size in sizes)]

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensors as what is sent."""
        if len(tensors) == 1:
            return tensors[0]
        shape, dtype = self.format
        packed = torch.empty(shape, dtype=dtype, device=tensors[0].device)
        for tensor, part in zip(tensors, self.unpack(packed), strict=True):
            part.copy_(tensor)
        return packed

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """Return the tensors of what was received, as views."""
        if len(self.formats) == 1:
            return [packed]
        return [
            packed[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for (shape, dtype), start in zip(self.formats, self._ends[:-1], strict=True)
        ]


class OwnRuntime(Runtime):
    """`Runtime` of `OwnStage`.

    Args:
        crossings: what each stage gets from the one before (`Chain.crossings`).

    Attributes:
        terms: number of terms of the loss by stage and micro-batch, float64 []. An asynchronous program sends it along
            with gradients, as each stage divides them by the terms of its update.
    """

    stages: dict[int, OwnStage]  # type: ignore[assignment]

    def __init__(
        self, program: Program, stages: Sequence[OwnStage], mesh: Mesh, crossings: Sequence[Sequence[Crossing]]
    ):
        self.forwards = [Packing(tuple((x.shape, x.dtype) for x in each)) for each in crossings]
        beside = [((), torch.float64)] if program.updates > 1 else []
        self.backwards = [Packing((*((x.shape, x.dtype) for x in each if x.trained), *beside)) for each in crossings]
        super().__init__(program, stages, mesh, hidden_shape=(0, 0, 0), dtype=torch.float32)

    def _reset(self) -> None:
        super()._reset()
        self.terms: dict[tuple[int, int], Tensor] = {}
        self._flights: dict[Place, tuple[int, list[Tensor], Any]] = {}  # first sample, received, sent or the loss

    def _links(self, stage: int) -> StageLinks:
        links = self.stages[stage].links
        assert links is not None, "it is of a pipeline"
        return links

    def message_format(self, action: Action) -> tuple[Sequence[int], torch.dtype]:
        if action.op is Op.RECV_FORWARD:
            return self.forwards[action.stage].format
        return self.backwards[action.stage + 1].format

    def _forward(self, action: Action, batch: Any, scale: float | Tensor) -> None:
        stage, microbatch, part = place = action[1:4]
        packed, training = self._hidden.pop(place, None), torch.is_grad_enabled()
        received = [] if packed is None else self.forwards[stage].unpack(packed)
        for tensor, crossing in zip(received, self._links(stage).takes, strict=True):
            tensor.requires_grad_(training and crossing.trained)
        sent = self.stages[stage].forward(batch, received, None)
        if self.program.is_last(stage):
            self._loss += sent.detach()
            sent = [sent * scale]
            self.terms[stage, microbatch] = self.stages[stage].terms
        else:
            self._hidden[stage + 1, microbatch, part] = self.forwards[stage + 1].pack([x.detach() for x in sent])
        if training:
            self._flights[place] = batch.first, received, sent

    def _backward(self, action: Action) -> None:
        number, microbatch, part = place = action[1:4]
        first, received, sent = self._flights.pop(place)
        stage, packed = self.stages[number], self._gradient.pop(place, None)
        gradients: list[Any] = [None] if packed is None else self.backwards[number + 1].unpack(packed)
        if packed is not None and self.versions:
            self.terms[number, microbatch] = gradients.pop()
        stage.parameters.last_microbatch = action in self.last_weights
        links = self._links(number)
        stage.seeds.first, links.received = first, received  # recomputation needs both again
        stage.gather()  # the backward of another micro-batch has freed parameters of ZeRO-3
        if packed is not None:
            sent = [x for x, crossing in zip(sent, links.gives, strict=True) if crossing.trained]
        pairs = [(x, gradient) for x, gradient in zip(sent, gradients, strict=True) if x.requires_grad]
        if pairs:
            torch.autograd.backward([x for x, _ in pairs], [gradient for _, gradient in pairs])
        links.received = ()
        if number:
            found = [x.grad if x.grad is not None else torch.zeros_like(x) for x in received if x.requires_grad]
            found += [self.terms[number, microbatch]] if self.versions else []
            self._gradient[number - 1, microbatch, part] = self.backwards[number].pack(found)
