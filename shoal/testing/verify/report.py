"""Print the verdict: the layout, a table of the largest errors, and the first difference, if any."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal.pipeline.schedules import ASYNCHRONOUS
from shoal.report.tables import text_table
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
    """Print the table of errors and the verdict."""
    tolerance = TOLERANCES[case.config.train.precision]
    if verdict.table:
        console.print(_count_tokens(case, facts))
        console.print(_tabulate_errors(case, verdict, facts))
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
    versions = case.config.parallel.schedule in ASYNCHRONOUS
    return "one device with the same stale weights" if versions else "one device"


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
    for row in dict.fromkeys(["loss", "gradient norm", *map(row_of, facts[PLAIN][0].gradients)]):
        errors = [verdict.table.get((row, column)) for column in columns.values()]
        rows.append([row, *("" if error is None else f"{error:.1e}" for error in errors)])
    return text_table(["", *columns], rows, title="largest relative error", lines=True)
