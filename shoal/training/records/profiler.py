"""Recording of a profile (`shoal.training.records.profile`) on each rank."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import _ExperimentalConfig

from shoal.base.files import json_lines, make_folder, write_atomically
from shoal.base.journal import best_effort
from shoal.engine.collectives.group import host_identity
from shoal.engine.collectives.json_collectives import all_gather, broadcast
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.parallel.zero.bucket import Bucket
from shoal.engine.runtime import Runtime
from shoal.pipeline.program import Program
from shoal.training.records.profile import FOLDER, HeldBucket
from shoal.training.records.timer import ActionTimer

ROUNDS = 8  # round trips for measuring a clock offset


class Profiler:
    """Profiler of some steps of one rank.

    Args:
        mesh: mesh of the run; all ranks must construct a profiler at the same time.
        group: group of all ranks on the CPU; None for one rank.
        trace: whether torch's profiler records the operators and kernels of these steps too.
    """

    def __init__(
        self, runtime: Runtime, mesh: Mesh, steps: range, folder: Path, group: dist.ProcessGroup | None, *,
        trace: bool = False,
    ):
        self.runtime, self.mesh, self.steps, self.folder = runtime, mesh, steps, folder
        if mesh.rank == 0:
            with best_effort(folder / FOLDER):
                for path in (folder / FOLDER).glob("*.partial"):  # of killed ranks: no rank of this start writes yet
                    path.unlink(missing_ok=True)
        self._timer, self._trace = ActionTimer(mesh.device), torch_profiler(mesh.device) if trace else None
        self._offset = clock_offset(group) if group else 0.0
        self._start = broadcast(time.perf_counter(), group)  # in the files of one start it is equal
        self._offset -= self._start
        self._lines: list[dict[str, Any]] = []
        stages = [runtime.stages[index].parameters for index in sorted(runtime.stages)]
        first = [0, *accumulate(len(parameters.buckets) for parameters in stages)]
        self._parameters = list(zip(first, stages, strict=False))  # with the number of the first bucket
        self._reductions: list[tuple[int, list[Any]]] = []  # number of the bucket; marks of start and end

    def before_step(self, step: int) -> None:
        """Start recording if due; the first step is 0."""
        if step in self.steps:
            if self._trace and step == self.steps[0]:
                self._trace.start()
            self._timer.start()
            self.runtime.recorders.append(self._timer)
            self._reductions = []
            for first, parameters in self._parameters:
                parameters.on_reduction = partial(self._on_reduction, first)

    def _on_reduction(self, first: int, bucket: int, starts: bool) -> None:
        if starts:
            self._reductions.append((first + bucket, [self._timer.clock.mark()]))
        else:
            marks = next(marks for number, marks in self._reductions if number == first + bucket and len(marks) == 1)
            marks.append(self._timer.clock.mark())

    def after_step(self, step: int) -> None:
        """Keep the recorded times; write them after the last step."""
        if step not in self.steps:
            return
        self.runtime.recorders.remove(self._timer)
        for _, parameters in self._parameters:
            parameters.on_reduction = None
        moments = zip(*(marks for _, marks in self._timer.marks), strict=True)
        seconds = {
            name: [round(time + self._offset, 7) for time in self._timer.clock.seconds(marks)]
            for name, marks in zip(("begin", "arrived", "end"), moments, strict=True)
        }
        reductions = [
            [number, *(round(time + self._offset, 7) for time in self._timer.clock.seconds(marks))]
            for number, marks in self._reductions
        ]
        self._lines.append({"step": step, **seconds, "reductions": reductions})
        if step == self.steps[-1]:
            self.close()

    def close(self) -> None:
        """Write the recorded steps atomically."""
        if not self._lines:
            return
        program, mesh = self.runtime.program, self.mesh
        header = {
            "start": self._start,
            "rank": mesh.rank,
            **{axis: mesh.index(axis) for axis in ("pp", "dp", "tp")},
            "layout": mesh.layout.describe(),
            "device": mesh.device.type,
            "program": {f.name: getattr(program, f.name) for f in fields(Program) if f.name != "actions"},
            "actions": self.runtime.actions,
            "buckets": [_describe_bucket(bucket) for _, stage in self._parameters for bucket in stage.buckets],
        }
        folder = self.folder / FOLDER
        with best_effort(folder):
            profile, trace = f"rank-{mesh.rank:05d}.jsonl", f"trace-rank-{mesh.rank:05d}.json.gz"
            write_atomically(make_folder(folder) / profile, json_lines([header, *self._lines], compact=True))
            if self._trace:
                self._trace.stop()
                with TemporaryDirectory() as temporary:
                    self._trace.export_chrome_trace(str(file := Path(temporary, trace)))
                    write_atomically(folder / trace, file.read_bytes())
            else:
                (folder / trace).unlink(missing_ok=True)  # of an earlier start
            if mesh.rank == 0:
                for path in folder.glob("*rank-*.json*"):
                    number = path.name.partition("rank-")[2].partition(".")[0]
                    if number.isdigit() and int(number) >= mesh.layout.world_size:
                        path.unlink(missing_ok=True)
        self._lines, self._trace = [], None


def torch_profiler(device: torch.device) -> torch.profiler.profile:
    """Return torch's profiler of the operators of this process, and of the kernels of its CUDA device."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    both = _ExperimentalConfig(profile_all_threads=True)  # paired micro-batches are computed in two threads
    return torch.profiler.profile(activities=kinds, experimental_config=both)


def _describe_bucket(bucket: Bucket) -> HeldBucket:
    names, full = tuple(slot.placement.name for slot in bucket.slots), bucket.full
    return HeldBucket(names, full.numel() * bucket.policy.reduce.itemsize, bucket.groups.shards, bucket.groups.index)


def clock_offset(
    group: dist.ProcessGroup, clock: Callable[[], float] = time.perf_counter, host: str | None = None
) -> float:
    """Return the offset from this rank's clock to rank 0's [s]. Collective.

    Processes of one host share their clock. For other hosts, the offset is estimated from the fastest of several round
    trips, with half of its time for each direction (Cristian 1989, "Probabilistic clock synchronization").
    """
    rank, hosts = dist.get_rank(group), all_gather(host or host_identity() or platform.node(), group)
    offset, now = 0.0, torch.zeros(1, dtype=torch.float64)
    for other in (r for r, name in enumerate(hosts) if name != hosts[0]):
        if rank == other:
            best = float("inf")
            for _ in range(ROUNDS):
                sent = clock()
                dist.send(now, group=group, group_dst=0)
                dist.recv(now, group=group, group_src=0)
                received = clock()
                if received - sent < best:
                    best, offset = received - sent, float(now) - (sent + received) / 2
        elif rank == 0:
            for _ in range(ROUNDS):
                dist.recv(now, group=group, group_src=other)
                now.fill_(clock())
                dist.send(now, group=group, group_dst=other)
    return offset
