"""Find the nearest layout for the devices that are left: the same global batch in the same order, so the same losses.

What a step computes does not depend on the layout, so any that fits will do. Replicas are given up first, as that moves
no weight; then the axes that split a model, as few of them and as little as possible.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

from shoal.base.errors import UsageError, divisors
from shoal.pipeline.check_run import check_run
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig
from shoal.spec.layout import Layout

DEGREES = ("dp", "tp", "cp", "pp")
NO_KNOBS = {"straggler": "", "dead": ""}  # of ranks that may be gone


def replan(
    config: RunConfig, shape: ModelShape, devices: int, fits: Callable[[RunConfig], object] = lambda config: None
) -> RunConfig:
    """The run on at most so many devices; itself, where there are enough.

    Args:
        shape: the model of ``config``.
        fits: raises a `UsageError` for a run that cannot be (too little memory).

    Raises:
        UsageError: nothing fits.
    """
    if devices >= config.parallel.world_size:
        return config
    if config.parallel.sync != "all-reduce":
        raise UsageError(
            f"parallel.sync = '{config.parallel.sync}' keeps a state of each of its {config.parallel.dp} replicas, and "
            f"there are {devices} devices.\n  Bring the others back."
        )
    why: UsageError | None = None
    for layout in sorted(_candidates(config, devices), key=lambda layout: _distance(config.parallel, layout)):
        update: dict[str, object] = {"parallel": layout, "testing": config.testing.model_copy(update=NO_KNOBS)}
        if layout.dp == 1 and config.failover.reexecute_on == "replica":  # there is no other
            update["failover"] = config.failover.model_copy(update={"reexecute_on": "same"})
        changed = config.model_copy(update=update)
        try:
            check_run(changed, shape)
            fits(changed)
        except UsageError as error:
            why = why or error
            continue
        return changed
    raise UsageError(f"no layout for {devices} of {config.parallel.world_size} devices.\n  The nearest fails: {why}")


def _distance(was: Layout, now: Layout) -> tuple:
    """Smallest for the nearest: what changes beside dp, then the devices left idle, then how far it is."""
    split = [name for name in DEGREES[1:] if getattr(was, name) != getattr(now, name)]
    return (
        len(split),
        DEGREES.index(split[-1]) if split else 0,
        -now.world_size,
        sum(abs(math.log2(getattr(now, name) / getattr(was, name))) for name in DEGREES),
        was.ep != now.ep,
        -now.micro_batch,
    )


def _candidates(config: RunConfig, devices: int) -> Iterator[Layout]:
    """Layouts on at most so many devices that make the same global batch of whole micro-batches no larger than now."""
    was, batch = config.parallel, config.train.global_batch
    for tp, cp, pp in itertools.product(*(divisors(getattr(was, name)) for name in DEGREES[1:])):
        for dp in range(1, min(was.dp, devices // (tp * cp * pp)) + 1):
            micro = next((m for m in range(was.micro_batch, 0, -1) if batch % (dp * m) == 0), None)
            if micro is None:
                continue
            for ep in divisors(was.ep):
                yield _adapted(was, {"dp": dp, "tp": tp, "cp": cp, "pp": pp, "ep": ep, "micro_batch": micro})


def _adapted(was: Layout, degrees: dict[str, int]) -> Layout:
    """A layout with other degrees, and without what they leave no room for."""
    changed: dict[str, object] = dict(degrees)
    if was.zero_shard is not None:
        changed["zero_shard"] = math.gcd(was.zero_shard, degrees["dp"])
    if degrees["tp"] == 1:
        changed |= {"sequence_parallel": False, "tp_overlap": "auto"}
    if degrees["tp"] != was.tp:
        changed["tp_x"] = 1
    if was.etp is not None and degrees["tp"] != was.tp:
        changed["etp"] = math.gcd(was.etp, degrees["tp"])
    if degrees["cp"] != was.cp:
        changed["ulysses"] = math.gcd(was.ulysses, degrees["cp"])
        if degrees["cp"] == changed["ulysses"]:
            changed["cp_order"] = "zig-zag"
    if degrees["pp"] != was.pp:
        changed |= {"stage_layers": None, "virtual_stages": None, "schedule": "1f1b", "update_every": None}
    return was.model_copy(update=changed)
