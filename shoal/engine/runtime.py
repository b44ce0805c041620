"""Execute a rank's part of a `Program`, for a single stage with accumulation or any pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import Pending, start_receive, start_send
from shoal.engine.data.batches import Batch
from shoal.engine.models.cache import Slice
from shoal.engine.models.labels import look_further
from shoal.engine.parallel.apply import LocalStage
from shoal.engine.turns import Turns
from shoal.engine.weight_versions import WeightVersions
from shoal.pipeline.program import RECEIVES, SENDS, WEIGHTS, Action, Op, Program, pair_up

R = TypeVar("R")
Update = Callable[[Action, Tensor], R]
Place = tuple[int, int, int]
"""A stage, a micro-batch and a slice of its sequences (-1 for all of them)."""

Channel = tuple[Op, bool]
"""Message direction along the pipeline: FORWARD or BACKWARD, and whether from a lower rank to a higher."""


@dataclass
class _InFlight:
    """A micro-batch, or a slice of it, between its forward and its backward on one stage."""

    hidden: Tensor | None
    output: Tensor
    part: Slice | None


class Recorder(Protocol):
    """Callbacks that a runtime calls around each action."""

    def begin(self, action: Action) -> None:
        """Handle the start of an action."""
        return

    def arrived(self, action: Action) -> None:
        """Handle the arrival of the message that an action waited for, if any."""
        return

    def end(self, action: Action) -> None:
        """Handle the end of an action (of a transfer: its start)."""
        return


class Runtime:
    """Executor of one rank's actions.

    Args:
        program: program of all pipeline ranks; this rank runs the part of the mesh's pp index.
        hidden_shape: [b, s, h] of the activations between stages on this rank (s/tp_y with sequence parallelism,
            h/tp_x).
        slices: number of this rank's tokens in each slice of a sequence, if the program has slices.
        tokens: this rank's tokens of a sequence, [s]; None for all.
        cuda_graphs: whether layers are recorded as CUDA graphs, which reuse their memory in the next step.

    Attributes:
        versions: the weight versions of each stage, in asynchronous pipelines.
        on_loss: called with a micro-batch, or a slice of it, after its loss was computed by the module.
    """

    def __init__(
        self,
        program: Program,
        stages: Sequence[LocalStage],
        mesh: Mesh,
        *,
        hidden_shape: tuple[int, int, int],
        dtype: torch.dtype,
        slices: Sequence[int] = (),
        tokens: Tensor | None = None,
        cuda_graphs: bool = False,
    ):
        self.program, self.mesh = program, mesh
        self.stages = {stage.index: stage for stage in stages}
        self.actions = program.actions[mesh.index("pp")]
        self.last_weights = _last_weights(self.actions)
        self.hidden_shape, self.dtype, self.slices = hidden_shape, dtype, slices
        self.tokens, self.cuda_graphs = tokens, cuda_graphs
        self.further = max(stage.further for stage in stages)
        self.versions = {
            stage.index: WeightVersions(
                stage.parameters.buckets, [(i, a) for i, a in enumerate(self.actions) if a.stage == stage.index],
                early=stage.keeps_views,
            )
            for stage in stages if program.updates > 1
        }
        self.turns = Turns()
        if program.paired and (experts := mesh.group("ep")) is not None:
            experts.meanwhile = self.turns.give
        self.recorders: list[Recorder] = []
        self.on_loss: Callable[[Batch, nn.Module], None] | None = None
        # One group per channel, so that channels never wait for each other.
        self.groups: dict[Channel, Group] = {}
        self._connect()
        self._reset()

    def _connect(self) -> None:
        """Create the groups, and exchange one number on every route, in the same order on all ranks.

        NCCL connects two ranks at their first transfer and blocks each until the other arrives. Inside a step, where
        ranks wait at different points, that could deadlock.
        """
        ranks, own = self.mesh.ranks("pp"), self.mesh.index("pp")
        used = {
            self._route(action) for actions in self.program.actions for action in actions if action.op in RECEIVES
        }
        number = torch.zeros(1, device=self.mesh.device)
        for channel, source, target in sorted(used):
            if channel not in self.groups:
                purpose = f"{channel[0]}{'+' if channel[1] else '-'}"
                self.groups[channel] = self.mesh.required_group("pp", purpose)
            if own == source:
                start_send(number, ranks[target], self.groups[channel]).wait()
            elif own == target:
                start_receive(number, ranks[source], self.groups[channel]).wait()

    def _route(self, action: Action) -> tuple[Channel, int, int]:
        """Return the channel of a message, and its source and destination pipeline ranks."""
        forward = action.op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
        other = action.stage + (1 if action.op in (Op.SEND_FORWARD, Op.RECV_BACKWARD) else -1)
        near, far = self.program.stage_rank[action.stage], self.program.stage_rank[other]
        source, target = (near, far) if action.op in SENDS else (far, near)
        return (Op.FORWARD if forward else Op.BACKWARD, source < target), source, target

    def _reset(self) -> None:
        self._hidden: dict[Place, Tensor] = {}
        self._gradient: dict[Place, Tensor] = {}
        self._receiving: dict[tuple[Op, Place], Pending] = {}
        self._sending: list[tuple[Pending, Tensor]] = []
        self._in_flight: dict[Place, _InFlight] = {}
        self._caches: dict[tuple[int, int], Slice] = {}  # newest slice per micro-batch and stage
        self._loss = torch.zeros((), dtype=torch.float64, device=self.mesh.device)

    def step(
        self, batches: Sequence[Batch], scale: Sequence[float | Tensor] | np.ndarray, update: Update[R]
    ) -> tuple[Tensor, R | None]:
        """Run the program once.

        Args:
            batches: this replica's micro-batches, on the device.
            scale: per micro-batch, the factor on its summed loss before backward: 1 / number of counted tokens in its
                update, globally. A tensor is float64 [] on the device.
            update: called at each STEP with the action and the summed loss [nats] of this rank's forwards so far (0
                without the last stage); it updates the weights.

        Returns:
            The summed loss of all micro-batches, and the result of the last update.
        """
        self._reset()
        if self.cuda_graphs:  # after the previous step's tensors are gone: without marks, each layer would begin a step
            torch.compiler.cudagraph_mark_step_begin()
        if self.further and torch.is_grad_enabled():  # before ranks take their tokens of a sequence
            batches = [replace(each, further=look_further(each.tokens, each.targets, each.documents, self.further))
                       for each in batches]  # fmt: skip
        compute = partial(self._compute, [take_tokens(batch, self.tokens) for batch in batches], scale)
        for stage in self.stages.values():
            stage.parameters.begin()
        for versions in self.versions.values():
            versions.begin()
        updated = None
        together: Iterable[tuple[Action, ...]] = pair_up(self.actions) if self.program.paired else zip(self.actions)
        for i, (*forward, action) in enumerate(together):
            for paired in forward:  # its computation is part of the backward, to recorders too
                for recorder in self.recorders:
                    recorder.begin(paired)
                self._arrived(paired)
                for recorder in self.recorders:
                    recorder.end(paired)
            for recorder in self.recorders:
                recorder.begin(action)
            if action.stage in self.versions:
                self.versions[action.stage].before(i, action)
            if action.op is Op.STEP:
                updated = update(action, self._loss)
                if 0 < action.version < self.program.updates:
                    self.stages[action.stage].parameters.begin()
            elif forward:
                self._arrived(action)
                self.turns.run(partial(compute, *forward), partial(compute, action), self.mesh.device)
            else:
                self._perform(action, compute)
            if action.stage in self.versions:
                self.versions[action.stage].after(i, action)
            for recorder in self.recorders:
                recorder.end(action)
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()  # which kept the tensors alive
        return self._loss, updated

    def _perform(self, action: Action, compute: Callable[[Action], None]) -> None:
        """Perform one action, except an update."""
        match action.op:
            case Op.FORWARD | Op.BACKWARD:
                self._arrived(action)
                compute(action)
            case Op.BACKWARD_INPUT:
                self._arrived(action)
                with self.stages[action.stage].parameters.deferred(action.microbatch):
                    self._backward(action)
            case Op.BACKWARD_WEIGHT:
                parameters = self.stages[action.stage].parameters
                parameters.last_microbatch = action in self.last_weights
                parameters.add_deferred(action.microbatch)
            case Op.REDUCE:
                self.stages[action.stage].parameters.finish()
            case Op.GATHER:
                self.stages[action.stage].parameters.gather()
            case _:
                self._transfer(action)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """Return the summed loss [nats] of a forward-only program (0 without the last stage)."""
        return self.step(batches, np.ones(len(batches)), lambda action, loss: None)[0]

    # ---- computations ------------------------------------------------------------------------------------------

    def _compute(self, batches: Sequence[Batch], scale: Sequence[float | Tensor] | np.ndarray, action: Action) -> None:
        if action.op is Op.FORWARD:
            self._forward(action, batches[action.microbatch], scale[action.microbatch])
        else:
            self._backward(action)
            self.stages[action.stage].parameters.backward_done()

    def _forward(self, action: Action, batch: Batch, scale: float | Tensor) -> None:
        stage, microbatch, number = place = action[1:4]
        hidden = self._hidden.pop(place, None)
        if hidden is not None and torch.is_grad_enabled():
            hidden.requires_grad_()
        part = None
        if number >= 0:
            part = self._caches[stage, microbatch] = Slice(self._caches.get((stage, microbatch)))
            batch = take_tokens(batch, self.slice_tokens(number))
        output = self.stages[stage].forward(batch, hidden, part)
        if self.program.is_last(stage):
            self._loss += output.detach()
            if self.on_loss is not None:
                self.on_loss(batch, self.stages[stage].module)
            output = output * scale
        else:
            self._hidden[stage + 1, microbatch, number] = output.detach()
        if torch.is_grad_enabled():
            self._in_flight[place] = _InFlight(hidden, output, part)
        elif number == len(self.slices) - 1:
            self._caches.pop((stage, microbatch), None)

    def slice_tokens(self, part: int) -> slice:
        """Return the token range of a slice of a sequence; -1 is the full sequence."""
        if part < 0:
            return slice(None)
        *_, start, stop = (0, 0, *accumulate(self.slices[: part + 1]))
        return slice(start, stop)

    def _backward(self, action: Action) -> None:
        stage, microbatch, number = place = action[1:4]
        flight = self._in_flight.pop(place)
        self.stages[stage].parameters.last_microbatch = action in self.last_weights
        outputs, gradients = [flight.output], [self._gradient.pop(place, None)]
        if flight.part is not None:
            outputs += flight.part.roots()
            gradients += flight.part.root_gradients()
        torch.autograd.backward(outputs, gradients)
        if number == 0:  # the last slice in backward order: the cached keys and values are no longer needed
            self._caches.pop((stage, microbatch), None)
        if flight.hidden is not None:
            assert flight.hidden.grad is not None  # every layer uses its input
            self._gradient[stage - 1, microbatch, number] = flight.hidden.grad

    # ---- transfers ---------------------------------------------------------------------------------------------

    def _transfer(self, action: Action) -> None:
        channel, source, target = self._route(action)
        ranks, held = self.mesh.ranks("pp"), self._hidden if channel[0] is Op.FORWARD else self._gradient
        if action.op in SENDS:
            stage = action.stage + (1 if action.op is Op.SEND_FORWARD else -1)
            tensor = held.pop((stage, *action[2:4])).contiguous()
            self._sending = [(work, sent) for work, sent in self._sending if not work.is_completed()]
            self._sending.append((start_send(tensor, ranks[target], self.groups[channel]), tensor))
        else:
            shape, dtype = self.message_format(action)
            tensor = held[action[1:4]] = torch.empty(shape, dtype=dtype, device=self.mesh.device)
            self._receiving[action.op, action[1:4]] = start_receive(tensor, ranks[source], self.groups[channel])

    def message_format(self, action: Action) -> tuple[Sequence[int], torch.dtype]:
        """Return shape and dtype of a tensor that an action receives."""
        b, s, h = self.hidden_shape
        if action.part >= 0:
            s = s * self.slices[action.part] // sum(self.slices)
        return (b, s, h), self.dtype

    def _arrived(self, action: Action) -> None:
        """Wait for the message that a computation needs, if one comes from another rank."""
        op = Op.RECV_FORWARD if action.op is Op.FORWARD else Op.RECV_BACKWARD
        work = self._receiving.pop((op, action[1:4]), None)
        if work is not None:
            work.wait()
        for recorder in self.recorders:
            recorder.arrived(action)


def take_tokens(batch: Batch, tokens: Tensor | slice | None) -> Batch:
    """Return some tokens of a micro-batch (None: all), with the documents of all tokens, which attention needs."""
    if tokens is None:
        return batch
    further = None if batch.further is None else batch.further[..., tokens]
    return replace(batch, tokens=batch.tokens[:, tokens], targets=batch.targets[:, tokens], further=further)


def _last_weights(actions: Sequence[Action]) -> set[Action]:
    """Return the passes that complete the gradients of a stage: the last before each reduction."""
    latest: dict[int, Action] = {}
    last = set()
    for action in actions:
        if action.op in WEIGHTS:
            latest[action.stage] = action
        elif action.op is Op.REDUCE:
            last.add(latest[action.stage])
    return last
