"""How long things take: computations by stage and micro-batch, messages by their link."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from shoal.base.errors import UsageError
from shoal.pipeline.program import Op
from shoal.pipeline.simulator.columns import CODE, Columns

Duration = float | np.ndarray
"""A time [s or any one unit] for all, or an array by stage, or by stage and micro-batch."""

FIELDS = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward_input",
    Op.BACKWARD_WEIGHT: "backward_weight",
    Op.REDUCE: "reduce",
    Op.STEP: "step",
    Op.GATHER: "gather",
}
"""The field of `ActionTimes` for each op."""


@dataclass(frozen=True)
class ActionTimes:
    """How long each action occupies its rank, in one unit of your choice.

    An action on a slice of the sequence takes its share of these.

    Attributes:
        forward: T_F.
        backward_input: T_B in the zero-bubble papers: the gradient of the input.
        backward_weight: T_W: the gradients of the weights.
        backward: the whole backward; None for the sum of its two halves.
        pair: a forward and another stage's whole backward behind it, computed at once (F&B of DualPipe, by the
            forward's stage and micro-batch); None for one after the other. Both results are there at its end.
        reduce: what is left of a stage's gradient reduction after its last backward.
        step: the optimizer.
        gather: a stage's updated parameters.
    """

    forward: Duration = 1.0
    backward_input: Duration = 1.0
    backward_weight: Duration = 1.0
    backward: Duration | None = None
    pair: Duration | None = None
    reduce: Duration = 0.0
    step: Duration = 0.0
    gather: Duration = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if given is not None and not _are_times(given):
                raise UsageError(f"times.{field.name}: {given} must be finite and not negative")

    def of(self, columns: Columns) -> np.ndarray:
        """The duration of each row. [rows], float64

        That of a pair is its backward's.

        Raises:
            UsageError: an array has not as many entries as there are stages and micro-batches.
        """
        times = np.zeros(columns.rows)
        for op, name in FIELDS.items():
            rows = np.flatnonzero(columns.op == CODE[op])
            halves = op is Op.BACKWARD and self.backward is None
            names = ("backward_input", "backward_weight") if halves else (name,)
            times[rows] = sum(self._look_up(one, columns, rows) for one in names)
        if self.pair is not None:
            pairs = columns.pairs
            times[pairs + 1] = self._look_up("pair", columns, pairs)
            times[pairs] = 0.0
        return np.where(columns.part >= 0, times / columns.program.sequence_slices, times)

    def _look_up(self, name: str, columns: Columns, rows: np.ndarray) -> np.ndarray | float:
        table = np.asarray(getattr(self, name), dtype=float)
        wanted = (columns.program.stages, columns.program.microbatches)[: table.ndim]
        if table.shape != wanted:
            raise UsageError(f"times.{name}: given for {table.shape} (stages, micro-batches), the program has {wanted}")
        index = (columns.stage[rows], columns.microbatch[rows])[: table.ndim]
        return table[index] if index else float(table)


@dataclass(frozen=True)
class MessageTimes:
    """How long messages between pipeline ranks take. Messages of one rank to one other go one after another.

    Attributes:
        time: that a message occupies its link: a number, or an array [ranks, ranks] of (source, target).
        latency: until the message is there after it has left the link, likewise.
        blocking: a message also occupies its sender, who computes nothing meanwhile.
    """

    time: float | np.ndarray = 0.0
    latency: float | np.ndarray = 0.0
    blocking: bool = False

    def __post_init__(self) -> None:
        for name in ("time", "latency"):
            if not _are_times(getattr(self, name)):
                raise UsageError(f"links.{name}: {getattr(self, name)} must be finite and not negative")

    def between(self, source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The time and the latency of each message. [messages] each"""
        time, latency = (
            given[source, target] if isinstance(given, np.ndarray) and given.ndim
            else np.broadcast_to(np.asarray(given, float), source.shape)
            for given in (self.time, self.latency)
        )
        return time, latency


def _are_times(given: float | np.ndarray) -> bool:
    given = np.asarray(given, float)
    return bool(np.all(np.isfinite(given) & (given >= 0)))
