"""Starting the ranks of a run on this machine, or joining those that torchrun or SLURM started.

Started plainly, the parent does no training: it starts one fresh interpreter per rank, watches them and forwards a
request to stop. The ranks meet in a file, so nothing listens but gloo or NCCL themselves, on the loopback interface.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist

from shoal.comm.world import die_with_parent, init_world, loopback, pick_device, usable_cores
from shoal.errors import UsageError
from shoal.train.allocator import allocator_environment, tune_allocator

GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL for the peers of a rank that died
POLL_SECONDS = 0.05
TAIL_LINES = 30


# ---- the parent ------------------------------------------------------------------------------------------------


def launch(
    module: str,
    payload: dict[str, Any],
    ranks: int,
    log_folder: Path,
    environment: dict[str, str] | None = None,
    device: str = "cpu",
    survivable: bool = False,
) -> int:
    """Run ``python -m module`` as ``ranks`` processes on this machine, and wait for them.

    Rank 0 writes its output to this terminal; what it writes to stderr, and all that the others write, goes to
    ``log_folder/rank-N.log``. When a rank dies the others are stopped, and the cause, one only, is shown on stderr.
    SIGINT or SIGTERM is passed on once, as SIGTERM, to ask for a clean stop; the second one kills.

    Args:
        module: it calls `become_rank`, and finds ``payload`` by `read_payload`.
        payload: plain values, fit for JSON.
        ranks: processes to start.
        log_folder: made if missing; logs of earlier launches are continued.
        environment: variables that override those of this process and those set here.
        device: the type that every rank computes on: ``cpu`` or ``cuda``.
        survivable: the ranks go on without one that a signal ended, but not without rank 0.

    Returns:
        0 if every rank returned 0; else the exit code of the rank that failed first (2 for a `UsageError`), or
        128 + the signal that ended it.
    """
    log_folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="shoal-launch-") as scratch:
        Path(scratch, "payload.json").write_text(json.dumps(payload))
        return _Crew(log_folder, Path(scratch), device, survivable).run(module, ranks, environment or {})


def rank_environment(rank: int, ranks: int, scratch: Path, device: str) -> dict[str, str]:
    """The variables of one local rank: its place, where the ranks meet, threads and, on the CPU, the allocator."""
    return {
        "OMP_NUM_THREADS": str(_share_of_cores(ranks)),
        "OMP_WAIT_POLICY": "passive",  # threads that spin while they wait take the cores of whatever else runs
        "GLOO_SOCKET_IFNAME": loopback(),
        "NCCL_SOCKET_IFNAME": loopback(),
        **(allocator_environment() if device == "cpu" else {}),
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "SHOAL_SCRATCH": str(scratch),
        "SHOAL_PARENT": str(os.getpid()),
    }


@dataclass(frozen=True)
class _Failure:
    """How one rank ended: the cause of all, or what followed from it."""

    rank: int
    code: int  # as subprocess gives it: negative for a signal
    when: float  # monotonic clock of the machine, where the rank recorded it
    report: str  # the traceback that the rank recorded, or ""

    @property
    def order(self) -> tuple[bool, float]:
        """Smallest for the first cause.

        A rank that only lost a peer fails by an exception, which it records, or by the abort of a communication
        library. Any other end is a cause, even if a peer was faster to record what followed from it.
        """
        return (bool(self.report) or self.code == -signal.SIGABRT, self.when)

    @property
    def how(self) -> str:
        return f"was killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"exited with code {self.code}"


class _Crew:
    """The local ranks of one launch, as their parent sees them."""

    def __init__(self, log_folder: Path, scratch: Path, device: str, survivable: bool = False):
        self.log_folder, self.scratch, self.device, self.survivable = log_folder, scratch, device, survivable
        self.header = f"---- started {time.strftime('%Y-%m-%d %H:%M:%S')} by process {os.getpid()} ----\n"
        self.processes: list[subprocess.Popen] = []
        self.stops = 0  # requests to stop so far

    def run(self, module: str, ranks: int, environment: dict[str, str]) -> int:
        former = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            for rank in range(ranks):
                if self.stops:
                    break
                self._start(module, rank, ranks, environment)
            return self._watch()
        finally:
            self._send(signal.SIGKILL)
            for process in self.processes:
                process.wait()
            if sys.stdout.isatty():
                print("\x1b[?25h", end="", flush=True)  # rank 0's progress bar hid the cursor, if it was killed
            for signum, handler in former.items():
                signal.signal(signum, handler)

    def _start(self, module: str, rank: int, ranks: int, environment: dict[str, str]) -> None:
        with open(self._log(rank), "a") as log:  # what an earlier launch said before it died stays
            log.write(self.header)
            log.flush()
            process = subprocess.Popen(
                [sys.executable, "-m", module],
                env={**rank_environment(rank, ranks, self.scratch, self.device), **environment},
                stdin=subprocess.DEVNULL,
                stdout=None if rank == 0 else log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal reaches the parent alone, which passes it on once
            )
        self.processes.append(process)
        if self.stops:  # the request came while this rank was being started
            process.terminate()

    def _watch(self) -> int:
        ended = self._ended()
        while len(ended) < len(self.processes) and not self._failed():
            time.sleep(POLL_SECONDS)
            ended |= self._ended()
        if not self._failed():
            for rank, process in enumerate(self.processes):
                if process.returncode:
                    print(f"rank {rank} {self._failure(rank).how}; the others went on without it", file=sys.stderr)
            return 0
        ended |= self._ended()  # once more: the cause ended first, but was perhaps looked at just before
        self._send(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while any(process.poll() is None for process in self.processes) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        # A rank that is killed closes its connections before it counts as ended, so that its peers may end first. What
        # ended since by another signal than ours was no doing of ours.
        codes = {rank: process.poll() for rank, process in enumerate(self.processes)}
        ended |= {rank for rank, code in codes.items() if code and code < 0 and code != -signal.SIGTERM}
        self._send(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        failures = [self._failure(rank) for rank, process in enumerate(self.processes) if process.returncode]
        # Those that ended after our signals count only if they had recorded an exception of their own.
        return self._verdict(min((f for f in failures if f.rank in ended or f.report), key=lambda f: f.order))

    def _failed(self) -> bool:
        """Whether a rank has ended in a way that ends the run."""
        return any(
            process.returncode and not (self.survivable and rank and process.returncode < 0 and not self.stops)
            for rank, process in enumerate(self.processes)
        )

    def _ended(self) -> set[int]:
        return {rank for rank, process in enumerate(self.processes) if process.poll() is not None}

    def _failure(self, rank: int) -> _Failure:
        code = self.processes[rank].returncode
        record = _record_path(self.scratch, rank)
        if not record.exists():
            return _Failure(rank, code, float("inf"), "")
        recorded = json.loads(record.read_text())
        return _Failure(rank, code, recorded["when"], recorded["report"])

    def _verdict(self, cause: _Failure) -> int:
        code = cause.code if cause.code > 0 else 128 - cause.code
        if self.stops and cause.code in (-signal.SIGTERM, -signal.SIGKILL):
            return code  # as was asked
        if cause.code == 2 and cause.report:  # a UsageError: its message is all there is to say
            print(cause.report.rstrip(), file=sys.stderr)
            return code
        others = "; the other ranks were stopped" if len(self.processes) > 1 else ""
        log = self._log(cause.rank)
        said = log.read_text(errors="replace").rpartition(self.header)[2]
        report = cause.report or "\n".join(said.splitlines()[-TAIL_LINES:])
        print(f"rank {cause.rank} {cause.how}{others}. Its log: {log}", file=sys.stderr)
        if report.strip():
            print(report.rstrip(), file=sys.stderr)
        return code

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.stops += 1
        self._send(signal.SIGTERM if self.stops == 1 else signal.SIGKILL)

    def _send(self, signum: int) -> None:
        for process in self.processes:
            process.send_signal(signum)  # nothing is sent to one that has ended

    def _log(self, rank: int) -> Path:
        return self.log_folder / f"rank-{rank}.log"


def _record_path(scratch: Path, rank: int) -> Path:
    return scratch / f"failure-{rank}.json"


def _share_of_cores(local_ranks: int) -> int:
    return max(1, usable_cores() // local_ranks)


# ---- the rank --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Membership:
    """This process's place among the ranks of a run."""

    rank: int
    world_size: int
    local_rank: int  # among the ranks of this machine
    local_world_size: int
    how: Literal["local", "torchrun", "slurm"]
    """Who started it: `launch`, torchrun (or whatever sets the same variables), or SLURM's srun."""

    master: tuple[str, int] | None = None
    """Address and port where the ranks meet; None where they meet in a file."""

    def device(self, choice: str) -> torch.device:
        """`pick_device` for this rank."""
        return pick_device(choice, self.local_rank, bound=self.how == "slurm")


def joined() -> Membership | None:
    """Whether this process was started as one rank of a run, and as which; None where it is to start ranks itself.

    Reads the environment alone. One lone SLURM task counts as started plainly.

    Raises:
        UsageError: the variables of torchrun are there in part, or are not numbers.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _from_torchrun()
    # An sbatch script itself also has SLURM_PROCID; only what srun starts has the list of the step's nodes.
    slurm = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
    if all(name in os.environ for name in slurm) and _number("SLURM_NTASKS") > 1:
        return _from_slurm()
    return None


def _from_torchrun() -> Membership:
    local = "SHOAL_SCRATCH" in os.environ
    needed = ["LOCAL_RANK", "LOCAL_WORLD_SIZE"] + ([] if local else ["MASTER_ADDR", "MASTER_PORT"])
    if missing := [name for name in needed if name not in os.environ]:
        raise UsageError(
            f"RANK and WORLD_SIZE are set, as torchrun does, but {', '.join(missing)} are not."
            "\n  Set them too, or unset RANK and WORLD_SIZE to start the ranks on this machine."
        )
    place = [_number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if local:
        return Membership(*place, how="local")
    return Membership(*place, how="torchrun", master=(os.environ["MASTER_ADDR"], _number("MASTER_PORT")))


def _from_slurm() -> Membership:
    tasks_per_node = _expand_counts(os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    # Two steps of one job may run at once; the range is below that of the kernel's own choices.
    port = 20000 + (_number("SLURM_JOB_ID") * 7 + int(os.environ.get("SLURM_STEP_ID", "0"))) % 10000
    return Membership(
        rank=_number("SLURM_PROCID"),
        world_size=_number("SLURM_NTASKS"),
        local_rank=_number("SLURM_LOCALID"),
        local_world_size=tasks_per_node[int(os.environ.get("SLURM_NODEID", "0"))],
        how="slurm",
        master=(_first_host(os.environ["SLURM_STEP_NODELIST"]), port),
    )


def _first_host(nodes: str) -> str:
    """The first name in SLURM's notation: ``gpu[007-009,12],login`` gives ``gpu007``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)[0]
    return re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", first)


def _expand_counts(counts: str) -> list[int]:
    """SLURM's notation of tasks per node: ``2(x3),1`` gives ``[2, 2, 2, 1]``."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(tasks) for tasks, times in parts for _ in range(int(times or 1))]


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise UsageError(f"the environment variable {name} = {os.environ[name]!r} is not a number.") from None


def read_payload() -> dict[str, Any]:
    """What the parent gave to `launch`."""
    return json.loads(Path(os.environ["SHOAL_SCRATCH"], "payload.json").read_text())


def become_rank(device: str = "auto", threads: int = 0, timeout: float = 600.0) -> Membership:
    """Make this process one rank of the world, as `joined` describes it: call it first, and once.

    An exception that nothing catches is from now on recorded for the parent and ends the process at once, without
    waiting for background threads: so leave the process group only on success, that peers fail after the cause.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.
        threads: torch's CPU threads; 0 takes ``OMP_NUM_THREADS``, or else shares the cores between the local ranks.
        timeout: of every collective, in seconds.

    Raises:
        UsageError: not started as a rank, or no such device.
    """
    membership = joined()
    if membership is None:
        raise UsageError("this process was started neither by shoal nor by torchrun or srun.")
    sys.excepthook = _record_and_exit
    faulthandler.enable()
    if membership.how != "slurm":  # which ends the tasks of a step itself
        die_with_parent(int(os.environ.get("SHOAL_PARENT", os.getppid())))
    if threads or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads or _share_of_cores(membership.local_world_size))
    picked = membership.device(device)
    if picked.type == "cpu":
        tune_allocator()
    store = None
    if membership.how == "local":
        store = dist.FileStore(str(Path(os.environ["SHOAL_SCRATCH"], "store")), membership.world_size)
    elif membership.how == "slurm":
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = membership.master[0], str(membership.master[1])
    init_world(membership.rank, membership.world_size, store, picked, timeout)
    return membership


def _record_and_exit(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    """The rank's last act, as ``sys.excepthook``: tell the parent, which shows the earliest record alone."""
    usage = isinstance(error, UsageError)
    report = str(error) if usage else "".join(traceback.format_exception(kind, error, where))
    if "SHOAL_SCRATCH" in os.environ:
        record = _record_path(Path(os.environ["SHOAL_SCRATCH"]), int(os.environ["RANK"]))
        partial = record.with_suffix(".partial")
        partial.write_text(json.dumps({"when": time.monotonic(), "report": report}))
        partial.rename(record)  # whole or not at all, should a signal end this process meanwhile
    # init_process_group wraps this hook in one that holds sys.stderr back until it returns, which it never does.
    print(report, file=sys.__stderr__, flush=True)
    sys.stdout.flush()
    os._exit(2 if usage else 1)
