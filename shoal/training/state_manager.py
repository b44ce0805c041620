"""Save, restore and invalidate run states on disk and in host memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shoal.base.errors import UsageError
from shoal.engine.checkpoint import Checkpointer, CheckpointError
from shoal.engine.optim.sophia import Sophia
from shoal.engine.streams import Mark
from shoal.training.resilience.host_memory_dir import release, run_dir
from shoal.training.resilience.memory_checkpoint import InMemoryCheckpointer, RankTopology
from shoal.training.resilience.owned_folders import is_private
from shoal.training.resilience.restore import Restored, restore
from shoal.training.resilience.spikes import Skips
from shoal.training.run_folder import check_steps_left, get_checkpoint_folder
from shoal.training.step.engine import Engine

RETRY_SECONDS = (1.0, 4.0, 10.0)
"""Pauses between tries of the last save."""


class StateManager:
    """Manager of this rank's part of the saved run states. All ranks call the same methods in the same order.

    Args:
        fresh: whether this is a new run, without any state.
        report: callback for notes to the user.

    Attributes:
        group: separate process group, as saves run concurrently with the collectives of training.
        beside: callback that returns further values to save with the tensors.
    """

    def __init__(self, engine: Engine, folder: Path, *, fresh: bool, report: Callable[[str], None]):
        self.config, self.engine, self.folder, self.report = engine.config, engine, folder, report
        self.data = engine.samples.fingerprint
        self.beside: Callable[[], dict[str, Any]] = dict
        self.group = self._new_group()
        self.places = RankTopology.collect(self.group, self.config.failover.node_ranks)
        self.disk = Checkpointer(
            get_checkpoint_folder(self.config, folder),
            group=self.group,
            keep=self.config.checkpoint.keep,
            asynchronous=self.config.checkpoint.asynchronous,
            fresh=fresh,
            report=report,
            saved=engine.saved,
        )
        self.memory: InMemoryCheckpointer | None = None
        self._stalled, self._saved = 0.0, -1
        if fresh:
            self._begin(None, fresh=True)

    # ---- save ----------------------------------------------------------------------------------------------------

    def save(self, step: int, *, block: bool) -> None:
        """Save the state after ``step`` steps to disk; if that save was already started, only wait for it.

        A failed save is reported, and the next one replaces it.
        """
        try:
            self._save(step, block=block)
        except CheckpointError as error:
            self.report(f"{error}\n  The run continues.")

    def save_last(self, step: int) -> None:
        """Save the state after ``step`` steps to disk before the run ends; try several times.

        Raises:
            CheckpointError: all tries failed.
        """
        for pause in RETRY_SECONDS:
            try:
                self._save(step, block=True)
                return
            except CheckpointError as error:
                self.report(f"{error}\n  Next try in {pause:g} s.")
                time.sleep(pause)
        self._save(step, block=True)

    def _save(self, step: int, *, block: bool) -> None:
        self._wait_for_disk()
        if self._saved == step:
            return
        self._saved = -1
        self._stalled += self.disk.save(step, self.engine.state(), self._extra(step), block=block)
        self._protect(self.disk.copied)
        self._saved = step

    def remember(self, step: int) -> None:
        """Save the state after ``step`` steps in host memory, if enabled."""
        if self.memory:
            self._stalled += self.memory.save(step, self.engine.state(), self._extra(step))
            self._protect(self.memory.copied)

    def _protect(self, copied: Mark) -> None:
        """Make the next change of the state wait until a save has copied it.

        The optimizer makes the first change of a step. Relaxed data parallelism has states that change before.
        """
        if self.config.parallel.sync == "all-reduce":
            self.engine.optimizer.reads.append(copied)
        else:
            copied.wait()

    def wait(self) -> None:
        """Wait until all saves are complete."""
        self._wait_for_disk()
        if self.memory:
            self.memory.wait()

    def end_saved(self) -> None:
        """End a save to disk that is complete."""
        if not self.disk.in_flight:
            self._wait_for_disk()

    def _wait_for_disk(self) -> None:
        """Wait for the save in flight; report its failure."""
        try:
            self.disk.wait()
        except CheckpointError as error:
            self._saved = -1
            self.report(f"{error}\n  The run continues.")

    def take_stalled(self) -> float:
        """Return the seconds for which saving stalled the training since the last call."""
        stalled, self._stalled = self._stalled, 0.0
        return stalled

    def close(self) -> None:
        """Wait for pending saves, stop saving, and free the memory of states."""
        self.disk.close()
        if self.memory:
            self.memory.close()
        elif self.config.failover.memory_every and is_private(home := run_dir(self.folder, self.config.failover)):
            release(home)  # states of an earlier attempt, after which there was too little memory

    def abandon(self) -> None:
        """Stop saving without the other ranks, one of which was lost."""
        again = self.config.failover.shrink == "never"  # else this process may wait long, without a rank
        if self.memory:
            self.memory.abandon(reuse=again)
        if self.memory and self.engine.mesh.device.type == "cpu":
            self.disk.abandon(reuse=again, seconds=0.0)  # without it, at most `memory_every` steps are lost
        else:  # without its memory, the next save would have to lock pages
            self.disk.abandon(reuse=again)

    # ---- restore -------------------------------------------------------------------------------------------------

    def resume(self, *, restarted: bool) -> Restored | None:
        """Load the newest good state; return None if none was saved, or if a restart finds none on disk or in memory.

        Raises:
            UsageError: no checkpoint can be read, all steps are done, or the data has changed.
        """
        found, refused = self.restore()
        if found is None and not restarted and not refused:
            self.report("the run ended before its first checkpoint: it starts with its first step again")
        saved = any(line.startswith("checkpoint") for line in refused)  # the disk may be back soon
        if found is None and refused and (saved or not restarted):
            lines = [f"--resume {self.folder}: it holds no good checkpoint.", *refused]
            raise CheckpointError("\n  ".join([*lines, "Put them back, or start a new run."]))
        if found is not None:
            if not restarted:  # a restart may follow a failure after the last step
                check_steps_left(self.folder, found.step, self.config.train.steps)
            if found.extra["data"] != self.data:
                raise UsageError(
                    f"--resume {self.folder}: the text or its tokenizer has changed since the checkpoint was saved "
                    f"(corpus {found.extra['data']}, now {self.data})."
                    "\n  Put the old files back, or start a new run."
                )
            self.engine.skip(Skips(found.extra.get("skipped", ())))
        self._begin(found)
        return found

    def restore(self, before: int | None = None) -> tuple[Restored | None, list[str]]:
        """Load the newest good state, up to step ``before``; return it with the reasons why newer ones were refused."""
        found, refused = restore(
            get_checkpoint_folder(self.config, self.folder),
            run_dir(self.folder, self.config.failover),
            self.engine.state(),
            group=self.group,
            model=self.engine.shape.model_dump(mode="json"),
            before=before,
            places=self.places,
        )
        for line in refused:
            self.report(line)
        if found is not None:
            if self.engine.loss_scale:
                self.engine.loss_scale.restore(found.extra.get("loss_scale"))
            self.engine.restored(found.extra.get("updates", found.step))
            if isinstance(self.engine.optimizer, Sophia):
                self.engine.optimizer.estimated = found.extra.get("estimated", False)
            self._saved = -1
            self._report_changed_formats(found)
        return found, refused

    def _report_changed_formats(self, found: Restored) -> None:
        now = self.config.train.precision
        if (was := found.extra.get("precision", now)) != now:
            self.report(f"the state was saved in {was} and continues in {now}: values of another dtype are rounded")
        history = self.engine.float8 and self.engine.float8.history
        if history and not all(history.known):
            new = history.known.count(False)
            self.report(
                f"the amax history of {new} of {len(history.known)} layers starts empty: the checkpoint has none of "
                "this length"
            )

    def invalidate(self, after: int) -> None:
        """Invalidate states newer than step ``after``: no restart uses them."""
        self.disk.quarantine(after)
        if self.memory:
            self.memory.forget(after)

    def regroup(self, group: dist.ProcessGroup) -> None:
        """Save states with these ranks only from now on. Collective among them."""
        self.group = group
        self.disk.regroup(group)

    def _begin(self, restored: Restored | None, *, fresh: bool = False) -> None:
        """Start saving states. Only a new run is refused for lack of memory."""
        self._stalled = 0.0
        self._saved = restored.step if restored and restored.save is None else -1  # newest step on disk
        if self.config.checkpoint.every and self.engine.mesh.device.type == "cuda":  # page-locking takes seconds
            self.disk.prepare(self.engine.state())
        if not self.config.failover.memory_every:
            return
        try:
            self.memory = InMemoryCheckpointer(
                run_dir(self.folder, self.config.failover),
                self.folder,
                group=self._new_group(),
                places=self.places,
                state=self.engine.state(),
                keep=restored.save if restored else None,
                device=self.engine.mesh.device,
                report=self.report,
            )
        except UsageError as error:
            if fresh:
                raise
            self.report(f"no states are saved in memory until the next restart: {error}")

    def _extra(self, step: int) -> dict[str, Any]:
        extra = {
            "model": self.engine.shape.model_dump(mode="json"),
            "step": step,
            "updates": self.engine.optimizer.count,
            "optimizer": self.config.optimizer.name,
            "precision": self.config.train.precision,
            "layout": self.config.parallel.describe(),
            "data": self.data,
        }
        if self.engine.loss_scale:
            extra["loss_scale"] = self.engine.loss_scale.state()
        if isinstance(self.engine.optimizer, Sophia):  # a step may have failed between estimate and update
            extra["estimated"] = self.engine.optimizer.estimated
        if self.engine.skips.ranges:
            extra["skipped"] = self.engine.skips.ranges
        return extra | self.beside()

    def _new_group(self) -> dist.ProcessGroup | None:
        return dist.new_group(backend="gloo") if self.engine.mesh.layout.world_size > 1 else None
