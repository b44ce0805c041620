"""The loops around the relaxed engines: replicas that meet every few steps, or only where the run needs them to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from threading import Thread

import torch
import torch.distributed as dist

from shoal.engine.collectives.group import Group
from shoal.engine.device import peak_memory
from shoal.training.async_dp.engines import CompressedEngine, LocalEngine, ReplicaResult
from shoal.training.async_dp.unsynchronised import COLUMNS, FreeEngine
from shoal.training.fault_knobs import RankTimes, who_waits
from shoal.training.records.metrics import StepMetrics
from shoal.training.records.timer import StepTimer
from shoal.training.resilience.heartbeat import Phase
from shoal.training.step.engine import Engine, StepResult
from shoal.training.trainer import Trainer

JOIN_SECONDS = 0.5  # for what can still be joined when one has ended


def stands_for(replica: int, living: Sequence[int], replicas: int) -> list[int]:
    """The dead replicas whose states in a checkpoint are copies of this living one's: those between it and the next.

    So a checkpoint always has the states of all, and a run that is resumed begins with as many replicas as ever.

    >>> [stands_for(replica, [0, 2, 3], 6) for replica in (0, 2, 3)]
    [[1], [], [4, 5]]
    """
    return [dead for dead in range(replicas) if dead not in living and max(o for o in living if o < dead) == replica]


class CompressedTrainer(Trainer):
    """Every step is everyone's, as in the synchronous run."""

    def _engine(self) -> Engine:
        return CompressedEngine(self.config, self.shape, self.mesh, self.samples["train"])


class LocalTrainer(Trainer):
    """Logs, validates and saves where the replicas average."""

    def _engine(self) -> Engine:
        return LocalEngine(self.config, self.shape, self.mesh, self.samples["train"])

    def _after_step(self, result: StepResult, timer: StepTimer, peak: float | None, *, last: bool) -> None:
        if isinstance(result, ReplicaResult) and result.met:
            super()._after_step(result, timer, peak, last=last)
        else:
            self.display.progress(self.step, self.config.train.steps)


class FreeTrainer(Trainer):
    """Takes tickets until there are none, then meets the others: to validate, to save, or because it is the end.

    Between meetings the first rank reads what the others tell of themselves, and logs that; it waits for nobody. When a
    rank has died, those that live make a group of their own at the next meeting and go on; without the first rank,
    which decides who lives, nobody does.
    """

    engine: FreeEngine

    def _engine(self) -> Engine:
        return FreeEngine(self.config, self.shape, self.mesh, self.samples["train"])

    def run(self) -> None:
        """As `Trainer.run`."""
        self.stop.listen()
        self._banner()
        self.peak = self._peak()
        self.meetings, self.among = 0, self.mesh.group("dp")
        self.told = torch.zeros_like(self.engine.board)
        self.started = self.told_step = self.step
        self.rate, self.told_at = 0.0, time.perf_counter()
        self._begin_from(self.step)
        steps = self.config.train.steps
        with self.display:
            while self.step < steps:
                self._free_steps()
                stopped = self._meeting() < self.next_meeting
                if stopped:
                    break
                self._begin_from(self.step)
            self.beat.phase(Phase.END)
            self._close()
            self._tell_times()

    def leave(self) -> None:
        """As `Trainer.leave`, among those that live."""
        self._meet()

    # ---- alone -------------------------------------------------------------------------------------------------

    def _begin_from(self, step: int) -> None:
        """All go on from a step to the next meeting."""
        every = (self.config.train.validate_every, self.config.checkpoint.every)
        self.next_meeting = min([(step // n + 1) * n for n in every if n] + [self.config.train.steps])
        if self.meetings == 0:
            self.engine.method.start(step)
        if self.first:
            self.engine.queue.start(step, self.next_meeting)
            self.told_at = time.perf_counter()
        self._meet()

    @property
    def _times(self) -> RankTimes:
        assert self.watch is not None, "a relaxed run watches its times"
        return self.watch.times

    def _free_steps(self) -> None:
        engine, queue = self.engine, self.engine.queue
        while (ticket := queue.take(engine.replica)) is not None:
            if self.stop.count:
                queue.stop()
            if queue.common:
                engine.sampler = engine.sampler_of(ticket.slot)
            self.beat.phase(Phase.STEP)
            result = engine.step(ticket.step)
            self.beat.stepped(ticket.step + 1, self._times.total)
            self._tell(result)
            if self.first:
                self._show(result)

    def _tell(self, result: ReplicaResult) -> None:
        """Write this replica's row of the board."""
        times, stale = self._times, self.engine.method.staleness
        row = self.engine.board[self.engine.replica]
        row += torch.tensor([1, result.loss * result.tokens, result.tokens, result.gradient_norm, 0, 0, 0, 0, 0])
        row[4:] = torch.tensor([times.computing, times.total, stale.updates, stale.total, stale.most])

    def _show(self, result: ReplicaResult) -> None:
        """Log, when the replicas have come far enough together since the last time."""
        every, board = self.config.metrics.log_every, self.engine.board
        done = board[self.engine.window.living(), 0]
        shares = int(board[:, 0].sum()) // self.engine.replicas if self.engine.queue.common else int(done.mean())
        step, self.rate = self.started + shares, result.learning_rate
        if step // every > self.told_step // every and step < self.next_meeting:
            self._log_until(step)
        self.display.progress(step, self.config.train.steps)

    def _log_until(self, step: int) -> None:
        now, board = time.perf_counter(), self.engine.board.clone()
        sums, seconds = (board - self.told).sum(0).tolist(), max(now - self.told_at, 1e-9)
        news = dict(zip(COLUMNS, sums, strict=True))
        self.told, self.told_at = board, now
        self.told_step = step
        if not news["tokens"]:
            return
        updates = news["updates"]
        per_sequence = self.config.data.sequence_length * self.config.train.global_batch / self.engine.replicas
        speed = news["steps"] * per_sequence / seconds
        metrics = StepMetrics(
            step=step,
            steps=self.config.train.steps,
            loss=news["loss"] / news["tokens"],
            learning_rate=self.rate,
            gradient_norm=news["norm"] / news["steps"],
            tokens_per_second=speed,
            tokens_per_second_per_rank=speed / self.mesh.layout.world_size,
            memory_bytes=peak_memory(self.mesh.device),
            seconds_left=(self.config.train.steps - step) * self.engine.replicas * seconds / news["steps"],
            mfu=speed * self.shape.flops_per_token(self.config.data.sequence_length) / self.peak if self.peak else None,
            validation_loss=self.validation_loss,
            staleness=news["stale"] / updates if updates else None,
            stalest=int(board[:, COLUMNS.index("stalest")].max()) if updates else None,
        )
        if self.writer:
            self.writer.write(metrics)
        self.display.step(metrics)

    # ---- together ----------------------------------------------------------------------------------------------

    def _has_come(self, other: int) -> bool:
        window = self.engine.window
        return window.get(self.engine.arrived + other) >= self.meetings or not window.alive(other)

    def _meet(self) -> list[int]:
        """Wait for all that live; returns them, as the first rank saw it.

        Raises:
            PeerLost: the first rank has ended.
        """
        window, counter, n = self.engine.window, self.engine.arrived, self.engine.replicas
        self.meetings += 1
        window.set(counter + self.engine.replica, self.meetings)
        decided, who = counter + n, counter + n + 1
        if self.first:
            for other in range(1, n):
                window.until(partial(self._has_come, other))
            living = [o for o in range(n) if window.get(counter + o) >= self.meetings and window.alive(o, now=True)]
            window.set(who, sum(1 << o for o in living))
            window.set(decided, self.meetings)
        else:
            what = f"parallel.sync = '{self.config.parallel.sync}' does not go on without rank 0"
            window.until(lambda: window.get(decided) >= self.meetings, [0], what)
        return [o for o in range(n) if window.get(who) >> o & 1]

    def _meeting(self) -> int:
        """Settle, validate, log and save; returns the step at which that was."""
        self.beat.phase(Phase.SAVE)
        self._regroup(self._meet())
        self.step = self.engine.queue.limit
        self.engine.method.settle(self.among)
        self.engine.parameters.gather()
        every, stopped = self.config.train.validate_every, self.step < self.next_meeting
        self.validation_loss = None
        if (every and self.step % every == 0) or self.step == self.config.train.steps:
            self.validation_loss = self.engine.evaluate_among(self.samples["validation"], self.among)
            self.display.validation(self.validation_loss, self.step)
        if self.first:
            self._log_until(self.step)
        every = self.config.checkpoint.every
        if stopped or self.step == self.config.train.steps or (every and self.step % every == 0):
            self.states.save(self.step, block=True)
        self._meet()
        return self.step

    def _regroup(self, living: list[int]) -> None:
        """Communicate among those that live, whoever else dies meanwhile."""
        size = 1 if self.among is None else self.among.size()
        while len(living) < size:
            groups = self._groups(living)
            met, living = living, self._meet()
            if met != living:  # whoever has made the groups lets go of them, and torch names the next ones alike on all
                for group in groups:
                    dist.destroy_process_group(group)
                continue
            self.display.note(f"{size - len(living)} of {size} replicas died; the others go on")
            self.engine.stands_for = stands_for(self.engine.replica, living, self.engine.replicas)
            self.among = Group(groups[0])
            self.states.regroup(groups[1])
            return

    def _groups(self, living: list[int]) -> list[dist.ProcessGroup]:
        """For training, and for keeping states; not all where one of those that live ends before it has joined.

        Who waits for it would wait for as long as the timeout, and so does it beside this thread.
        """
        made: list[dist.ProcessGroup] = []
        failed: list[RuntimeError] = []

        def make() -> None:
            try:
                for _ in range(2):
                    made.append(dist.new_group(living, backend="gloo", use_local_synchronization=True))
            except RuntimeError as error:
                failed.append(error)

        thread = Thread(target=make, daemon=True)
        thread.start()
        while thread.is_alive() and all(self.engine.window.alive(replica) for replica in living):
            thread.join(0.01)
        thread.join(JOIN_SECONDS)
        if failed and all(self.engine.window.alive(replica, now=True) for replica in living):
            raise failed[0]
        return made

    def _tell_times(self) -> None:
        """The table of who waited, and how stale gradients were."""
        times: dict[int, RankTimes | None] = {}
        for replica, row in enumerate(self.engine.board.tolist()):
            mine = dict(zip(COLUMNS, row, strict=True))
            here = self.engine.window.alive(replica)
            times[replica] = RankTimes(int(mine["steps"]), mine["computing"], mine["total"]) if here else None
        self.display.console.print(who_waits(times))
        self._tell_survivors(replica for replica, there in times.items() if there)
        updates, stale = (float(self.engine.board[:, i].sum()) for i in (6, 7))
        if updates:
            most = int(self.engine.board[:, 8].max())
            self.display.note(f"staleness: {stale / updates:.2f} updates on average, {most} at most")
