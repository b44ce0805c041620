"""Durations of computations (by stage and micro-batch) and of messages (by link)."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from shoal.base.errors import UsageError
from shoal.pipeline.program import Op
from shoal.pipeline.simulator.columns import CODE, Columns

Duration = float | np.ndarray
"""One time [s or any one unit] for all, or an array by stage, or by stage and micro-batch."""


@dataclass(frozen=True)
class ActionTimes:
    """Duration of each kind of action on its rank, in any one unit.

    Fields are named after ops. An action on a slice of the sequence takes its share of the duration.

    Attributes:
        forward: T_F.
        backward_input: T_B in the zero-bubble papers: the gradient of the input.
        backward_weight: T_W: the gradients of the weights.
        backward: the full backward; None for the sum of its two halves.
        pair: a forward and another stage's full backward after it, computed together (F&B of DualPipe, by the
            forward's stage and micro-batch); None to run them sequentially. Both results are ready at its end.
        reduce: the part of a stage's gradient reduction that remains after its last backward.
        step: the optimizer.
        gather: gathering a stage's updated parameters.
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

    def per_row(self, columns: Columns) -> np.ndarray:
        """Return the duration of each row. [rows], float64

        A pair has the duration of its backward.

        Raises:
            UsageError: an array does not match the number of stages and micro-batches.
        """
        times = np.zeros(columns.rows)
        for op, code in CODE.items():
            rows = np.flatnonzero(columns.op == code)
            halves = op is Op.BACKWARD and self.backward is None
            names = ("backward_input", "backward_weight") if halves else (op.name.lower(),)
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
    """Durations of messages between pipeline ranks. Messages on one link (source to target) are sequential.

    Attributes:
        time: time that a message occupies its link: a number, or an array [ranks, ranks] of (source, target).
        latency: time from leaving the link to arrival, in the same form.
        blocking: a message also blocks its sender, which computes nothing meanwhile.
    """

    time: float | np.ndarray = 0.0
    latency: float | np.ndarray = 0.0
    blocking: bool = False

    def __post_init__(self) -> None:
        for name in ("time", "latency"):
            if not _are_times(getattr(self, name)):
                raise UsageError(f"links.{name}: {getattr(self, name)} must be finite and not negative")

    def between(self, source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the time and the latency of each message. [messages] each"""
        time, latency = (
            given[source, target] if isinstance(given, np.ndarray) and given.ndim
            else np.broadcast_to(np.asarray(given, float), source.shape)
            for given in (self.time, self.latency)
        )
        return time, latency


def _are_times(given: float | np.ndarray) -> bool:
    given = np.asarray(given, float)
    return bool(np.all(np.isfinite(given) & (given >= 0)))
