"""Goodput forecast of one job: checkpoint interval, spare nodes and productive share of time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.base.errors import UsageError
from shoal.base.units import TIME, parse, show_seconds
from shoal.planning.goodput import model
from shoal.planning.goodput.model import DAY, HOUR, LLAMA_3, TrainingJob, device_mtbf, play, spares_for

UNITS = TIME | {"min": 60.0, "h": HOUR, "d": DAY}
MOST_FAILURES = 20  # maximum expected failures during one restart and save


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
    devices: int, *, mtbf: float | None = None, checkpoint: float | str = 30.0, flush: float | str = 0.0,
    restart: float | str = 300.0, interval: float | str | None = None, per_node: int = 8, spares: int | None = None,
    repair: float | str = DAY, availability: float = 0.99, failures: int = 20000, seed: int = 0,
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
    chosen = None if interval is None else _seconds("interval", interval)
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
    if spares is None:
        job = replace(job, spares=spares_for(job, availability))
    seconds = model.best_interval(job) if chosen is None else chosen
    return GoodputForecast(
        job, seconds, model.young(job), model.daly(job), model.effective(job, seconds),
        play(replace(job, spares=None), seconds, failures=failures, seed=seed), model.available(job),
        model.goodput(job, seconds),
    )  # fmt: skip


def _seconds(name: str, time: float | str) -> float:
    return parse(time, UNITS, where=f"--{name}") if isinstance(time, str) else float(time)
