"""Saving while training goes on: stage in memory, write in the background, commit by rename, keep the newest."""

from __future__ import annotations

import json
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import IO, Any

from shoal.base.files import try_to_write
from shoal.engine.checkpoint import storage
from shoal.engine.checkpoint.load import verify
from shoal.engine.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_SUM,
    CheckpointError,
    RankPart,
    list_checkpoints,
    merge,
    newest,
    write_manifest,
)
from shoal.engine.checkpoint.storage import Place
from shoal.engine.checkpoint.write import Staged, Staging, State, write_part
from shoal.engine.collectives.json_collectives import Group, broadcast, gather, rank_of

LOCK = ".lock"
SEEN_SECONDS = 10.0  # within which a shared folder shows rank 0 what another host has written
UNCOMMITTED = re.compile(r"\.staging-(removed-)?step-\d{8,}-[0-9a-f]{8}")


class Checkpointer:
    """Saves the checkpoints of one run into one folder, which all ranks must see (a shared file system, or one host).

    At most one save is in flight: the next one, `wait` and `close` first wait for it. What went wrong in the
    background is raised there, on every rank, with the step's name. All methods must be called on all ranks alike.

    Args:
        folder: holds ``step-00000100`` and so on; created if need be.
        group: a gloo process group of all ranks, used for nothing else (a collective of the training on the same
            group would meet one of the background's); None in a single process.
        keep: newest checkpoints kept.
        asynchronous: return from `save` as soon as the state is copied to memory.
        fresh: the run begins anew, so a folder that holds checkpoints is another run's, and refused.
        report: told, on rank 0, of what deserves a line: a step saved twice, an older folder set aside.

    Raises:
        CheckpointError: another process saves into the folder, or it holds another run's checkpoints.
    """

    def __init__(
        self,
        folder: Place,
        *,
        group: Group,
        keep: int,
        asynchronous: bool,
        fresh: bool = False,
        report: Callable[[str], None] = print,
    ) -> None:
        if keep < 1:
            raise CheckpointError(f"checkpoint.keep = {keep}: at least 1 must be kept.")
        self._folder, self._group, self._keep, self._asynchronous = folder, group, keep, asynchronous
        self._renames = storage.renames(folder)
        self._report = report
        self._rank = rank_of(group)
        self._lock: IO[str] | None = None
        opened = self._attempt(lambda: self._open(fresh)) if self._rank == 0 else None
        self._nonce = _result(broadcast(opened, group))
        self._staging = Staging()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[tuple[Place, str]] | None = None

    def save(self, step: int, state: State, extra: dict[str, Any], *, block: bool = False) -> float:
        """Save a state; returns the seconds for which the caller was held up.

        Args:
            step: optimizer steps done.
            state: this rank's pieces; tensors may change as soon as this returns.
            extra: what else is needed to resume, as JSON values (rank 0's is stored); ``extra["model"]`` is what
                `load` compares with the model of the run that resumes.
            block: return only when the checkpoint is committed.

        Raises:
            CheckpointError: the previous save failed; or this one, where it is waited for.
        """
        begin = time.perf_counter()
        self.wait()
        staged = self._attempt(lambda: (self._staging.copy(state), json.dumps(extra)))
        self._pending = self._executor.submit(self._write, step, staged)
        if block or not self._asynchronous:
            self.wait()
        return time.perf_counter() - begin

    def set_aside(self, after: int) -> None:
        """Rename the checkpoints of later steps, so that no run goes on from them; they are kept."""
        self.wait()
        if self._rank == 0:
            for step, path in list_checkpoints(self._folder):
                if step > after:
                    self._report(f"{path.name} is not to be gone on from: it is kept as {self._put_aside(path).name}")
        gather(None, self._group)

    def regroup(self, group: Group) -> None:
        """Save with the ranks of this group from now on: others have died. No save may be in flight."""
        self._group = group

    @property
    def in_flight(self) -> bool:
        """Whether this rank still works on a save in the background."""
        return self._pending is not None and not self._pending.done()

    def wait(self) -> Place | None:
        """Wait for the save in flight; returns its committed folder (None if there was none).

        Raises:
            CheckpointError: it failed.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        path, note = pending.result()
        if note and self._rank == 0:
            self._report(note)
        return path

    def close(self) -> None:
        """Wait for the save in flight, then let another run use the folder.

        Raises:
            CheckpointError: the save failed.
        """
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            if self._lock is not None:
                self._lock.close()

    # ---- in the background -------------------------------------------------------------------------------------------

    def _write(self, step: int, staged: dict[str, Any]) -> tuple[Place, str]:
        """Runs in the background thread of every rank. A rank that fails still answers, so that none waits for it."""
        folder = self._folder / (f".staging-{_name(step)}-{self._nonce}" if self._renames else _name(step))
        cleared = ""
        if not self._renames:  # the files are written where they stay
            outcome = self._attempt(lambda: self._clear(folder)) if self._rank == 0 else None
            outcome = broadcast(outcome, self._group)
            cleared = self._raised(step, outcome)

        def write() -> tuple[dict, str]:
            data, extra = _result(staged)
            return self._write_part(folder, data), extra

        answers = gather(self._attempt(write), self._group)
        outcome = self._attempt(lambda: self._commit(folder, step, answers)) if self._rank == 0 else None
        outcome = broadcast(outcome, self._group)
        return self._folder / _name(step), self._raised(step, outcome) or cleared

    def _raised(self, step: int, outcome: dict[str, Any]) -> Any:
        if outcome["error"]:
            last = "" if (found := newest(self._folder)) is None else f"\n  The newest checkpoint is {found.path}."
            raise CheckpointError(f"saving step {step} failed: {outcome['error']}{last}")
        return outcome["result"]

    def _clear(self, folder: Place) -> str:
        """Make a place in an object store free for a checkpoint; returns a note for the user."""
        if not storage.exists(folder / MANIFEST):
            storage.remove(folder)  # left by a run that died
            return ""
        return f"{folder} was there already; it is kept as {self._put_aside(folder).name}."

    def _write_part(self, folder: Place, staged: Staged) -> dict:
        storage.make_folder(folder)
        return write_part(folder, self._rank, staged).model_dump(mode="json")

    def _commit(self, folder: Place, step: int, answers: list[dict[str, Any]]) -> str:
        """On rank 0, when all files are on the disk: prove that nothing is missing, then make the checkpoint appear."""
        note, committed = "", False
        try:
            if failed := [f"rank {rank}: {a['error']}" for rank, a in enumerate(answers) if a["error"]]:
                raise CheckpointError("; ".join(failed))
            parts = [RankPart.model_validate(answer["result"][0]) for answer in answers]
            _check_there(folder, parts)
            write_manifest(folder, merge(step, json.loads(answers[0]["result"][1]), parts))
            if storage.renames(folder):
                storage.sync_folder(folder)
                note, dropped = self._make_room(folder, step)
                if not dropped:
                    storage.rename(folder, self._folder / _name(step))
            committed = True
        finally:
            if self._renames or not committed:
                storage.remove(folder)  # of what was renamed, nothing is left there
        self._remove_old(step)
        return note

    def _make_room(self, folder: Place, step: int) -> tuple[str, bool]:
        """What becomes of a checkpoint of the same step: never written over, never deleted.

        Returns a note for the user, and whether the new one is to be dropped.
        """
        old = self._folder / _name(step)
        if not storage.exists(old):
            return "", False
        try:
            verify(old)
            same = storage.read(old / MANIFEST_SUM) == storage.read(folder / MANIFEST_SUM)
        except CheckpointError:
            same = False
        if same:
            return f"{old} was there already, intact and equal bit for bit; it stays.", True
        aside = self._put_aside(old)
        return f"{old} was there already, with other content or damaged; it is kept as {aside.name}.", False

    def _put_aside(self, path: Place) -> Place:
        aside = path.with_name(f"set-aside-{path.name}-{secrets.token_hex(4)}")
        storage.rename(path, aside)
        return aside

    def _remove_old(self, step: int) -> None:
        """Delete all but the newest. Those of later steps are another course of the run, which this one left."""
        for _, path in [c for c in list_checkpoints(self._folder) if c.step <= step][: -self._keep]:
            # Renamed first: a checkpoint that is half deleted must not look like one.
            going = self._folder / f".staging-removed-{path.name}-{self._nonce}" if self._renames else path
            if self._renames:
                storage.rename(path, going)
            storage.remove(going)

    # ---- helpers -----------------------------------------------------------------------------------------------------

    def _open(self, fresh: bool) -> str:
        check_folder(self._folder, fresh=fresh)
        try:
            storage.make_folder(self._folder)
            self._lock = storage.lock(self._folder / LOCK)
        except OSError as error:
            raise _unwritable(self._folder, error) from None
        if self._lock is None:
            raise _in_use(self._folder)
        for name in filter(UNCOMMITTED.fullmatch, storage.names(self._folder)):  # left by a run that died
            storage.remove(self._folder / name)
        return secrets.token_hex(4)

    @staticmethod
    def _attempt(action: Callable[[], Any]) -> dict[str, Any]:
        """The result of an action or its error, as a value that can be told to other ranks."""
        try:
            return {"result": action(), "error": ""}
        except CheckpointError as error:
            return {"result": None, "error": str(error)}
        except Exception as error:
            return {"result": None, "error": f"{type(error).__name__}: {error}"}


def check_folder(folder: Place, *, fresh: bool) -> None:
    """Refuse a folder that this process could not save checkpoints into; nothing is made in it.

    Args:
        fresh: as of `Checkpointer`.

    Raises:
        CheckpointError: it cannot be written, another process saves into it, or it holds another run's checkpoints.
    """
    try:
        if fresh and (found := newest(folder)):
            raise CheckpointError(
                f"a new run would save into {folder}, which already holds {found.path.name} of another run."
                "\n  Resume from it, or give the new run a folder of its own."
            )
        if storage.renames(folder):
            try_to_write(folder)
            if storage.exists(folder / LOCK):
                lock = storage.lock(folder / LOCK)
                if lock is None:
                    raise _in_use(folder)
                lock.close()
    except OSError as error:
        raise _unwritable(folder, error) from None


def _unwritable(folder: Place, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"checkpoints cannot be written into {folder}: {error.strerror or error}."
        "\n  Name another folder by checkpoint.folder, or make this one writable."
    )


def _in_use(folder: Place) -> CheckpointError:
    return CheckpointError(
        f"another process saves checkpoints into {folder} (on {socket.gethostname()} or elsewhere)."
        "\n  Stop it, or give this run a folder of its own."
    )


def _result(outcome: dict[str, Any]) -> Any:
    if outcome["error"]:
        raise CheckpointError(outcome["error"])
    return outcome["result"]


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _check_there(folder: Place, parts: Iterable[RankPart]) -> None:
    """Look for what every rank says that it wrote: ranks may have folders of this name on disks of their own.

    Raises:
        CheckpointError: a file is not there, or has another size.
    """
    deadline = time.monotonic() + SEEN_SECONDS
    for name, told in chain.from_iterable(part.files.items() for part in parts):
        while _size(folder / name) != told.bytes:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{folder / name} is not there as its rank wrote it, so that this is no checkpoint: all ranks must "
                    "see one folder.\n  Give one that they share: --run-folder, or checkpoint.folder."
                )
            time.sleep(0.1)


def _size(path: Place) -> int:
    try:
        return storage.size(path)
    except OSError:
        return -1
