"""`shoal estimate`: what a run needs and how long it takes, before it is launched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.files import check_place
from shoal.base.options import reject_unused
from shoal.base.section import Section
from shoal.base.units import show_bytes, show_seconds
from shoal.planning.cost.flops import DAY, PUE, dollars, kilowatt_hours, model_flops, petaflop_days
from shoal.planning.estimable import check_device, check_trained
from shoal.planning.estimate import Estimate
from shoal.planning.run import EstimatedRun
from shoal.spec.catalog import model_shape, tables
from shoal.spec.catalog.clusters import cluster
from shoal.spec.config import OptimizerConfig
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS

if TYPE_CHECKING:
    from shoal.spec.config import RunConfig

MODEL = "llama-3-8b"  # where none is named
TOKENS_PER_STEP = 4 * 2**20
ROUNDING = 1e-9  # of a step: less is none of its parts
OPTIMIZERS = get_args(OptimizerConfig.model_fields["name"].annotation)


class EstimateOptions(Section):
    model: str | None = None
    """A model of the catalog (default: the TOML file's, else llama-3-8b)."""

    cluster: str = "8xH100"
    """8xH100, 64x8xH100-IB400, v5p-4096 (a slice, as its maker counts), or one accelerator of the catalog."""

    sequence_length: PositiveInt | None = None
    """Tokens of a sequence (default: the file's, else the longest that the model was trained for)."""

    global_batch: PositiveInt | None = None
    """Sequences of a step (default: the file's, else about 4 M tokens)."""

    precision: str | None = None
    """Number formats, as `shoal train` takes them: bf16, fp16, fp8, fp32, ... (default: the file's, else bf16)."""

    optimizer: str | None = None
    """The update rule (default: the file's, else adamw)."""

    tokens: PositiveFloat | None = None
    """Of the whole training, as 15e12 (default: 20 for each parameter)."""

    price: PositiveFloat | None = None
    """Dollars for an accelerator and hour (default: the catalog's list price)."""

    catalog: Path | None = None
    """A TOML file with accelerators, links, nodes and models of your own."""

    dry_run: bool = False
    """Run the real model of one rank on fake tensors, and count what it does."""

    rank: NonNegativeInt = 0
    """With dry_run: which rank of the world."""

    steps: PositiveInt = 4
    """With dry_run: how many of the first steps."""

    measure: bool = False
    """With dry_run: start all ranks here too, and compare their memory."""

    out: Path | None = None
    """Write a page (.html)."""


def run(options: EstimateOptions, config: RunConfig | None, layout: Layout, *, fill: bool = True) -> int:
    """Estimate, print, and write the page; the exit code.

    Args:
        config: of a run's TOML file, if one was given.
        fill: the cluster with replicas, whatever dp the layout has.

    Raises:
        UsageError: a name that is not in the catalog, or a layout that cannot be.
    """
    if options.out and options.out.suffix != ".html":
        raise UsageError(f"--out {options.out}: a page ends in .html")
    check_place(options.out, "--out")
    if options.dry_run:
        reject_unused(options, ("tokens", "price"), "a dry run counts one rank's first steps, and prices no training")
    else:
        reject_unused(options, ("rank", "steps", "measure"), "only with --dry-run, which runs a rank's first steps")
    if options.catalog:
        tables.add(options.catalog)
    if config is None and not options.model:
        options = options.model_copy(update={"model": MODEL})
    estimate = Estimate(described(options, config, layout, fill=fill))
    if options.dry_run:
        from shoal.labs.validate.by_dry_run import run_dry  # which needs torch

        given = {"rank": options.rank, "steps": options.steps, "measure": options.measure, "out": options.out}
        for line in run_dry(estimate, config, **given):
            print(line)
        return 0
    for line in lines(estimate, options):
        print(line)
    if options.out:
        from shoal.report.planning.estimate_page import write_page  # which draws

        write_page(options.out, estimate, facts(estimate, options), bound(estimate), changes(estimate))
        print(f"written: {options.out}")
    return 0


def described(options: EstimateOptions, config: RunConfig | None, layout: Layout, *, fill: bool = True) -> EstimatedRun:
    """The run that the options describe, checked; arguments as `run` has them."""
    if options.model or config is None:
        shape = model_shape(options.model or MODEL)
    else:
        from shoal.engine.data.tokenizer import load_tokenizer

        vocab = load_tokenizer(config.data.tokenizer).vocab_size
        shape = config.model.shape(vocab=vocab, sequence_length=config.data.sequence_length)
    s = options.sequence_length or (config.data.sequence_length if config else shape.max_sequence)
    if shape.family == "gpt":
        shape = shape.model_copy(update={"max_sequence": max(shape.max_sequence, s)})
    machine = cluster(options.cluster)
    each = layout.pp * layout.cp * layout.tp
    if fill and machine.size % each == 0:
        layout = layout.model_copy(update={"dp": machine.size // each})
    per_pass = layout.dp * layout.micro_batch
    default = max(1, round(TOKENS_PER_STEP / s / per_pass)) * per_pass
    batch = options.global_batch or (config.train.global_batch if config else default)
    precision = options.precision or (config.train.precision if config else "bf16")
    optimizer = options.optimizer or (config.optimizer.name if config else "adamw")
    for option, given, known in (("precision", precision, FORMATS), ("optimizer", optimizer, OPTIMIZERS)):
        if given not in known:
            raise UsageError(f"--{option} {given}: there is none; {did_you_mean(given, known)}")
    of_file = {} if config is None else {
        "attention": "explicit" if config.train.attention == "explicit" else "sdpa",
        "document_mask": config.data.document_mask, "hessian_every": config.optimizer.hessian_every,
        "float8": config.float8,
    }  # fmt: skip
    run = EstimatedRun(shape, layout, machine, s, batch, precision, optimizer, **of_file)
    check_device(run)
    if run.eight_bits and config and config.float8.scales == "block":
        raise UsageError("float8.scales = block: such products are not estimated.\n  Leave it out, or measure.")
    if layout.offload != "none":
        given = f"parallel.offload = {layout.offload}"
        raise UsageError(f"{given}: host memory is not estimated.\n  Leave it out, or measure.")
    return checked(run) if options.dry_run else estimable(checked(run))


def checked(run: EstimatedRun) -> EstimatedRun:
    """The run, if its layout fits the model, the batch and the cluster.

    Raises:
        UsageError: it does not.
    """
    sizes = {"global_batch": run.global_batch, "sequence_length": run.sequence_length}
    run.layout.check(run.shape, **sizes, ranks=run.cluster.size)
    check_trained(run, run.layout)
    return run


def estimable(run: EstimatedRun) -> EstimatedRun:
    """The run, if there are formulas for the time of its step.

    Raises:
        UsageError: there are not.
    """
    layout = run.layout
    if layout.sync != "all-reduce":
        raise UsageError(
            f"parallel.sync = {layout.sync}: what replicas exchange other than all gradients is not estimated."
            "\n  Leave sync out, or measure."
        )
    if layout.schedule == "terapipe":
        raise UsageError(
            "parallel.schedule = terapipe: what a slice of a sequence takes is not estimated."
            "\n  Choose another schedule, or measure; shoal simulate plays it with times that you give."
        )
    return run


# ---- what is said ----------------------------------------------------------------------------------------------------


def facts(estimate: Estimate, options: EstimateOptions) -> list[tuple[str, str]]:
    """The run in numbers, as (name, value)."""
    run, step = estimate.run, estimate.step_seconds
    machine = run.cluster.accelerator
    parameters = run.shape.parameters()
    tokens = options.tokens or 20 * parameters
    seconds = step * tokens / run.tokens
    flops = model_flops(run.shape, run.sequence_length, tokens)
    low, high = map(show_seconds, estimate.interval)
    least, most = map(show_bytes, estimate.memory_interval)
    found = [
        ("step", f"{show_seconds(step)}; in four of five cases between {low} and {high}"),
        ("tokens per second", f"{run.tokens / step:,.0f} ({run.tokens / step / run.cluster.size:,.0f} a device)"),
        ("MFU, of the dense peak", f"{100 * estimate.mfu:.1f} % ({100 * estimate.hfu:.1f} % with what is recomputed)"),
        ("memory of the fullest rank", f"{show_bytes(estimate.fullest.allocated)} allocated, "
         f"{show_bytes(estimate.fullest.reserved)} reserved, of {show_bytes(estimate.capacity)}; in four of five cases "
         f"between {least} and {most}"),
        (f"training on {tokens:.3g} tokens",
         f"{f'{seconds / DAY:,.1f} days' if seconds > DAY else show_seconds(seconds)}, {flops:.3g} FLOPs, "
         f"{petaflop_days(flops):{',.0f' if flops > 1e21 else '.3g'}} petaFLOP/s-days"),
    ]
    price = options.price or machine.dollars_per_hour
    if price:
        source = "" if options.price else f" ({machine.price_source})"
        cost = dollars(seconds, run.cluster.size, price)
        found.append(("money", f"${cost:,.0f} at ${price:g} an hour{source}"))
    if watts := run.cluster.watts or machine.watts:
        energy = kilowatt_hours(seconds, run.cluster.size, watts)
        shown = f"{energy / 1000:,.1f} MWh" if energy >= 1000 else f"{energy:.3g} kWh"
        of = "with its share of a node at its limit" if run.cluster.watts else "of the board alone"
        found.append(("energy", f"{shown}: {watts:,.0f} W each, {of}, times {PUE:g} for the building (PUE)"))
    return found


def lines(estimate: Estimate, options: EstimateOptions) -> list[str]:
    """All that is printed."""
    run, step = estimate.run, estimate.step_seconds
    head = [
        f"{options.model or 'model'}: {run.shape.parameters():,} parameters, {run.precision}, {run.optimizer}",
        f"{run.cluster.describe()}: {run.layout.equation()}, {run.layout.describe()}",
        f"{run.global_batch:,} sequences of {run.sequence_length:,} tokens a step, {run.microbatches} micro-batches of "
        f"{run.layout.micro_batch}",
        "",
    ]
    table = facts(estimate, options)
    width = max(len(name) for name, _ in table)
    body = [f"  {name:<{width}}  {value}" for name, value in table]
    times = [
        f"  {name:<{width}}  {show_seconds(seconds):>8}  {100 * seconds / step:5.1f} %"
        for name, seconds in estimate.breakdown.items() if seconds > ROUNDING * step
    ]
    memory = [
        f"  {name:<{width}}  {show_bytes(size):>8}" for name, size in vars(estimate.fullest).items() if size > 0
    ]
    advice = [f"  {change:<{width}}  {effect}" for change, effect in changes(estimate)]
    return [
        *head, *body, "", "where the time goes, on the busiest pipeline rank", *times,
        "", "where the memory goes, on the fullest", *memory, "", bound(estimate), *advice,
    ]


def bound(estimate: Estimate) -> str:
    """What holds the run back, in a sentence."""
    if not estimate.fits:
        what = max(vars(estimate.fullest).items(), key=lambda held: held[1])[0]
        return f"It does not fit; the largest part is '{what}'. What would change that:"
    (first, most), (second, next_most), *_ = sorted(estimate.breakdown.items(), key=lambda part: -part[1])
    then = f", then by {second}" if next_most > most / 10 else ""
    return f"Bound by {first}{then}. What changes would do:"


def changes(estimate: Estimate, most: int = 4) -> list[tuple[str, str]]:
    """Single changes of the layout that fit and are faster, or (where the run does not fit) that need least."""
    layout = estimate.run.layout
    tried: list[tuple[str, dict]] = [
        (f"micro_batch {n}", {"micro_batch": n})
        for n in (2 * layout.micro_batch, layout.micro_batch // 2) if n
    ]
    tried += [(f"zero {n}", {"zero": n}) for n in (0, 1, 3) if n != layout.zero and layout.dp > 1]
    tried += [(f"recompute {mode}", {"recompute": mode}) for mode in ("none", "selective", "full")]
    tried += [(f"tp {n}, dp {layout.dp * layout.tp // n}", {"tp": n, "dp": layout.dp * layout.tp // n})
              for n in (2 * layout.tp, layout.tp // 2) if n and layout.dp * layout.tp % n == 0]
    tried += [(f"pp {n}, dp {layout.dp * layout.pp // n}", {"pp": n, "dp": layout.dp * layout.pp // n})
              for n in (2 * layout.pp, layout.pp // 2) if n and layout.dp * layout.pp % n == 0]
    if layout.tp > 1:
        tried.append(("sequence_parallel", {"sequence_parallel": not layout.sequence_parallel}))
        tried += [(f"tp_x {n}", {"tp_x": n}) for n in (2 * layout.tp_x, layout.tp_x // 2) if n]
    if layout.pp > 1:
        tried += [(f"schedule {name}", {"schedule": name}) for name in ("interleaved-1f1b", "zb-h1")]
    found = []
    for text, change in tried:
        changed = layout.model_copy(update=change)
        if changed.tp == 1:
            changed = changed.model_copy(update={"sequence_parallel": False, "tp_x": 1})
        if changed == layout:
            continue
        try:
            other = Estimate(checked(replace(estimate.run, layout=changed)), known=estimate.known)
        except UsageError:
            continue
        if other.fits and (not estimate.fits or other.step_seconds < 0.99 * estimate.step_seconds):
            found.append((other.step_seconds, text, other))
    return [
        (text, f"{show_seconds(seconds)} a step ({100 * (seconds / estimate.step_seconds - 1):+.0f} %), "
         f"{show_bytes(other.fullest.reserved)}")
        for seconds, text, other in sorted(found, key=lambda entry: entry[:2])[:most]
    ] or [("", "no single change that was tried fits" if not estimate.fits else "none that was tried is faster")]
