"""Runtime of a pipeline of one's own modules, whose messages have the shapes of the module's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.engine.collectives.mesh import Mesh
from shoal.engine.own.stage import OwnStage
from shoal.engine.runtime import Runtime
from shoal.pipeline.program import Action, Op, Program


class OwnRuntime(Runtime):
    """`Runtime` of `OwnStage`.

    Args:
        inputs: shape and dtype of the input of each stage.
    """

    stages: dict[int, OwnStage]  # type: ignore[assignment]

    def __init__(
        self, program: Program, stages: Sequence[OwnStage], mesh: Mesh,
        inputs: Sequence[tuple[tuple[int, ...], torch.dtype]],
    ):
        super().__init__(program, stages, mesh, hidden_shape=(0, 0, 0), dtype=torch.float32)
        self.inputs = inputs
        self.firsts: dict[int, int] = {}  # first sample of each micro-batch

    def message_format(self, action: Action) -> tuple[Sequence[int], torch.dtype]:
        return self.inputs[action.stage + (action.op is Op.RECV_BACKWARD)]

    def _forward(self, action: Action, batch: Any, scale: float | Tensor) -> None:
        self.firsts[action.microbatch] = batch.first
        super()._forward(action, batch, scale)

    def _backward(self, action: Action) -> None:
        stage = self.stages[action.stage]
        stage.seeds.first = self.firsts[action.microbatch]  # recomputation draws again
        assert stage.links is not None, "it is of a pipeline"
        stage.links.hidden = self._in_flight[action[1:4]].hidden
        stage.gather()  # the backward of another micro-batch has freed them
        super()._backward(action)
        stage.links.hidden = None
