"""Executes a rank's part of a `Program`: one stage with accumulation, or a pipeline, on the same path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.mesh import Mesh
from shoal.data.batches import Batch
from shoal.parallel.apply import Stage
from shoal.pipeline.program import Action, Op, Program

PASSES = (Op.FORWARD, Op.SEND_FORWARD, Op.RECV_FORWARD)


@dataclass
class _Flight:
    """A micro-batch between its forward and its backward on one stage."""

    hidden: Tensor | None
    output: Tensor


class Runtime:
    """One rank's executor.

    Args:
        program: of all pipeline ranks; this rank's part is taken by the mesh's pp index.
        stages: the stages that this rank holds.
        mesh: where messages go.
        hidden_shape: [b, s, h] of the activations between stages on this rank (s/tp with sequence parallelism).
        dtype: of these activations.
    """

    def __init__(
        self,
        program: Program,
        stages: Sequence[Stage],
        mesh: Mesh,
        *,
        hidden_shape: tuple[int, int, int],
        dtype: torch.dtype,
    ):
        self.program, self.mesh = program, mesh
        self.stages = {stage.index: stage for stage in stages}
        self.actions = program.actions[mesh.index("pp")]
        self.last_backward = {a.stage: a.microbatch for a in self.actions if a.op is Op.BACKWARD}
        self.hidden_shape, self.dtype = hidden_shape, dtype
        # A group for each direction: what is sent one way never waits for what goes the other.
        self.groups = {
            direction: mesh.group("pp", purpose=direction) for direction in (Op.FORWARD, Op.BACKWARD)
        }
        self._connect()
        self._reset()

    def _connect(self) -> None:
        """Exchange one number with each neighbour, from the first stage to the last and back.

        NCCL connects two ranks at their first transfer and holds both until the other is there; in a step, where each
        waits at a place of its own, that could be never.
        """
        ranks, here = self.mesh.ranks("pp"), self.mesh.index("pp")
        number = torch.zeros(1, device=self.mesh.device)
        for direction, order in ((Op.FORWARD, ranks), (Op.BACKWARD, ranks[::-1])):
            place, group = order.index(ranks[here]), self.groups[direction]
            if place > 0:
                dist.recv(number, order[place - 1], group=group)
            if place < len(order) - 1:
                dist.send(number, order[place + 1], group=group)

    def _reset(self) -> None:
        self._hidden: dict[tuple[int, int], Tensor] = {}
        self._gradient: dict[tuple[int, int], Tensor] = {}
        self._receiving: dict[tuple[Op, int, int], dist.Work] = {}
        self._sending: list[tuple[dist.Work, Tensor]] = []
        self._flights: dict[tuple[int, int], _Flight] = {}

    def step(self, batches: Sequence[Batch], scale: float, update: Callable[[Tensor], None]) -> None:
        """Run one step.

        Args:
            batches: this replica's micro-batches, on the device.
            scale: what the summed loss is multiplied by before backward: 1 / number of tokens that count, globally.
            update: called at STEP with the summed loss [nats] of this rank's forwards (0 on all but the last stage);
                it updates the weights.
        """
        self._reset()
        self._loss = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for stage in self.stages.values():
            stage.parameters.begin()
        for action in self.actions:
            match action.op:
                case Op.FORWARD:
                    self._forward(action, batches[action.microbatch], scale)
                case Op.BACKWARD:
                    self._backward(action)
                case Op.REDUCE:
                    self.stages[action.stage].parameters.finish()
                case Op.STEP:
                    update(self._loss)
                case Op.GATHER:
                    self.stages[action.stage].parameters.gather()
                case _:
                    self._transfer(action)
        self._drain()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """The summed loss [nats] of as many micro-batches as the program has, forwards alone (0 off the last stage)."""
        self._reset()
        self._loss = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for action in self.actions:
            if action.op is Op.FORWARD:
                self._forward(action, batches[action.microbatch], 1.0)
            elif action.op in PASSES:
                self._transfer(action)
        self._drain()
        return self._loss

    # ---- computations ------------------------------------------------------------------------------------------

    def _forward(self, action: Action, batch: Batch, scale: float) -> None:
        key = (action.stage, action.microbatch)
        self._arrived(Op.RECV_FORWARD, action)
        hidden = self._hidden.pop(key, None)
        if hidden is not None and torch.is_grad_enabled():
            hidden.requires_grad_()
        output = self.stages[action.stage].module(batch.tokens, batch.targets, batch.documents, hidden)
        if action.stage == self.program.stages - 1:
            self._loss += output.detach()
            output = output * scale
        else:
            self._hidden[action.stage + 1, action.microbatch] = output.detach()
        if torch.is_grad_enabled():
            self._flights[key] = _Flight(hidden, output)

    def _backward(self, action: Action) -> None:
        key = (action.stage, action.microbatch)
        self._arrived(Op.RECV_BACKWARD, action)
        flight = self._flights.pop(key)
        self.stages[action.stage].parameters.last_microbatch = self.last_backward[action.stage] == action.microbatch
        torch.autograd.backward(flight.output, self._gradient.pop(key, None))
        if flight.hidden is not None:
            self._gradient[action.stage - 1, action.microbatch] = flight.hidden.grad

    # ---- transfers ---------------------------------------------------------------------------------------------

    def _transfer(self, action: Action) -> None:
        step = 1 if action.op in (Op.SEND_FORWARD, Op.RECV_BACKWARD) else -1
        peer = self.mesh.ranks("pp")[self.program.stage_rank[action.stage + step]]
        key = (action.stage + step, action.microbatch)
        match action.op:
            case Op.SEND_FORWARD:
                self._send(self._hidden.pop(key), peer, Op.FORWARD)
            case Op.SEND_BACKWARD:
                self._send(self._gradient.pop(key), peer, Op.BACKWARD)
            case Op.RECV_FORWARD:
                self._hidden[action.stage, action.microbatch] = self._receive(action, peer, Op.FORWARD)
            case Op.RECV_BACKWARD:
                self._gradient[action.stage, action.microbatch] = self._receive(action, peer, Op.BACKWARD)

    def _send(self, tensor: Tensor, peer: int, direction: Op) -> None:
        tensor = tensor.contiguous()
        self._sending = [(work, held) for work, held in self._sending if not work.is_completed()]
        self._sending.append((dist.isend(tensor, peer, group=self.groups[direction]), tensor))

    def _receive(self, action: Action, peer: int, direction: Op) -> Tensor:
        tensor = torch.empty(self.hidden_shape, dtype=self.dtype, device=self.mesh.device)
        work = dist.irecv(tensor, peer, group=self.groups[direction])
        self._receiving[action.op, action.stage, action.microbatch] = work
        return tensor

    def _arrived(self, op: Op, action: Action) -> None:
        work = self._receiving.pop((op, action.stage, action.microbatch), None)
        if work is not None:
            work.wait()

    def _drain(self) -> None:
        for work, _ in self._sending:
            work.wait()
        self._sending = []
