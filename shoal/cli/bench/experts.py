"""`shoal bench experts`: grouped experts against a loop over them; with --learning, Switch against dense."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Literal

from pydantic import PositiveInt
from rich.console import Console
from rich.table import Table

from shoal.base.errors import UsageError
from shoal.base.options import reject_unused
from shoal.base.section import NonEmpty, Section
from shoal.engine.cpu_tuning import tune_process
from shoal.engine.device import pick_device
from shoal.labs.bench.experts import measure
from shoal.labs.bench.learning import switch
from shoal.labs.bench.progress import telling

TARGETS = {8: 1.0, 64: 1.5}
"""How many times as fast as the loop the grouped experts are at least, on CPU, by experts of a layer."""


class ExpertsOptions(Section):
    """Experts as one grouped computation against a loop; --learning: Switch against dense, loss against steps."""

    experts: NonEmpty[PositiveInt] = (8, 64)
    """Experts of the layer (with --learning the first counts)."""

    per_token: PositiveInt = 2
    """Experts of a token."""

    tokens: PositiveInt = 1024
    """Tokens."""

    hidden: PositiveInt = 256
    """Width of the residual stream."""

    width: PositiveInt = 4096
    """Of all experts of a layer together: more of them are finer ones (Dai et al. 2024, "DeepSeekMoE")."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """fp32 or bf16."""

    repeats: PositiveInt = 15
    """Measurements of each, in turn; medians count."""

    device: str = "auto"
    """auto, cpu or cuda."""

    learning: bool = False
    """Train a dense model and a Switch model with the same FLOPs per token instead; exit code 1 if Switch does not
    reach the dense model's loss in fewer steps."""

    seeds: PositiveInt = 3
    """learning: runs of each, with seeds from 0."""

    steps: PositiveInt = 1200
    """learning: steps of each run."""

    shape: tuple[PositiveInt, PositiveInt, PositiveInt] = switch.SHAPE
    """learning: layers, width, and width of the dense block and of an expert."""

    out: Path | None = None
    """learning: a folder for switch.csv and switch.svg."""


def experts(options: ExpertsOptions, console: Console) -> int:
    """Run the measurement or the experiment.

    Raises:
        UsageError: options of the other, or that do not go together.
    """
    for unread, names, why in (
        (not options.learning, ("seeds", "steps", "shape", "out"), "of --learning, which is not given"),
        (options.learning, ("per_token", "tokens", "hidden", "width", "precision", "repeats", "device"),
         "of the measurement, in whose place --learning trains"),
    ):  # fmt: skip
        if unread:
            reject_unused(options, names, why)
    if options.learning:
        return _learning(options, console)
    device = pick_device(options.device)
    if options.per_token > min(options.experts):
        raise UsageError(f"bench experts --per-token {options.per_token}: more than --experts {min(options.experts)}.")
    if uneven := [count for count in options.experts if options.width % count]:
        raise UsageError(f"bench experts --width {options.width} is not a multiple of --experts {uneven[0]}.")
    tune_process()  # as training does, for both
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", title_justify="left",
                  title=f"{options.tokens} tokens, k {options.per_token}, h {options.hidden}, "
                        f"{options.precision} on {device.type}")
    columns = "experts", "width", "loop ms", "grouped ms", "loop / grouped", "quartiles", "wanted", "off"
    for column in columns:
        table.add_column(column, justify="right")
    missed = False
    for count in options.experts:
        found = measure(
            count, options.precision, device, per_token=options.per_token, tokens=options.tokens,
            hidden=options.hidden, ffn=options.width // count, repeats=options.repeats,
        )
        target = TARGETS.get(count) if device.type == "cpu" else None
        missed |= target is not None and found.ratio < target
        table.add_row(
            str(count), str(options.width // count), f"{1e3 * found.seconds['loop']:.2f}",
            f"{1e3 * found.seconds['grouped']:.2f}", f"{found.ratio:.2f}", "{:.2f}-{:.2f}".format(*found.spread),
            f"{target:.1f}" if target else "", f"{found.difference:.0e}",
        )
    console.print(table)
    return 1 if missed else 0


def _learning(options: ExpertsOptions, console: Console) -> int:
    if options.out is not None and not options.out.is_dir():
        raise UsageError(f"bench experts --out {options.out}: there is no such folder.")
    layers, hidden, _ = options.shape
    if layers < 2 or hidden % 8:
        raise UsageError(f"bench experts --shape {layers} {hidden} ..: every other layer has experts, and there are 4 "
                         "heads of an even width.\n  Use 2 layers or more, and a width that is a multiple of 8.")
    every = max(1, options.steps // 20)
    with telling(console) as tell:
        runs = switch.measure(
            options.seeds, steps=options.steps, every=every, experts=options.experts[0], shape=options.shape,
            say=tell,
        )
    for kind in switch.KINDS:
        mine = [run for run in runs if run.kind == kind]
        console.print(
            f"{kind:<7} {mine[0].parameters:,} parameters, {mine[0].flops:,} FLOPs per token, validation loss after "
            f"{options.steps} steps {mean(run.losses[-1] for run in mine):.3f}, dropped "
            f"{mean(run.dropped for run in mine):.1%}"
        )
    rows = switch.steps_to_dense(runs)
    table = Table(title="steps of Switch until it has the dense model's last loss")
    for column in ("seed", "dense model's loss", f"steps, of {options.steps}", "times fewer"):
        table.add_column(column, justify="right")
    for seed, loss, steps in rows:
        table.add_row(str(seed), f"{loss:.3f}", f"{steps:.0f}", f"{options.steps / steps:.2f}")
    console.print(table)
    if options.out:
        switch.write_csv(runs, options.out / "switch.csv")
        title = f"Switch ({options.experts[0]} experts) against dense, {options.seeds} seeds"
        (options.out / "switch.svg").write_text(switch.draw(runs, title))
    return 0 if all(steps < options.steps for _, _, steps in rows) else 1
