"""The training panel: a small run on this machine's own ranks, watched, disturbed and verified."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import Annotated, Any

import numpy as np
from pydantic import Field, NonNegativeInt

from shoal.base.errors import UsageError
from shoal.base.files import read_json, read_tail
from shoal.base.polling import wait_until
from shoal.base.section import Section
from shoal.spec.config import RUN_FILE, RunConfig, build_config, save_config
from shoal.training.records.metrics import FILE_NAME, read_metrics
from shoal.training.records.profile import RankProfile, read_profile
from shoal.training.resilience.events import read_events

FEWEST, MOST = 2, 4  # ranks
STOP_SECONDS = 15.0  # from Ctrl-C to SIGKILL of a run
TAIL = 4000  # bytes of a run's output that are shown
CHILD = (  # the child ends with the thread that started it, and that thread with the server
    "import sys; from shoal.engine.device import die_with_parent; die_with_parent(int(sys.argv.pop(1))); "
    "from shoal.__main__ import command; command()"
)


class StartRequest(Section):
    """A run of a small model on bytes of Python's own library."""

    dp: Annotated[int, Field(ge=1, le=MOST)] = 2
    zero: Annotated[int, Field(ge=0, le=3)] = 1
    tp: Annotated[int, Field(ge=1, le=MOST)] = 1
    pp: Annotated[int, Field(ge=1, le=MOST)] = 1
    steps: Annotated[int, Field(ge=20, le=1000)] = 200
    bucket_mb: Annotated[float, Field(ge=0.01, le=25)] = 0.1

    def config(self) -> RunConfig:
        """Return the config of the run."""
        return build_config({
            "model": {"name": "tiny", "layers": 4, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 176},
            "parallel": {
                "dp": self.dp, "zero": self.zero, "tp": self.tp, "pp": self.pp, "bucket_mb": self.bucket_mb,
                "micro_batch": 2,
            },
            "data": {"source": "stdlib", "tokenizer": "bytes", "sequence_length": 64},
            "train": {"steps": self.steps, "global_batch": 24, "validate_every": 0, "device": "cpu"},
            "optimizer": {"learning_rate": 3e-3},
            "checkpoint": {"every": 0},
            "failover": {"memory_every": 5},
            "metrics": {"log_every": 1, "profile": True, "profile_steps": 5, "tensorboard": False},
        })  # fmt: skip


class LabProcess:
    """A shoal command in a process of its own, which ends with the server.

    Args:
        output: file that gets what the command prints.
    """

    def __init__(self, arguments: list[str], output: Path):
        self.output = output
        self._started = threading.Event()
        self._process: Popen[bytes] | None = None
        threading.Thread(target=partial(self._run, arguments), daemon=True).start()
        self._started.wait()

    def _run(self, arguments: list[str]) -> None:
        try:
            with self.output.open("wb") as file:
                command = [sys.executable, "-c", CHILD, str(os.getpid()), *arguments]
                self._process = Popen(command, stdin=DEVNULL, stdout=file, stderr=STDOUT)
        finally:
            self._started.set()
        self._process.wait()

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll() if self._process else 1

    def end(self) -> None:
        """Ask the command to stop, as Ctrl-C does, and kill it after `STOP_SECONDS`."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        wait_until(lambda: self.code is not None, STOP_SECONDS)
        self._process.kill()
        self._process.wait()


class LabRun:
    """The lab's run with its temporary folder."""

    def __init__(self, request: StartRequest, config: RunConfig):
        self.request, self.config = request, config
        self.base = Path(tempfile.mkdtemp(prefix="shoal-lab-"))
        self.folder = self.base / "run"
        save_config(config, self.base / RUN_FILE)
        self.arguments = ["train", str(self.base / RUN_FILE), "--run-folder", str(self.folder)]
        self.began = time.time()
        self.process = LabProcess(self.arguments, self.base / "output.txt")
        self.verification: LabProcess | None = None

    def list_ranks(self) -> list[int]:
        """Return the process ids of the ranks, in order; none before they start and after they end."""
        from shoal.launch.supervisor import PROCESSES_FILE  # slow import

        try:
            return [int(pid) for pid in read_json(self.folder / PROCESSES_FILE)["ranks"]]
        except (UsageError, LookupError):
            return []

    def close(self) -> None:
        """End everything, and delete the folder."""
        for process in (self.verification, self.process):
            if process is not None:
                process.end()
        shutil.rmtree(self.base, ignore_errors=True)


_lock = threading.Lock()
_run: LabRun | None = None


def start_run(request: StartRequest) -> dict[str, Any]:
    """Start a run; the folder of the one before it is deleted.

    Raises:
        UsageError: a run is active, or the layout is impossible or has not 2 to 4 ranks.
    """
    global _run
    from shoal.training.check import check  # slow import

    config = request.config()
    check(config)
    ranks = config.parallel.world_size
    if not FEWEST <= ranks <= MOST:
        raise UsageError(
            f"dp {request.dp} x tp {request.tp} x pp {request.pp} = {ranks} ranks; the lab starts {FEWEST} to {MOST}."
        )
    with _lock:
        if _run is not None and _run.process.code is None:
            raise UsageError(f"a run is active in {_run.folder}.\n  Stop it first: the lab has one at a time.")
        if _run is not None:
            _run.close()
        _run = LabRun(request, config)
    return look_at_run()


def stop_run() -> dict[str, Any]:
    """Stop the run as Ctrl-C does; what it recorded stays to be looked at."""
    if _run is not None:
        _run.process.end()
    return look_at_run()


@atexit.register
def end_runs() -> None:
    """End the run and delete its folder; called when the server ends."""
    global _run
    with _lock:
        if _run is not None:
            _run.close()
        _run = None


def look_at_run() -> dict[str, Any]:
    """Return what the run has recorded so far.

    Returns:
        ``status``: none, running, finished or failed; the losses and events as its files have them; the process id of
        every rank; the state of the verification.
    """
    run = _run
    if run is None:
        return {"status": "none"}
    code = run.process.code
    metrics = read_metrics(run.folder) if (run.folder / FILE_NAME).exists() else []
    events = read_events(run.folder) if run.folder.exists() else []
    return {
        "status": "running" if code is None else "finished" if code == 0 else "failed",
        "folder": str(run.folder),
        "command": f"shoal {' '.join(run.arguments)}",
        "layout": run.config.parallel.describe(),
        "request": run.request.model_dump(),
        "steps": [[m.step, m.loss, m.tokens_per_second] for m in metrics if m.loss is not None],
        "events": [{**event, "time": event["time"] - run.began} for event in events],
        "ranks": run.list_ranks() if code is None else [],
        "profiled": any((run.folder / "profile").glob("rank-*.jsonl")),
        "output": read_tail(run.process.output, TAIL) if code else "",
        "verification": _describe_verification(run),
    }


# ---- what is done to it ----------------------------------------------------------------------------------------------


class KillRequest(Section):
    """A rank to kill."""

    rank: NonNegativeInt = 0


def kill_rank(request: KillRequest) -> dict[str, Any]:
    """Kill a rank's process, as the loss of a device would.

    Raises:
        UsageError: there is no such rank now.
    """
    ranks = _run.list_ranks() if _run is not None and _run.process.code is None else []
    if request.rank >= len(ranks):
        raise UsageError(f"rank {request.rank}: no such process now; {len(ranks)} ranks are running.")
    with suppress(ProcessLookupError):  # it just ended
        os.kill(ranks[request.rank], signal.SIGKILL)
    return {"rank": request.rank, "process": ranks[request.rank]}


def verify_run() -> dict[str, Any]:
    """Start `shoal verify` of the run's config: two steps beside one device, in float64.

    Raises:
        UsageError: there is no run, or its verification is still running.
    """
    run = _run
    if run is None:
        raise UsageError("no run to verify.\n  Start one first.")
    with _lock:
        if run.verification is not None and run.verification.code is None:
            raise UsageError("the verification is still running.")
        arguments = ["verify", str(run.base / RUN_FILE), "--steps", "2", "--json"]
        run.verification = LabProcess(arguments, run.base / "verify.json")
    return look_at_run()


def _describe_verification(run: LabRun) -> dict[str, Any] | None:
    """Return the state and result of the verification; None if there is none."""
    process = run.verification
    if process is None:
        return None
    if process.code is None:
        return {"status": "running"}
    text = read_tail(process.output, TAIL)
    with suppress(ValueError):
        found = json.loads(text.splitlines()[-1]) if text else {}
        return {"status": "same" if found["same"] else "differs", **found}
    return {"status": "failed", "output": text}


# ---- the recorded step -----------------------------------------------------------------------------------------------


def show_profile() -> dict[str, Any]:
    """Return one recorded step of the run: actions and bucket reductions of every rank, and who holds which bucket.

    Returns:
        Times in seconds from the first action of the step whose duration is the median.

    Raises:
        UsageError: no step is recorded yet, or the record is damaged.
    """
    run = _run
    profile = read_profile(run.folder) if run is not None else None
    if profile is None:
        raise UsageError("no step is recorded yet.")
    spans = [max(r.end[i][-1] for r in profile.ranks) - min(r.begin[i][0] for r in profile.ranks)
             for i in range(len(profile.ranks[0].steps))]  # fmt: skip
    typical = int(np.argsort(spans)[len(spans) // 2])
    zero = min(rank.begin[typical][0] for rank in profile.ranks)
    return {
        "step": profile.ranks[0].steps[typical] + 1,
        "seconds": spans[typical],
        "ranks": [_describe_rank(rank, typical, zero) for rank in profile.ranks],
    }


def _describe_rank(rank: RankProfile, step: int, zero: float) -> dict[str, Any]:
    actions = [
        [str(action), str(action.op), max(0.0, begin - zero), end - zero]
        for action, begin, end in zip(rank.actions, rank.arrived[step], rank.end[step], strict=True)
    ]
    return {
        "place": {"pp": rank.pp, "tp": rank.tp},
        "actions": actions,
        "buckets": [bucket._asdict() for bucket in rank.buckets],
        "reductions": [[number, begin - zero, end - zero] for number, begin, end in rank.reductions[step]],
    }


def record_requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the request of a saved page: what the run has recorded, if there is one."""
    yield "training-look", {}
