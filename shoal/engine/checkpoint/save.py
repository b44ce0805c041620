"""Save checkpoints during training: copy to memory, write in the background, commit by rename, keep the newest."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

import torch

from shoal.base.addresses import AnyPath
from shoal.base.files import try_to_write
from shoal.engine.checkpoint import storage
from shoal.engine.checkpoint.background import BackgroundSave
from shoal.engine.checkpoint.load import verify
from shoal.engine.checkpoint.manifest import (
    ASIDE,
    MANIFEST,
    MANIFEST_SUM,
    UNCOMMITTED,
    CheckpointError,
    RankPart,
    list_checkpoints,
    list_interrupted,
    merge,
    newest,
    write_manifest,
)
from shoal.engine.checkpoint.write import SavePlan, State, plan_save, write_part
from shoal.engine.collectives.json_collectives import HostGroup, broadcast, gather, get_rank
from shoal.engine.streams import Mark, SideStream, host_zeros

LOCK = ".lock"
SEEN_SECONDS = 10.0  # maximum delay until rank 0 sees another host's files in a shared folder
ABANDON_SECONDS = 1.0  # for a save in flight after the loss of a rank, whose steps would have to be repeated
_left: list[torch.Tensor] = []  # staging memory that this process has abandoned, for its next checkpointer


class Checkpointer:
    """Saver of one run's checkpoints in one folder, which all ranks must see (a shared file system, or one host).

    At most one save is in flight: the next one, `wait` and `close` first wait for it. They also raise background
    errors, on every rank, with the step. All methods must be called on all ranks.

    Args:
        folder: parent of ``step-00000100`` and so on; created if needed.
        group: a gloo process group of all ranks with no other use (its collectives in the background must not mix with
            others); None in a single process.
        asynchronous: return from `save` as soon as the state is copied to memory.
        fresh: the run starts from the beginning; a folder with checkpoints belongs to another run and is rejected.
        report: called on rank 0 with messages for the user: a step saved twice, an older folder set aside.
        saved: called on rank 0 with each step and its committed folder, when a save is waited for.

    Raises:
        CheckpointError: another process saves into the folder, or it holds another run's checkpoints.
    """

    def __init__(
        self,
        folder: AnyPath,
        *,
        group: HostGroup,
        keep: int,
        asynchronous: bool,
        fresh: bool = False,
        report: Callable[[str], None] = print,
        saved: Callable[[int, AnyPath], object] = lambda step, folder: None,
    ) -> None:
        if keep < 1:
            raise CheckpointError(f"checkpoint.keep = {keep}: at least 1 must be kept.")
        self._folder, self._group, self._keep, self._asynchronous = folder, group, keep, asynchronous
        self._renames = isinstance(folder, Path)
        self._report, self._saved = report, saved
        self._rank = get_rank(group)
        self._lock: IO[str] | None = None
        self._nonce = self._on_first_rank(lambda: self._open(fresh))
        # Reused for the copies of the pieces that this rank saves.
        self._memory = _left.pop() if _left else torch.empty(0, dtype=torch.uint8)
        self.copied = Mark()  # when the last save has copied the state, which may change only then
        self._pending: BackgroundSave[tuple[AnyPath, str]] | None = None

    def save(self, step: int, state: State, extra: dict[str, Any], *, block: bool = False) -> float:
        """Save a state; return the seconds for which the caller was blocked.

        Args:
            state: this rank's pieces; tensors may change after this returns, on CUDA by work that waits for `copied`.
            extra: other values needed to resume, as JSON (rank 0's are stored); `load` compares ``extra["model"]``
                with the model of the resuming run.
            block: return only when the checkpoint is committed.

        Raises:
            CheckpointError: the previous save failed; or this one, if it is waited for.
        """
        begin = time.perf_counter()
        self.wait()
        staged = self._attempt(lambda: (*self._copy(state), json.dumps(extra)))
        self._pending = BackgroundSave(self._write, "checkpoint", True, step, staged)
        if block or not self._asynchronous:
            self.wait()
        return time.perf_counter() - begin

    def prepare(self, state: State) -> None:
        """Allocate the staging memory of a state now rather than in its first save; with CUDA, page-locked."""
        self._reserve(plan_save(state))

    def _reserve(self, plan: SavePlan) -> torch.Tensor:
        if self._memory.numel() < plan.size:
            self._memory = host_zeros(plan.size, torch.uint8, plan.device, "checkpoints in preparation")
        return self._memory[: plan.size]

    def _copy(self, state: State) -> tuple[SavePlan, torch.Tensor, Mark]:
        """Start copying the state on a side stream."""
        self.copied = Mark()
        plan = plan_save(state)
        staged = self._reserve(plan)
        self.copied = SideStream(plan.device).run(partial(plan.copy, staged))
        return plan, staged, self.copied

    def quarantine(self, after: int) -> None:
        """Rename the checkpoints of later steps, so that no run resumes from them; they are kept.

        Raises:
            CheckpointError: on every rank: one could not be renamed.
        """
        self.wait()

        def rename() -> None:
            for step, path in list_checkpoints(self._folder):
                if step > after:
                    aside = self._set_aside(path)
                    self._report(f"quarantined {path.name} as {aside.name}; it will not be used to resume")

        self._on_first_rank(rename, f"checkpoints after step {after} are not to be used, but were not renamed: ")

    def regroup(self, group: HostGroup) -> None:
        """Save with the ranks of this group from now on; the others have exited. No save may be in flight."""
        self._group = group

    @property
    def in_flight(self) -> bool:
        """Whether this rank is still saving in the background."""
        return self._pending is not None and not self._pending.done

    def wait(self) -> AnyPath | None:
        """Wait for the save in flight; return its committed folder (None if no save was in flight).

        Raises:
            CheckpointError: it failed.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        path, note = pending.result()
        if note and self._rank == 0:
            self._report(note)
        if self._rank == 0:
            self._saved(int(path.name.removeprefix("step-")), path)
        return path

    def close(self) -> None:
        """Wait for the save in flight, then release the folder for another run.

        Raises:
            CheckpointError: the save failed.
        """
        try:
            self.wait()
        finally:
            self._release()

    def abandon(self, *, reuse: bool = False, seconds: float = ABANDON_SECONDS) -> None:
        """Release the folder without the other ranks, one of which was lost.

        Args:
            reuse: give the staging memory to this process's next checkpointer: to page-lock it again takes seconds.
            seconds: in which a save in flight is committed or fails. After them it is left uncommitted, with its
                staging memory; the next checkpointer removes its files.
        """
        ended = self._pending is None or self._pending.leave(seconds)
        self._release()
        _left[:] = [self._memory] if reuse and ended else []

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()

    # ---- in the background -------------------------------------------------------------------------------------------

    def _write(self, save: BackgroundSave[Any], step: int, staged: dict[str, Any]) -> tuple[AnyPath, str]:
        """Write this rank's part in the background thread; a rank that fails still answers, so that no other rank
        hangs."""
        folder = self._folder / (f".staging-{_name(step)}-{self._nonce}" if self._renames else _name(step))
        failure, cleared = f"saving step {step} failed: ", ""
        if not self._renames:  # files are written at their final place
            cleared = self._on_first_rank(lambda: self._clear(folder), failure, save)

        def write() -> tuple[dict, str]:
            plan, data, copied, extra = _result(staged)
            copied.synchronize()
            plan.sources.clear()  # so that the write does not keep the state alive
            folder.mkdir(parents=True, exist_ok=True)
            return write_part(folder, self._rank, plan, data).model_dump(mode="json"), extra

        # In an object store, a write could still change the files of a later save of this step.
        with save.leavable() if self._renames else nullcontext():
            written = self._attempt(write)
        with save.leavable():
            answers = gather(written, self._group)
        note = self._on_first_rank(lambda: self._commit(folder, step, answers), failure, save)
        return self._folder / _name(step), note or cleared

    def _on_first_rank(
        self, action: Callable[[], Any], failure: str = "", save: BackgroundSave[Any] | None = None
    ) -> Any:
        """Run an action on rank 0; return its result, or raise its error, on every rank."""
        outcome = self._attempt(action) if self._rank == 0 else {}
        if failure and outcome.get("error"):
            found = self._attempt(lambda: newest(self._folder))["result"]  # unknown if the disk is gone
            last = f"\n  The newest checkpoint is {found.path}." if found else ""
            outcome["error"] = failure + outcome["error"] + last
        with save.leavable() if save else nullcontext():
            outcome = broadcast(outcome, self._group)
        return _result(outcome)

    def _clear(self, folder: AnyPath) -> str:
        """Clear the folder of a new checkpoint in an object store; return a note for the user."""
        if not storage.exists(folder / MANIFEST):
            storage.remove(folder)  # left by a run that was killed
            return ""
        return f"{folder} existed already; it is kept as {self._set_aside(folder).name}."

    def _commit(self, folder: AnyPath, step: int, answers: list[dict[str, Any]]) -> str:
        """Check on rank 0 that all files are complete, then commit the checkpoint."""
        note = ""
        try:
            errors = [answer["error"] for answer in answers]
            if failed := Counter(filter(None, errors)):
                raise CheckpointError("; ".join(
                    f"rank {errors.index(each)}{f' and {n - 1} more' * (n > 1)}: {each}" for each, n in failed.items()
                ))
            parts = [RankPart.model_validate(answer["result"][0]) for answer in answers]
            _check_files(folder, parts)
            write_manifest(folder, merge(step, json.loads(answers[0]["result"][1]), parts))
            if isinstance(folder, Path):
                storage.sync(folder)
                again = self._hold()
                note, dropped = self._set_old_aside(folder, step)
                note = again or note
                if not dropped:
                    storage.rename(folder, self._folder / _name(step))
        except BaseException:
            storage.remove(folder)
            raise
        self._remove_old(step)
        if self._renames:
            self._remove_uncommitted()  # of saves that failed on a disk that was full or away
        return note

    def _set_old_aside(self, folder: AnyPath, step: int) -> tuple[str, bool]:
        """Move an existing checkpoint of the same step aside; it is never overwritten or deleted.

        Returns a note for the user, and whether the new checkpoint should be discarded instead.
        """
        old = self._folder / _name(step)
        if not storage.exists(old):
            return "", False
        try:
            verify(old)
            same = len({storage.read(each / MANIFEST_SUM, 1024) for each in (old, folder)}) == 1
        except CheckpointError:
            same = False
        if same:
            return f"{old} existed already, intact and bit-identical; it stays.", True
        aside = self._set_aside(old)
        return f"{old} existed already, damaged or with other content; it is kept as {aside.name}.", False

    def _set_aside(self, path: AnyPath) -> AnyPath:
        aside = path.with_name(f"{ASIDE}{path.name}-{secrets.token_hex(4)}")
        storage.rename(path, aside)
        return aside

    def _remove_old(self, step: int) -> None:
        """Delete all but the newest checkpoints. Later steps belong to an abandoned course of the run and are kept."""
        for _, path in [c for c in list_checkpoints(self._folder) if c.step <= step][: -self._keep]:
            # Rename first: a partially deleted checkpoint must not look complete.
            going = self._folder / f".staging-removed-{path.name}-{self._nonce}" if self._renames else path
            if self._renames:
                storage.rename(path, going)
            storage.remove(going)

    def _remove_uncommitted(self) -> None:
        for name in filter(UNCOMMITTED.fullmatch, storage.list_names(self._folder)):
            storage.remove(self._folder / name)

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _open(self, fresh: bool) -> str:
        if fresh:
            check_folder(self._folder, fresh=True)
        try:
            self._hold()
            for staged, path in () if fresh else list_interrupted(self._folder):
                storage.rename(staged, path)
                self._report(f"{path} was complete when its save was killed; it is committed now")
            self._remove_uncommitted()  # left by a killed run
        except UnwritableFolder as error:
            if fresh:
                raise
            self._report(str(error))  # the run can continue from memory, and the disk may return
        return secrets.token_hex(4)

    def _hold(self) -> str:
        """Lock the folder, if that was not possible before or its disk has gone; return a note for the user."""
        if self._lock and storage.exists(self._folder / LOCK):
            return ""
        again = self._lock is not None
        self._release()
        self._lock = _lock_folder(self._folder)
        return f"{self._folder} was gone and is made again: is its disk still mounted?" if again else ""

    @staticmethod
    def _attempt(action: Callable[[], Any]) -> dict[str, Any]:
        """Return the result of an action or its error, in a form that other ranks can receive."""
        try:
            return {"result": action(), "error": ""}
        except CheckpointError as error:
            return {"result": None, "error": str(error)}
        except Exception as error:
            return {"result": None, "error": f"{type(error).__name__}: {error}"}


def check_folder(folder: AnyPath, *, fresh: bool) -> None:
    """Reject a folder that this process cannot save checkpoints into; nothing is created in it.

    Raises:
        CheckpointError: it cannot be written, another process saves into it, or it holds another run's checkpoints.
    """
    try:
        if fresh and (held := [path for _, path in (*list_interrupted(folder), *list_checkpoints(folder))]):
            raise CheckpointError(
                f"a new run would save into {folder}, which already holds {held[-1].name} of another run."
                "\n  Resume from it, or give the new run a folder of its own."
            )
        if isinstance(folder, Path):
            try_to_write(folder)
            if storage.exists(folder / LOCK):
                _lock_folder(folder).close()
    except OSError as error:
        raise _unwritable(folder, error) from None


def _lock_folder(folder: AnyPath) -> IO[Any]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = storage.lock(folder / LOCK)
    except OSError as error:
        raise _unwritable(folder, error) from None
    if lock is None:
        raise CheckpointError(
            f"another process saves checkpoints into {folder} (on {socket.gethostname()} or elsewhere)."
            "\n  Stop it, or give this run a folder of its own."
        )
    return lock


class UnwritableFolder(CheckpointError):
    """Error for a folder of checkpoints that the system does not let this process write."""


def _unwritable(folder: AnyPath, error: OSError) -> UnwritableFolder:
    return UnwritableFolder(
        f"checkpoints cannot be written into {folder}: {error.strerror or error}."
        "\n  Name another folder by checkpoint.folder, or make this one writable."
    )


def _result(outcome: dict[str, Any]) -> Any:
    if outcome["error"]:
        raise CheckpointError(outcome["error"])
    return outcome["result"]


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _check_files(folder: AnyPath, parts: Iterable[RankPart]) -> None:
    """Check that the files of every rank exist: ranks may have separate local folders of this name, and a disk may go.

    Raises:
        CheckpointError: a file is missing or cannot be read.
    """
    deadline = time.monotonic() + SEEN_SECONDS
    for name, written in chain.from_iterable(part.files.items() for part in parts):
        while _size(folder / name) != written.bytes:
            if isinstance(folder, Path) and not folder.is_dir():
                raise CheckpointError(
                    f"{folder} is gone: its disk was removed, or the folder was deleted.\n  Restore it."
                )
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank 0 does not see {folder / name} as its rank wrote it: all ranks must save into one folder."
                    "\n  Give one that they share: --run-folder, or checkpoint.folder."
                )
            time.sleep(0.1)


def _size(path: AnyPath) -> int:
    try:
        return storage.size(path)
    except FileNotFoundError:
        return -1
