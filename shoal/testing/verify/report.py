"""The verdict on the screen: the layout, a table of the largest errors, and the first difference if there is one."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.pipeline.schedules import ASYNCHRONOUS
from shoal.testing.verify.case import Case
from shoal.testing.verify.compare import PLAIN, TOLERANCES, Verdict, row_of
from shoal.testing.verify.reference import StepFacts


def print_case(console: Console, case: Case, steps: int) -> None:
    """Print what will be compared."""
    config, layout = case.config, case.config.parallel
    microbatches = layout.microbatches(config.train.global_batch)
    console.print(f"[bold]layout[/]    {escape(layout.describe())}: {layout.equation()}, recompute {layout.recompute}")
    console.print(f"[bold]model[/]     {case.shape.family}, {case.shape.parameters():,} parameters")
    console.print(
        f"[bold]data[/]      {config.train.global_batch} sequences of {config.data.sequence_length} tokens a step: "
        f"{microbatches} micro-batches of {layout.micro_batch} on each of {layout.dp} replicas"
    )
    own = config.optimizer.name + " and clipping" * (config.optimizer.clip_norm > 0)
    console.print(
        f"[bold]compared[/]  {steps} steps in {config.train.precision} with plain SGD, and with {own}, "
        f"against {_reference(case)} in fp64"
    )
    for note in case.notes:
        console.print(f"[bold]note[/]      {escape(note)}")


def print_verdict(
    console: Console, case: Case, verdict: Verdict, facts: dict[str, list[StepFacts]], seconds: float
) -> None:
    """Print the table of errors, and the verdict in one line."""
    tolerance = TOLERANCES[case.config.train.precision]
    if verdict.table:
        console.print(_uneven(case, facts))
        console.print(_table(case, verdict, facts))
    if not verdict.findings:
        console.print(
            f"[bold green]the same[/]  as {_reference(case)}: every gradient to {verdict.worst_gradient:.1e} "
            f"(allowed {tolerance.gradient:.0e}), {seconds:.1f} s"
        )
        return
    first = verdict.findings[0]
    console.print(f"[bold red]differs[/]   first at {escape(first.text)}")
    if len(first.ranks) > 1:
        console.print(f"          ranks: {escape('; '.join(first.ranks[:8]))}{' ...' if len(first.ranks) > 8 else ''}")
    places = {(f.rule, f.step, f.phase, f.place) for f in verdict.findings}
    console.print(f"          {len(places)} differences beyond {tolerance.gradient:.0e} in all, {seconds:.1f} s")


def _reference(case: Case) -> str:
    """What the run is compared with, in words."""
    versions = case.config.parallel.schedule in ASYNCHRONOUS
    return "one device with the same stale weights" if versions else "one device"


def _uneven(case: Case, facts: dict[str, list[StepFacts]]) -> str:
    """How many tokens count on each replica in the first step."""
    layout, tokens = case.config.parallel, facts[PLAIN][0].tokens
    counts = [
        sum(n for i, n in enumerate(tokens) if i // layout.micro_batch % layout.dp == replica)
        for replica in range(layout.dp)
    ]
    of = len(tokens) * case.config.data.sequence_length
    return f"[bold]tokens[/]    that count in step 0, by replica: {', '.join(map(str, counts))} (of {of} in all)"


def _table(case: Case, verdict: Verdict, facts: dict[str, list[StepFacts]]) -> Table:
    """The largest errors, in the order of the model."""
    own = case.config.optimizer.name
    columns = {"gradient": "gradient", "weight, plain SGD": f"weight {PLAIN}", f"weight, {own}": f"weight {own}"}
    table = Table("", title="largest relative error", title_justify="left", title_style="bold")
    for heading in columns:
        table.add_column(heading, justify="right")
    for row in dict.fromkeys(["loss", "gradient norm", *map(row_of, facts[PLAIN][0].gradients)]):
        errors = [verdict.table.get((row, column)) for column in columns.values()]
        table.add_row(row, *("" if error is None else f"{error:.1e}" for error in errors))
    return table
