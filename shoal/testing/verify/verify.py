"""Verify a run's layout, or randomly drawn ones, against one device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import psutil
import torch
from pydantic import PositiveInt
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.terminal import progress_bar, quote
from shoal.engine.device import pick_device, tune_process
from shoal.engine.optim.build import RULES
from shoal.launch.worker_pool import Pool
from shoal.report.tables import text_table
from shoal.spec.config import RunConfig, save_config
from shoal.testing.verify.case import Case, prepare, run_case
from shoal.testing.verify.compare import PLAIN, Mismatch, Verdict, describe_reference, find_row
from shoal.testing.verify.draw import MOST_RANKS, draw_run, draw_run_with
from shoal.testing.verify.faults import FAULTS, Fault
from shoal.testing.verify.own_model import verify_own_model
from shoal.testing.verify.reference import StepFacts

MAX_RANKS = 64  # processes on one machine
FAILURES = Path("verify-failures")  # folder of drawn runs that differ, to be verified alone
_LINE_EVERY = 20  # layouts between two lines of progress, without a bar
_BYTES_PER_PARAMETER = 8 * 6  # float64: weights, full and reduced gradients, two moments, the reference's value


@dataclass(frozen=True)
class Verification:
    """Result of a comparison with one device."""

    layouts: int  # compared
    differing: int  # of them
    worst_gradient: float  # largest relative error of a gradient
    findings: tuple[Mismatch, ...]  # of each layout in the order of a step

    def __repr__(self) -> str:
        """Return the numbers and the first finding: there may be one of each parameter in each step."""
        first = f", the first: {self.findings[0].text}" if self.findings else ""
        return (f"<Verification of {self.layouts} layout{'s' * (self.layouts != 1)}, {self.differing} differing: worst "
                f"gradient {self.worst_gradient:.1e}, {len(self.findings)} findings{first}>")

    @classmethod
    def from_verdicts(cls, verdicts: Sequence[Verdict]) -> Verification:
        differing, worst = sum(bool(v.findings) for v in verdicts), max(v.worst_gradient for v in verdicts)
        return cls(len(verdicts), differing, worst, tuple(finding for v in verdicts for finding in v.findings))

    @property
    def same(self) -> bool:
        """Whether every layout computes what one device computes."""
        return not self.differing


def verify(
    config: RunConfig,
    *,
    random: PositiveInt | None = None,
    rule: str | None = None,
    steps: PositiveInt = 3,
    own_precision: bool = False,
    inject: str | None = None,
    device: str = "cpu",
    show: bool = False,
) -> Verification:
    """Train a few steps on the ranks of a layout and on one device, which is the CPU, and compare all results.

    Args:
        config: the run; with ``random`` only its seed is used.
        random: verify this many randomly drawn runs instead, in float64. Runs that differ are written into
            ``verify-failures/``.
        rule: update rule of the drawn runs: a name, a comma-separated list or "all", each on ``random`` runs (default:
            drawn).
        steps: training steps to compare.
        own_precision: compare in the run's precision, to its rounding, instead of float64 to 1e-9.
        inject: name of a fault to inject on the ranks, which should be found.
        device: where the ranks compute: "cpu", "cuda" or "auto" (CUDA if available). If CUDA devices are fewer than
            ranks, ranks share them and exchange tensors through host memory (`shoal.engine.collectives.staged`).

    Raises:
        UsageError: the run cannot be verified here, or an unknown rule or fault.

    >>> import shoal
    >>> config = shoal.RunConfig(
    ...     model={"name": "tiny", "layers": 1, "hidden": 32, "heads": 2},
    ...     parallel={"tp": 2},
    ...     data={"source": "synthetic", "sequence_length": 16},
    ...     train={"global_batch": 2},
    ... )
    >>> shoal.verify(config, steps=1).same
    True
    """
    console = Console(highlight=False, soft_wrap=True) if show else Console(quiet=True, force_terminal=False)
    device = pick_device(device, setting="device").type
    if random is None:
        return _verify_run(console, config, rule, steps, own_precision, inject, device)
    if inject or own_precision:
        raise UsageError("--random draws its own runs in fp64: leave --inject and --precision own out.")
    rules = _rules(rule)
    with Pool(MOST_RANKS, device=device) as pool:
        found = [_verify_drawn(console, pool, random, steps, config.train.seed, name) for name in rules]
    return Verification.from_verdicts([verdict for verdicts in found for verdict in verdicts])


# ---- one run ---------------------------------------------------------------------------------------------------------


def _verify_run(
    console: Console, config: RunConfig, rule: str | None, steps: int, own_precision: bool, inject: str | None,
    device: str,
) -> Verification:
    if rule:
        raise UsageError(
            f"--rule {rule} applies only to the runs that --random draws."
            f"\n  Give --random N too, or set the rule of this run: --optimizer.name {rule}."
        )
    if config.parallel.sync != "all-reduce":
        raise UsageError(
            f"parallel.sync = '{config.parallel.sync}' is meant to compute something else than one device."
            "\n  Verify the layout with all-reduce; see docs/relaxed.md for the other methods."
        )
    if config.model.module:
        if own_precision or inject:
            raise UsageError("model.module: it is verified in fp64, without an injected fault.\n  Leave both out.")
        return Verification.from_verdicts([verify_own_model(console, config, steps, device)])
    case = prepare(config, own_precision=own_precision, device=device)
    _check_size(case)
    if inject:
        _check_fault(inject, case)
    print_case(console, case, steps)
    if inject:
        console.print(f"[bold]injected[/]  {inject}: {FAULTS[inject].what}")
    start = time.monotonic()
    setup = partial(tune_process, products=device == "cpu")  # as the ranks of the run
    with Pool(case.config.parallel.world_size, setup, device=device) as pool:
        verdict, facts = run_case(case, pool, steps=steps, inject=inject or "")
    if verdict.table:
        console.print(_count_tokens(case, facts))
        console.print(_tabulate_errors(case, verdict, facts))
    reference = describe_reference(case.config.parallel)
    verdict.print(console, case.config.train.precision, reference, time.monotonic() - start)
    if inject and not verdict.findings:
        console.print(f"[bold]injected[/]  {inject} has no effect here. {_needs(FAULTS[inject])}")
    return Verification.from_verdicts([verdict])


def _check_size(case: Case) -> None:
    layout = case.config.parallel
    if layout.world_size > MAX_RANKS:
        raise UsageError(
            f"parallel: {layout.equation()}; verify starts all of them on this machine, at most {MAX_RANKS}."
            "\n  Verify the same axes with smaller degrees: a difference at dp 64 also appears at dp 2 or 4."
        )
    # Each replica may hold everything (DDP), split over its tensor and pipeline ranks; with ZeRO less.
    replicas = layout.dp * layout.cp if case.config.train.device == "cpu" else 0  # in host memory
    needed = case.shape.parameters() * _BYTES_PER_PARAMETER * (replicas + 1)
    available = psutil.virtual_memory().available
    if needed > available:
        raise UsageError(
            f"model: {case.shape.parameters():,} parameters on {replicas} replicas and the reference need about "
            f"{needed / 2**30:.0f} GiB in float64; {available / 2**30:.0f} GiB are free."
            "\n  Verify a smaller model of the same kind: --model.layers 4 --model.hidden 256 --model.heads 8 ..."
        )


def _check_fault(name: str, case: Case) -> None:
    if name not in FAULTS:
        table = "\n".join(f"  {fault:<20}{FAULTS[fault].what}" for fault in FAULTS)
        near = did_you_mean(name, FAULTS)
        what = f"; {near}" if near.startswith("did") else ". All:"
        raise UsageError(f"--inject {name}: no such fault{what}\n{table}")
    layout = case.config.parallel
    if (needed := FAULTS[name].model) and getattr(case.shape, needed) is None:
        raise UsageError(f"--inject {name} has no effect in a model without {needed}.\n  {_needs(FAULTS[name])}")
    for key, value in FAULTS[name].needs.items():
        given = getattr(layout, key)
        if given != value if key in ("zero", "sequence_parallel", "tp_overlap", "schedule") else given < value:
            raise UsageError(f"--inject {name} has no effect with parallel.{key} = {given}.\n  {_needs(FAULTS[name])}")


_MODELS = {
    "experts": " --model.experts.count 4 --model.experts.capacity-factor 0.75",
    "depths": " --model.depths.capacity 0.5",
}


def _needs(fault: Fault) -> str:
    options = " ".join(f"--parallel.{key.replace('_', '-')} {value}" for key, value in fault.needs.items())
    options += _MODELS.get(fault.model, "")
    return f"It shows on a layout with {options}." if options else "It shows on any layout."


# ---- drawn runs ------------------------------------------------------------------------------------------------------


def _rules(given: str | None) -> list[str | None]:
    """Return the rules to draw runs for; None if the rule is drawn too."""
    if given is None:
        return [None]
    names = sorted(RULES) if given == "all" else [name.strip() for name in given.split(",")]
    for name in names:
        if name not in RULES:
            raise UsageError(f"--rule {given}: no rule '{name}'; {did_you_mean(name, [*RULES, 'all'])}")
    return [*names]


def _verify_drawn(
    console: Console, pool: Pool, count: int, steps: int, seed: int, optimizer: str | None
) -> list[Verdict]:
    """Verify drawn runs; print those that differ, and a summary."""
    start, differing, verdicts = time.monotonic(), 0, list[Verdict]()
    what, key = (f"{optimizer}: ", f"{optimizer}:") if optimizer else ("", "")
    bar = progress_bar(f"{what}layouts drawn from seed {seed}") if console.is_terminal else nullcontext()
    with bar as show:
        for i in range(count):
            if show:
                show(i / count, f"{i} of {count}, {differing} differ")
            choose = Random(f"{key}{seed}:{i}").choice
            run = draw_run_with(optimizer, choose) if optimizer else draw_run(choose)
            case = prepare(run, own_precision=False, accumulate=False, device=pool.device)
            verdict, _ = run_case(case, pool, steps=steps)
            verdicts.append(verdict)
            if verdict.findings:
                differing += 1
                FAILURES.mkdir(exist_ok=True)
                file = FAILURES / f"{f'{optimizer}-' if optimizer else ''}seed-{seed}-draw-{i}.toml"
                save_config(run, file)
                console.print(
                    f"[bold red]differs[/]  {run.parallel.describe()}: {verdict.findings[0].text}\n"
                    f"         again: shoal verify {quote(file)}"
                )
            if not show and (i + 1) % _LINE_EVERY == 0:
                console.print(f"{i + 1} of {count} layouts, {differing} differ, {time.monotonic() - start:.0f} s")
    colour, worst = "red" if differing else "green", Verification.from_verdicts(verdicts).worst_gradient
    console.print(
        f"[bold {colour}]{what}{count} layouts, {differing} differ[/]; largest relative error of a gradient "
        f"{worst:.1e}; {steps} steps each, {time.monotonic() - start:.0f} s"
    )
    return verdicts


# ---- output ----------------------------------------------------------------------------------------------------------


def print_case(console: Console, case: Case, steps: int) -> None:
    config, layout = case.config, case.config.parallel
    microbatches = layout.microbatches(config.train.global_batch)
    console.print(f"[bold]layout[/]    {escape(layout.describe())}: {layout.equation()}, recompute {layout.recompute}")
    console.print(f"[bold]model[/]     {case.shape.family}, {case.shape.parameters():,} parameters")
    console.print(
        f"[bold]data[/]      {config.train.global_batch} sequences of {config.data.sequence_length} tokens a step: "
        f"{microbatches} micro-batches of {layout.micro_batch} on each of {layout.dp} replica{'s' * (layout.dp > 1)}"
    )
    own = config.optimizer.name + " and clipping" * (config.optimizer.clip_norm > 0)
    console.print(
        f"[bold]compared[/]  {steps} steps in {config.train.precision} with plain SGD, and with {own}, "
        f"against {describe_reference(layout)} in fp64"
    )
    if config.train.device == "cuda":
        ranks, devices = layout.world_size, torch.cuda.device_count()
        shared = ", shared by ranks that exchange tensors through host memory" if ranks > devices else ""
        console.print(f"[bold]devices[/]   {ranks} ranks on {min(ranks, devices)} of {devices} CUDA devices{shared}")
    for note in case.notes:
        console.print(f"[bold]note[/]      {escape(note)}")


def _count_tokens(case: Case, facts: dict[str, list[StepFacts]]) -> str:
    """Return a line with the unmasked tokens of each replica in the first step."""
    layout, tokens = case.config.parallel, facts[PLAIN][0].tokens
    counts = [
        sum(n for i, n in enumerate(tokens) if i // layout.micro_batch % layout.dp == replica)
        for replica in range(layout.dp)
    ]
    total = len(tokens) * case.config.data.sequence_length
    return f"[bold]tokens[/]    unmasked in step 0, by replica: {', '.join(map(str, counts))} (of {total} in total)"


def _tabulate_errors(case: Case, verdict: Verdict, facts: dict[str, list[StepFacts]]) -> Table:
    """Return the table of the largest errors, in the order of the model."""
    own = case.config.optimizer.name
    columns = {"gradient": "gradient", "weight, plain SGD": f"weight {PLAIN}", f"weight, {own}": f"weight {own}"}
    rows = []
    for row in dict.fromkeys(["loss", "gradient norm", *map(find_row, facts[PLAIN][0].gradients)]):
        errors = [verdict.table.get((row, column)) for column in columns.values()]
        rows.append([row, *("" if error is None else f"{error:.1e}" for error in errors)])
    return text_table(["", *columns], rows, title="largest relative error", lines=True)
