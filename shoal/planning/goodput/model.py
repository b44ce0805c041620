"""Goodput: how much of its time a training that fails now and then spends on steps that count.

A job of N devices, each of which fails at a constant rate, fails on average every M = (device MTBF) / N seconds. Every
tau seconds of work it saves for delta seconds; a failure costs what was done since the last save, and a restart. With
exponential failures, also while it saves and restarts, a wall time of

    M e^(R/M) (e^((tau + delta)/M) - 1) / tau     for a second of work         (Daly 2006, equation 20)

is exact; Young's square root (1974) and Daly's series (2006, equation 37) approximate the tau at which it is least.
What a save copies at once and then writes in the background counts only once it is written, phi seconds later: a
failure until then costs the interval before as well. Of each life between two failures the first save is whole after
R + tau + delta + phi, and each further one tau + delta later, so that R + phi stands in place of R.
Spare nodes decide how often a restart must wait for a repair.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace

import numpy as np

HOUR, DAY = 3600.0, 86400.0
LLAMA_3 = {"devices": 16384, "days": 54, "interruptions": 419}
"""Dubey et al. 2024, section 3.3.4: unexpected interruptions in a 54-day snapshot of pre-training."""


def device_mtbf(devices: int, days: float, interruptions: float) -> float:
    """Seconds between failures of one device, from those of all.

    >>> round(device_mtbf(**LLAMA_3) / HOUR)
    50677
    """
    return devices * days * DAY / interruptions


@dataclass(frozen=True)
class TrainingJob:
    """A training that fails. Times are seconds.

    Attributes:
        devices: that it needs, all of them.
        mtbf: between failures of one device.
        checkpoint: that training stops for a save.
        flush: that a save is then written for in the background, while training goes on; no longer than the work
            between saves.
        restart: from a failure until the first step, a save loaded and the step reached; not what is done again.
        per_node: devices that fall out together.
        spares: nodes that stand by.
        repair: until a failed node is back.
    """

    devices: int
    mtbf: float
    checkpoint: float = 30.0
    restart: float = 300.0
    per_node: int = 8
    spares: int | None = None
    repair: float = DAY
    flush: float = 0.0

    @property
    def spare_share(self) -> float:
        """Devices that stand by, over those of the job."""
        return (self.spares or 0) * self.per_node / self.devices

    @property
    def between(self) -> float:
        """M, between failures of the job."""
        return self.mtbf / self.devices


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def young(job: TrainingJob) -> float:
    """Seconds of work between saves: sqrt(2 delta M) (Young 1974)."""
    return math.sqrt(2 * job.checkpoint * job.between)


def daly(job: TrainingJob) -> float:
    """The same with two more terms of the series, M where a save takes 2 M or more (Daly 2006, equation 37)."""
    delta, mean = job.checkpoint, job.between
    if delta >= 2 * mean:
        return mean
    ratio = delta / (2 * mean)
    return math.sqrt(2 * delta * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - delta


def best_interval(job: TrainingJob) -> float:
    """The same exactly: where the derivative of `effective` is zero, x + delta/M + log(1 - x) = 0 with x = tau / M; but
    not before the last save is written."""
    delta = job.checkpoint / job.between
    low, high = 0.0, 1.0
    for _ in range(60):  # the left side falls from delta/M to minus infinity
        x = (low + high) / 2
        low, high = (x, high) if x + delta + math.log1p(-x) > 0 else (low, x)
    return max(low * job.between, job.flush)


def effective(job: TrainingJob, interval: float) -> float:
    """The part of the time that is spent on steps that count, where a restart never waits (Daly 2006, equation 20)."""
    mean, before = job.between, job.restart + job.flush
    if (before + interval + job.checkpoint) / mean > 700:
        return 0.0
    return interval / (mean * math.exp(before / mean) * math.expm1((interval + job.checkpoint) / mean))


# ---- spares ----------------------------------------------------------------------------------------------------------


def available(job: TrainingJob) -> float:
    """The part of the time in which enough nodes are whole; 1 where no spares are counted.

    Failures come while the job is up, and each is repaired by itself: the job is down with all spares used and one
    node more, which is Erlang's loss formula for spares + 1 servers (Erlang 1917).
    """
    return 1.0 if job.spares is None else 1.0 - erlang_b(job.spares + 1, job.repair / job.between)


def erlang_b(servers: int, load: float) -> float:
    """The part of the time in which all of some servers are busy.

    >>> round(erlang_b(2, 1.0), 3)
    0.2
    """
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked


def spares_for(job: TrainingJob, availability: float) -> int:
    """The fewest spare nodes with which enough are whole for this part of the time."""
    spares = 0
    while available(replace(job, spares=spares)) < availability:
        spares += 1
    return spares


def goodput(job: TrainingJob, interval: float | None = None) -> float:
    """All of it: the part of the time on steps that count, and that the nodes are there."""
    return available(job) * effective(job, best_interval(job) if interval is None else interval)


# ---- played ----------------------------------------------------------------------------------------------------------


def play(job: TrainingJob, interval: float, *, failures: int = 2000, seed: int = 0) -> float:
    """The same from a simulation of so many failures: of the job, its saves, its restarts, and of repairs.

    Nodes fail while the job runs, saves or restarts; while it waits for a node nothing fails.
    """
    random = np.random.default_rng(seed)
    lives = random.exponential(job.between, failures)
    work = wall = 0.0
    restart = 0.0  # still to do before work goes on
    repaired: list[float] = []  # when each node that is out comes back
    cycle = interval + job.checkpoint
    for life in lives:
        if life > restart + job.flush:  # the last save that is written by then
            work += math.floor((life - restart - job.flush) / cycle) * interval
        wall += life
        restart = job.restart
        if job.spares is None:
            continue
        heapq.heappush(repaired, wall + random.exponential(job.repair))
        while repaired and repaired[0] <= wall:
            heapq.heappop(repaired)
        if len(repaired) > job.spares:
            wall = heapq.heappop(repaired)
    return work / wall
