"""Text report of an estimate: the run in numbers, its bottleneck, and useful changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shoal.base.terminal import red
from shoal.base.units import HOUR, show_bytes, show_metric, show_seconds
from shoal.planning.changes import find_changes
from shoal.planning.cost.flops import petaflop_days
from shoal.planning.estimate import ROUNDING, StepEstimate
from shoal.planning.full_training import FullTraining
from shoal.planning.run import EstimatedRun
from shoal.planning.software_estimate import SoftwareEstimate, estimate_run


def estimate_lines(
    estimate: StepEstimate, facts: list[tuple[str, str]], changes: list[tuple[str, str]], model: str
) -> Iterator[str]:
    """Yield the lines that `shoal estimate` prints, given `estimate_facts` and `change_rows`."""
    run, step = estimate.run, estimate.step_seconds
    width = max(len(name) for name, _ in facts)
    longest = max(width, *(len(change) for change, _ in changes))
    effects = [f"  {change:<{longest}}  {effect}" for change, effect in changes]
    if not estimate.fits:
        yield red(bound(estimate))
        yield from effects
        yield ""
    yield f"{model}: {run.shape.parameters():,} parameters, {run.precision}, {run.optimizer}"
    yield f"{run.cluster.describe()}: {run.layout.equation()}, {run.layout.describe()}"
    yield (f"{run.global_batch:,} sequences of {run.sequence_length:,} tokens a step, {run.microbatches} micro-batches "
           f"of {run.layout.micro_batch}")  # fmt: skip
    yield ""
    for name, value in facts:
        yield f"  {name:<{width}}  {value}"
    yield ""
    yield "time of the busiest pipeline rank"
    for name, seconds in estimate.breakdown.items():
        if seconds > ROUNDING * step:
            yield f"  {name:<{width}}  {show_seconds(seconds):>8}  {100 * seconds / step:5.1f} %"
    yield ""
    yield "memory of the fullest rank"
    for name, size in vars(estimate.fullest).items():
        if size > 0:
            yield f"  {name:<{width}}  {show_bytes(size):>8}"
    if estimate.fits:
        yield ""
        yield bound(estimate)
        yield from effects


def estimate_facts(estimate: StepEstimate, training: FullTraining) -> list[tuple[str, str]]:
    """Return the run in numbers and its complete training, as (name, value)."""
    run, step = estimate.run, estimate.step_seconds
    low, high = map(show_seconds, estimate.interval)
    least, most = map(show_bytes, estimate.memory_interval)
    emulated = run.policy.products in ("mxfp8", "nvfp4") and not run.quantised
    return [
        ("step", f"{show_seconds(step)}; 80 % interval {low} to {high}"),
        *([("products", f"in 16 bits: {run.cluster.accelerator.name} does not multiply {run.policy.products}, and "
            "emulating it takes longer than this")] if emulated else []),
        ("accuracy of such a time", estimate.accuracy().describe()),
        ("tokens per second", f"{run.tokens / step:,.0f} ({run.tokens / step / run.cluster.size:,.0f} a device)"),
        ("MFU, of the dense peak", f"{100 * estimate.mfu:.1f} % ({100 * estimate.hfu:.1f} % with what is recomputed)"),
        ("memory of the fullest rank", f"{show_bytes(estimate.fullest.allocated)} allocated, "
         f"{show_bytes(estimate.fullest.reserved)} reserved, of {show_bytes(estimate.capacity)}; 80 % interval "
         f"{least} to {most}"),
        *training_facts(run, training),
    ]


def training_facts(run: EstimatedRun, training: FullTraining) -> Iterator[tuple[str, str]]:
    """Yield duration, cost, energy and power of a complete training, as (name, value)."""
    flops = training.tokens * run.shape.flops_per_token(run.sequence_length)
    hours = training.seconds / HOUR
    lasts = f"{training.days:,.1f} days" if training.days > 1 else f"{hours:.3g} hours"
    if hours < 1:
        lasts = f"{training.seconds / 60:.3g} minutes" if hours > 1 / 60 else f"{training.seconds:.3g} seconds"
    devices, days = training.devices * hours, petaflop_days(flops)
    yield (f"training on {training.tokens:.3g} tokens",
           f"{lasts}, {devices:{',.0f' if devices > 10 else '.2g'}} device-hours, {flops:.3g} FLOPs"
           + (f", {days:{',.0f' if flops > 1e21 else '.3g'}} petaFLOP/s-days" if days > 1e-3 else ""))  # fmt: skip
    if training.dollars:
        listed = training.price == run.cluster.accelerator.dollars_per_hour
        source = f" ({run.cluster.accelerator.price_source})" if listed else ""
        cost = f"${training.dollars:,.{0 if training.dollars >= 10 else 2}f}"
        cost = cost if training.dollars >= 0.01 else "less than a cent"
        yield "cost", f"{cost} at ${training.price:g} a device-hour{source}"
    elif training.price is None:
        yield "cost", f"the catalog has no price of {run.cluster.accelerator.name}: give --price"
    if training.kilowatt_hours and training.kilowatts:
        energy, power = 1e3 * training.kilowatt_hours, 1e3 * training.kilowatts
        yield ("energy and power",
               f"{show_metric(energy, 'Wh')} at {show_metric(power, 'W')}: {training.watts:,.0f} W each, "
               f"{run.cluster.watts_of}, times {training.pue:g} for the building (PUE)")  # fmt: skip


def bound(estimate: StepEstimate) -> str:
    """Return the run's bottleneck in a sentence."""
    if not estimate.fits:
        what = max(vars(estimate.fullest).items(), key=lambda held: held[1])[0]
        needed, capacity = show_bytes(estimate.fullest.reserved), show_bytes(estimate.capacity)
        verdict = "May not fit" if estimate.may_fit else "Does not fit"
        return f"{verdict}: needs {needed}, has {capacity}; the largest part is '{what}'. Layouts that fit:"
    if isinstance(estimate, SoftwareEstimate) and (returning := estimate.breakdown["allocator"]):
        unread = max(float(rank.unread[0]) for rank in estimate.footprint.ranks)
        read = f", with {show_bytes(unread)} that are freed but still read by collectives" if unread else ""
        spared = show_seconds(estimate.step_seconds - returning)
        return (f"The memory is full{read}: torch's allocator returns blocks in each micro-batch. With some to spare a "
                f"step takes {spared}. Effects of single changes:")
    (first, most), (second, next_most), *_ = sorted(estimate.breakdown.items(), key=lambda part: -part[1])
    then = f", then by {second}" if next_most > most / 10 else ""
    return f"Bound by {first}{then}. Effects of single changes:"


def change_rows(estimate: StepEstimate) -> list[tuple[str, str]]:
    """Return the most useful layout changes, as (change, effect); if none fits, what a search recommends."""
    every = find_changes(estimate)
    if not estimate.fits and not every and estimate.run.shape.depths is None:
        from shoal.planning.search.search import search  # slow import
        from shoal.planning.search.space import LayoutSpace

        best = search(estimate.run, LayoutSpace()).best
        every = [(found.layout.describe(), estimate_run(replace(estimate.run, layout=found.layout))) for found in best]
    found = [
        (name, f"{show_seconds(other.step_seconds)} a step "
         f"({100 * (other.step_seconds / estimate.step_seconds - 1):+.0f} %), {show_bytes(other.fullest.reserved)}")
        for name, other in every
    ]  # fmt: skip
    if not found and not estimate.fits:
        return [("none", "on this cluster with this batch")]
    return found or [("none", "of those tried is faster")]
