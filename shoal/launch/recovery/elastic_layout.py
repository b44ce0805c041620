"""Find the nearest layout for the remaining devices, with the same global batch in the same order.

As the result of a step does not depend on the layout, the losses stay the same. The layout leaves the fewest devices
idle. Among equals, replicas are removed first, since that moves no weights; then the model-splitting axes shrink, as
few and as little as possible.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

from shoal.base.errors import UsageError, divisors
from shoal.pipeline.from_layout import check_run
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig
from shoal.spec.layout import Layout

DEGREES = ("dp", "tp", "cp", "pp")
NO_KNOBS = {"straggler": "", "kill": ""}  # disables fault knobs of ranks that may no longer exist


def replan(
    config: RunConfig, shape: ModelShape, devices: int, fits: Callable[[RunConfig], object] = lambda config: None, *,
    replicas: bool = False,
) -> RunConfig:
    """Return the run on at most ``devices`` devices; unchanged if they suffice.

    Args:
        fits: raises `UsageError` for a run that is impossible (too little memory).
        replicas: whether only the number of replicas may change.

    Raises:
        UsageError: no layout fits.
    """
    if devices >= config.parallel.world_size:
        return config
    if config.parallel.sync != "all-reduce":
        raise UsageError(
            f"parallel.sync = '{config.parallel.sync}' keeps a state of each of its {config.parallel.dp} replicas, but "
            f"only {devices} devices are available.\n  Restore the others."
        )
    why: UsageError | None = None
    for layout in sorted(_candidates(config, devices), key=lambda layout: _distance(config.parallel, layout)):
        if replicas and _changed_splits(config.parallel, layout):
            continue
        changed = config.replace(parallel=layout, testing=NO_KNOBS)
        if layout.dp == 1:  # no other replica exists
            changed = changed.replace(failover={"reexecute_on": "same", "shrink": "never"})
        try:
            check_run(changed, shape)
            fits(changed)
        except UsageError as error:
            why = why or error
            continue
        return changed
    raise UsageError(f"no layout for {devices} of {config.parallel.world_size} devices.\n  The nearest fails: {why}")


def _distance(was: Layout, now: Layout) -> tuple:
    """Return a sort key: idle devices, changed axes besides dp, then the size of the changes."""
    split = _changed_splits(was, now)
    return (
        -now.world_size,
        len(split),
        DEGREES.index(split[-1]) if split else 0,
        sum(abs(math.log2(getattr(now, name) / getattr(was, name))) for name in DEGREES),
        -now.ep,
        -now.micro_batch,
    )


def _changed_splits(was: Layout, now: Layout) -> list[str]:
    """Return the changed axes that split the model, in the order in which they move more weights."""
    return [name for name in DEGREES[1:] if getattr(was, name) != getattr(now, name)]


def _candidates(config: RunConfig, devices: int) -> Iterator[Layout]:
    """Yield layouts for at most ``devices`` devices with the same global batch and no larger micro-batches."""
    was, batch = config.parallel, config.train.global_batch
    for tp, cp, pp in itertools.product(*(divisors(getattr(was, name)) for name in DEGREES[1:])):
        for dp in range(1, min(was.dp, devices // (tp * cp * pp)) + 1):
            micro = next((m for m in range(was.micro_batch, 0, -1) if batch % (dp * m) == 0), None)
            if micro is None:
                continue
            for ep in divisors(was.ep):
                yield _adapted(was, {"dp": dp, "tp": tp, "cp": cp, "pp": pp, "ep": ep, "micro_batch": micro})


def _adapted(was: Layout, degrees: dict[str, int]) -> Layout:
    """Return the layout with other degrees, adjusting the options that depend on them."""
    changed: dict[str, object] = dict(degrees)
    if was.zero_shard is not None:
        changed["zero_shard"] = math.gcd(was.zero_shard, degrees["dp"])
    if degrees["tp"] == 1:
        changed |= {"sequence_parallel": False, "tp_overlap": "auto"}
    if degrees["ep"] == 1 or degrees["pp"] != was.pp:
        changed["ep_overlap"] = "auto"
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
