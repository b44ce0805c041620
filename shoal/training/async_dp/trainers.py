"""Training loop of unsynchronised replicas (`AsyncEngine`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from threading import Thread

import torch
import torch.distributed as dist

from shoal.engine.collectives.group import Group
from shoal.engine.device import peak_memory
from shoal.spec.config import RunConfig
from shoal.spec.sync_methods import UNSYNCHRONISED
from shoal.training.async_dp.engines import COLUMNS, AsyncEngine
from shoal.training.fault_knobs import RankTimes, times_table
from shoal.training.resilience.heartbeat import Phase
from shoal.training.step.optimizer_step import StepResult
from shoal.training.trainer import Trainer

JOIN_SECONDS = 0.5  # joining groups after a rank's death: grace period for the other ranks


def trainer_class(config: RunConfig) -> type[Trainer]:
    return AsyncTrainer if config.parallel.sync in UNSYNCHRONISED else Trainer


class AsyncTrainer(Trainer):
    """Training loop that runs queued steps until the queue is empty, then meets the other replicas to validate or save.

    Between these meetings the first rank reads and logs the other replicas' reports without waiting. After the death of
    a rank, the living ranks form a new group at the next meeting and continue; they cannot continue without the first
    rank, which decides which ranks live.
    """

    engine: AsyncEngine

    def run(self) -> bool:
        self.stop.listen()
        self._show_banner()
        self.peak = self.engine.sum_peak_flops(self.local_ranks)
        self.meetings, self.rate = 0, 0.0
        self.started = self.logged_step = self.step
        self.logged, self.logged_at = torch.zeros_like(self.engine.board), 0.0
        stopped = False
        with self.display:
            while self.step < self.config.train.steps and not stopped:
                next_meeting = self._start_from(self.step)
                self._free_steps()
                self._meeting(next_meeting)
                stopped = self.step < next_meeting
            self.beat.phase(Phase.END)
            self._close()
            self._show_board()
        return False

    def barrier(self) -> None:
        self._meet()

    # ---- alone ---------------------------------------------------------------------------------------------------

    def _start_from(self, step: int) -> int:
        """Start all replicas at a step; return the step of their next meeting."""
        every = (self.config.train.validate_every, self.config.checkpoint.every)
        next_meeting = min([(step // n + 1) * n for n in every if n] + [self.config.train.steps])
        if self.meetings == 0:
            self.engine.method.start(step)
        if self.first:
            self.engine.queue.start(step, next_meeting)
            self.logged_at = time.perf_counter()
        self._meet()
        return next_meeting

    def _free_steps(self) -> None:
        engine, queue = self.engine, self.engine.queue
        assert self.timed is not None, "a relaxed run measures its times"
        while (ticket := queue.take(engine.replica)) is not None:
            if self.stop.count:
                queue.stop()
            engine.replica_offset = ticket.slot - engine.replica  # nonzero only with a common queue
            self.beat.phase(Phase.STEP)
            result = engine.step(ticket.step)
            self.beat.stepped(ticket.step + 1, self.timed.times.total)
            self._report(result, self.timed.times)
            if self.first:
                self._show_progress(ticket.step + 1, result)

    def _report(self, result: StepResult, times: RankTimes) -> None:
        """Add this replica's results to its row of the board."""
        stale, row = self.engine.method.staleness, self.engine.board[self.engine.replica]
        row += torch.tensor([1, result.loss * result.tokens, result.tokens, result.gradient_norm, 0, 0, 0, 0, 0])
        row[4:] = torch.tensor([times.computing, times.total, stale.updates, stale.total, stale.most])

    def _show_progress(self, own: int, result: StepResult) -> None:
        """Log once the replicas have together done enough steps since the last log; ``own`` are done by this one."""
        every, board, queue = self.config.metrics.log_every, self.engine.board, self.engine.queue
        done = board[self.engine.window.living(), 0]
        shares = int(board[:, 0].sum()) // self.engine.replicas if queue.common else int(done.mean())
        step, self.rate = own if self.engine.method.together else self.started + shares, result.learning_rate
        if step // every > self.logged_step // every and step < queue.limit:
            self._log_until(step)
        self.display.progress(step, self.config.train.steps)

    def _log_until(self, step: int) -> None:
        """Log the totals of the step if all replicas make it together, else the changes of the board."""
        totals = self.engine.method.wait_for_totals(step)
        now, board, replicas = time.perf_counter(), self.engine.board.clone(), self.engine.replicas
        gained = dict(zip(COLUMNS, (board - self.logged).sum(0).tolist(), strict=True))
        seconds = max(now - self.logged_at, 1e-9)
        self.logged, self.logged_at, self.logged_step = board, now, step
        if not gained["steps"]:
            return
        loss = gained["loss"] / gained["tokens"] if gained["tokens"] else None
        loss, norm = totals or (loss, gained["norm"] / gained["steps"])
        per_share = self.config.data.sequence_length * self.config.train.global_batch / replicas
        self._record_metrics(
            step,
            gained["steps"] * per_share / seconds,
            loss=loss,
            learning_rate=self.rate,
            gradient_norm=norm,
            memory_bytes=peak_memory(self.mesh.device),
            seconds_left=(self.config.train.steps - step) * replicas * seconds / gained["steps"],
            staleness=gained["stale"] / gained["updates"] if gained["updates"] else None,
            stalest=int(board[:, COLUMNS.index("stalest")].max()) if gained["updates"] else None,
        )

    # ---- together ------------------------------------------------------------------------------------------------

    def _has_come(self, other: int) -> bool:
        window = self.engine.window
        return window.get(self.engine.arrived + other) >= self.meetings or not window.alive(other)

    def _meet(self) -> list[int]:
        """Wait for all living replicas; return them as observed by the first rank.

        Raises:
            PeerLost: the first rank has exited.
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
            what = f"parallel.sync = '{self.config.parallel.sync}' does not continue without rank 0"
            window.until(lambda: window.get(decided) >= self.meetings, [0], what)
        return [o for o in range(n) if window.get(who) >> o & 1]

    def _meeting(self, planned: int) -> None:
        """Settle the weights, validate, log and save; a stop request makes this earlier than the planned step."""
        self.beat.phase(Phase.SAVE)
        self._regroup(self._meet())
        self.step = self.engine.queue.limit
        self.engine.method.settle(self.engine.living)
        self.engine.parameters.gather()
        self._validate()
        if self.first:
            self._log_until(self.step)
        if self.step < planned or self.step == self.config.train.steps:
            self.states.save_last(self.step)
        elif self._due(self.config.checkpoint.every):
            self.states.save(self.step, block=True)
        self._meet()

    def _regroup(self, living: list[int]) -> None:
        """Restrict communication to the living ranks, also if others die meanwhile."""
        engine = self.engine
        size = 1 if engine.living is None else engine.living.size()
        while len(living) < size:
            groups = self._groups(living)
            met, living = living, self._meet()
            if met != living:  # all ranks destroy the groups they made, so that torch gives the next ones equal names
                for group in groups:
                    dist.destroy_process_group(group)
                continue
            self.display.note(f"{size - len(living)} of {size} replicas died; the others continue")
            engine.represented = find_represented(engine.replica, living, engine.replicas)
            engine.living = Group.from_backend(groups[0])
            self.states.regroup(groups[1])
            return

    def _groups(self, living: list[int]) -> list[dist.ProcessGroup]:
        """Create groups for training and for saving; fewer than two if a rank exits before it has joined.

        Uses a separate thread, as waiting for a rank that has exited takes the full timeout.
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

    def _show_board(self) -> None:
        times: dict[int, RankTimes | None] = {}
        for replica, row in enumerate(self.engine.board.tolist()):
            steps, computing, total = (row[COLUMNS.index(name)] for name in ("steps", "computing", "total"))
            alive = self.engine.window.alive(replica)
            times[replica] = RankTimes(int(steps), computing, total) if alive else None
        self.display.console.print(times_table(times))
        updates, stale = (float(self.engine.board[:, COLUMNS.index(name)].sum()) for name in ("updates", "stale"))
        if updates:
            most = int(self.engine.board[:, COLUMNS.index("stalest")].max())
            self.display.note(f"staleness: {stale / updates:.2f} updates on average, {most} at most")


def find_represented(replica: int, living: Sequence[int], replicas: int) -> list[int]:
    """Return the dead replicas that this living one represents in a checkpoint: those up to the next living replica.

    A checkpoint thus has the states of all replicas, and a resumed run starts with all of them.

    >>> [find_represented(replica, [0, 2, 3], 6) for replica in (0, 2, 3)]
    [[1], [], [4, 5]]
    """
    return [dead for dead in range(replicas) if dead not in living and max(o for o in living if o < dead) == replica]
