"""Goodput model: the share of time that a training run with failures spends on productive steps.

A job of N devices, each of which fails at a constant rate, fails on average every M = (device MTBF) / N seconds. After
every tau seconds of work it stops for delta seconds to save. A failure costs the work since the last save, and a
restart of R seconds. With exponential failures, also during saves and restarts, a wall time of

    M e^(R/M) (e^((tau + delta)/M) - 1) / tau     for a second of work         (Daly 2006, equation 20)

is exact. Young's square root (1974) and Daly's series (2006, equation 37) approximate the tau that minimises it. A save
that is copied immediately and written in the background becomes valid phi seconds later, when it is written: a failure
before that also costs the previous interval. After each failure, the first save is valid after R + tau + delta + phi,
and each further one tau + delta later, so R + phi replaces R. The number of spare nodes determines how often a restart
must wait for a repair.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from shoal.base.errors import UsageError
from shoal.base.units import DAY, HOUR, TIME, parse, show_seconds

UNITS = TIME | {"min": 60.0, "h": HOUR, "d": DAY}
MOST_FAILURES = 20  # maximum expected failures during one restart and save
MOST_SIMULATED, MOST_IN_REPAIR = 10_000_000, 1_000_000  # failures, and expected nodes, counted one by one in seconds
LLAMA_3 = {"devices": 16384, "days": 54, "interruptions": 419}
"""Unexpected interruptions in a 54-day snapshot of pre-training (Dubey et al. 2024, section 3.3.4)."""


def device_mtbf(devices: int, days: float, interruptions: float) -> float:
    """Return the seconds between failures of one device, from the failures of all devices.

    >>> round(device_mtbf(**LLAMA_3) / HOUR)
    50677
    """
    return devices * days * DAY / interruptions


@dataclass(frozen=True)
class TrainingJob:
    """A training job with failures. Times are in seconds.

    Attributes:
        devices: number of devices, all of which the job needs.
        mtbf: mean time between failures of one device.
        checkpoint: time that training stops for a save.
        flush: time of the background write of a save; at most the work between saves.
        restart: time from a failure to the first step, including loading a save but not the repeated work.
        per_node: devices that fail together.
        spares: standby nodes.
        repair: time until a failed node returns.
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
        """Standby devices relative to the job's devices."""
        return (self.spares or 0) * self.per_node / self.devices

    @property
    def between(self) -> float:
        """Mean time M between failures of the job."""
        return self.mtbf / self.devices


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def young(job: TrainingJob) -> float:
    """Return the seconds of work between saves by sqrt(2 delta M) (Young 1974)."""
    return math.sqrt(2 * job.checkpoint * job.between)


def daly(job: TrainingJob) -> float:
    """Return the seconds of work between saves by Daly's series; M if a save takes >= 2 M (Daly 2006, eq. 37)."""
    delta, mean = job.checkpoint, job.between
    if delta >= 2 * mean:
        return mean
    ratio = delta / (2 * mean)
    return math.sqrt(2 * delta * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - delta


def best_interval(job: TrainingJob) -> float:
    """Return the exact best seconds of work between saves, but at least the flush time.

    Solves for the zero of the derivative of `effective`: x + delta/M + log(1 - x) = 0 with x = tau / M.
    """
    delta = job.checkpoint / job.between
    low, high = 0.0, 1.0
    for _ in range(60):  # the left side falls from delta/M to minus infinity
        x = (low + high) / 2
        low, high = (x, high) if x + delta + math.log1p(-x) > 0 else (low, x)
    return max(low * job.between, job.flush)


def effective(job: TrainingJob, interval: float) -> float:
    """Return the productive share of time if a restart never waits for a node (Daly 2006, equation 20)."""
    mean, before = job.between, job.restart + job.flush
    if (before + interval + job.checkpoint) / mean > 700:
        return 0.0
    return interval / (mean * math.exp(before / mean) * math.expm1((interval + job.checkpoint) / mean))


# ---- spares ----------------------------------------------------------------------------------------------------------


def available(job: TrainingJob) -> float:
    """Return the share of the time in which enough nodes are healthy; 1 if spares are not modelled.

    Failures occur while the job is up, and repairs are independent. The job is down when all spares are used and one
    more node has failed: Erlang's loss formula for spares + 1 servers (Erlang 1917).
    """
    return 1.0 if job.spares is None else 1.0 - erlang_b(job.spares + 1, job.repair / job.between)


def erlang_b(servers: int, load: float) -> float:
    """Return the share of time in which all servers are busy (Erlang B).

    >>> round(erlang_b(2, 1.0), 3)
    0.2
    """
    return next(islice(_blocked(load), servers, None), 0.0)


def _blocked(load: float) -> Iterator[float]:
    """Yield the share of 0, 1, 2 ... servers, until it is too small for a number."""
    blocked, servers = 1.0, 0
    while blocked:
        yield blocked
        servers += 1
        blocked = load * blocked / (servers + load * blocked)


def spares_for(job: TrainingJob, availability: float) -> int:
    """Return the smallest number of spare nodes that gives this availability."""
    shares = islice(_blocked(job.repair / job.between), 1, None)
    return next((spares for spares, share in enumerate(shares) if 1.0 - share >= availability), 0)


def productive_share(job: TrainingJob, interval: float | None = None) -> float:
    """Return the productive share of the total time, including waits for nodes."""
    return available(job) * effective(job, best_interval(job) if interval is None else interval)


# ---- simulation ------------------------------------------------------------------------------------------------------


def simulate_failures(job: TrainingJob, interval: float, *, failures: int = 2000, seed: int = 0) -> float:
    """Simulate the goodput of a job over a number of failures, with saves, restarts and repairs.

    Nodes fail while the job runs, saves or restarts, but not while it waits for a node.
    """
    random = np.random.default_rng(seed)
    lives = random.exponential(job.between, failures)
    work = wall = 0.0
    restart = 0.0  # remaining restart time before work continues
    repaired: list[float] = []  # return times of the failed nodes
    cycle = interval + job.checkpoint
    for life in lives:
        if life > restart + job.flush:  # the last save written by then
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


# ---- forecast --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GoodputForecast:
    """Forecast of the share of a job's time that is productive.

    Attributes:
        job: the job with its spare nodes.
        interval: seconds of work between saves.
        young, daly: the best interval by Young's and Daly's formulas.
        effective: productive share of the time, if a restart never waits for a node.
        simulated: the same, from a simulation.
        available: share of the time in which enough nodes are healthy.
        goodput: productive share of the total time.
    """

    job: TrainingJob
    interval: float
    young: float
    daly: float
    effective: float
    simulated: float
    available: float
    goodput: float


def goodput(
    devices: PositiveInt, *, mtbf: PositiveFloat | None = None, checkpoint: float | str = 30.0,
    flush: float | str = 0.0, restart: float | str = 300.0, interval: float | str | None = None,
    per_node: PositiveInt = 8, spares: NonNegativeInt | None = None, repair: float | str = DAY,
    availability: float = 0.99, failures: PositiveInt = 20000, seed: NonNegativeInt = 0,
) -> GoodputForecast:  # fmt: skip
    """Forecast the productive share of a long training run's time under device failures.

    Times are in seconds, or text with a unit: "30s", "2min", "1h", "1d".

    Args:
        devices: number of devices, all of which the job needs.
        mtbf: mean time between failures of one device (default: 50,677 hours, as in 54 days of Llama 3).
        checkpoint: time that training stops for a save.
        flush: time of the background write of a save; a failure during it also loses the previous interval.
        restart: time from a failure until training continues, without the repeated work.
        interval: work time between saves (default: the best).
        per_node: devices that fail together.
        spares: standby nodes (default: as many as `availability` needs).
        repair: time until a failed node returns.
        availability: required share of time with enough healthy nodes, from which spares are computed.
        failures: number of simulated failures.
        seed: random seed of the simulation.

    Raises:
        UsageError: an invalid time, saves that cost nothing or overlap, or a job that would make no progress.

    >>> import shoal
    >>> found = shoal.goodput(16384, checkpoint="30s", failures=500)
    >>> round(found.interval), found.job.spares, round(found.goodput, 2)
    (798, 14, 0.9)
    """
    stop, written, again, repaired = (
        _seconds(name, time)
        for name, time in (("checkpoint", checkpoint), ("flush", flush), ("restart", restart), ("repair", repair))
    )
    if not stop:
        raise UsageError("--checkpoint 0s: a save that costs nothing would be made all the time.\n  Give its cost.")
    if not 0 < availability < 1:
        raise UsageError(f"--availability {availability}: a share of time between 0 and 1.\n  Give one such as 0.99.")
    if failures > MOST_SIMULATED:
        raise UsageError(f"--failures {failures}: at most {MOST_SIMULATED:,} are simulated.")
    chosen = None if interval is None else _seconds("interval", interval)
    if chosen == 0:
        raise UsageError("--interval 0s: nothing would be computed between saves.\n  Give a longer one.")
    if chosen is not None and chosen < written:
        raise UsageError(
            f"--flush {flush}: longer than --interval {interval}; a save would not be written when the "
            "next begins.\n  Save less often."
        )
    job = TrainingJob(
        devices, mtbf or device_mtbf(**LLAMA_3), stop, again, per_node=per_node, spares=spares, repair=repaired,
        flush=written,
    )  # fmt: skip
    if (alone := job.restart + job.checkpoint + job.flush) > MOST_FAILURES * job.between:
        raise UsageError(
            f"--devices {devices}: it fails every {show_seconds(job.between)}, and a restart and a save take "
            f"{show_seconds(alone)}: it would never get on."
            "\n  Give fewer devices, or faster ones of both."
        )
    if job.repair > MOST_IN_REPAIR * job.between:
        raise UsageError(f"--repair {repair}: with a failure every {show_seconds(job.between)}, more than "
                         f"{MOST_IN_REPAIR:,} nodes would be in repair.\n  Give a shorter time.")
    if spares is None:
        job = replace(job, spares=spares_for(job, availability))
    seconds = best_interval(job) if chosen is None else chosen
    return GoodputForecast(
        job, seconds, young(job), daly(job), effective(job, seconds),
        simulate_failures(replace(job, spares=None), seconds, failures=failures, seed=seed), available(job),
        productive_share(job, seconds),
    )  # fmt: skip


def _seconds(name: str, time: float | str) -> float:
    seconds = parse(time, UNITS, where=f"--{name}") if isinstance(time, str) else float(time)
    if not 0 <= seconds < math.inf:
        raise UsageError(f"--{name} {time}: no duration.\n  Give seconds, or text with a unit such as 5min.")
    return seconds
