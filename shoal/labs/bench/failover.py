"""The time from the loss of a rank to the end of the next step, by kind of recovery, ranks and model."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median
from typing import Any

from pydantic import PositiveInt
from rich.console import Console

from shoal.base.files import check_writable
from shoal.base.units import parse_counts
from shoal.labs.bench.benchmark import Benchmark, Notify, Row, choose_names, make_table, write_records
from shoal.labs.bench.race import quartiles
from shoal.spec.catalog import model_shape
from shoal.spec.config import RunConfig
from shoal.testing.chaos.run import chaos

RECOVERIES: dict[str, dict[str, Any]] = {
    "survivors, memory": {"memory_every": 1},
    "survivors, memory, a spare": {"memory_every": 1, "spares": 1},
    "survivors, memory, fewer replicas": {"memory_every": 1, "shrink": "replicas"},
    "survivors, disk": {},
    "all ranks, memory": {"memory_every": 1, "recovery_timeout_seconds": 0},
    "all ranks, disk": {"recovery_timeout_seconds": 0},
}
"""Fields of section [failover] by recovery: who keeps its process or is started again, and where the state is."""

STEPS, SAVE_EVERY = 8, 2


class FailoverBenchmark(Benchmark):
    """The time from the loss of a rank to the end of the next step: survivors keep their processes, or all ranks start
    again, with the state in memory or on disk."""

    ranks: str = "2,4"
    """Comma-separated numbers of ranks (data parallel, ZeRO-1)."""

    models: str = "tiny"
    """Comma-separated models of the catalog."""

    recoveries: str = "all"
    """Recoveries, separated by semicolons: survivors, memory; survivors, disk; all ranks, memory; all ranks, disk."""

    trials: PositiveInt = 5
    """Losses of each: a rank is killed in a backward at a random step."""

    out: Path | None = None
    """File for the results (.csv or .json)."""

    def run(self, console: Console, notify: Notify) -> bool:
        check_writable(self.out, "--out", ".csv", ".json")
        recoveries = choose_names(self.recoveries, RECOVERIES, "--recoveries", ";")
        models = [name.strip() for name in self.models.split(",")]
        for model in models:
            model_shape(model)  # rejects an unknown model
        rows = [
            self.measure(recovery, model, ranks, notify)
            for model in models for ranks in parse_counts(self.ranks, where="--ranks") for recovery in recoveries
        ]
        console.print(make_table("from the loss of a rank to the end of the next step", rows, above="model"))
        costs = ",".join(f"{row['recovery'].replace(', ', ' ')}={row['seconds, median']:.2f}s" for row in rows
                         if (row["model"], row["ranks"]) == (rows[-1]["model"], rows[-1]["ranks"]))
        console.print(f"what they cost in a long run:\n  shoal goodput --restart '{costs}'", highlight=False,
                      soft_wrap=True)
        if self.out:
            write_records(rows, self.out)
        return all(row["survived"] == self.trials for row in rows)

    def measure(self, recovery: str, model: str, ranks: int, notify: Notify) -> Row:
        """Lose ranks of runs with one kind of recovery, and return a row of the table."""
        notify(f"{model} on {ranks} ranks: {recovery}")
        shape = model_shape(model)
        config = RunConfig.model_validate({
            "model": {"name": model}, "parallel": {"dp": ranks, "zero": 1},
            "data": {"source": "synthetic", "sequence_length": min(128, shape.max_sequence)},
            "train": {"steps": STEPS, "global_batch": ranks}, "checkpoint": {"every": SAVE_EVERY},
            "failover": {"node_ranks": 1} | RECOVERIES[recovery],
        })  # fmt: skip
        found = chaos(config, trials=self.trials, faults="kill-backward")
        seconds = [each for trial in found.trials for each in trial.seconds]
        low, high = quartiles(seconds) if seconds else (None, None)
        lost = [steps for trial in found.trials for steps in trial.lost]
        return {
            "model": f"{model}, {shape.parameters() / 1e6:,.1f}M parameters", "ranks": ranks, "recovery": recovery,
            "losses": self.trials, "survived": len(found.trials) - found.failed,
            "in process": sum(trial.in_process for trial in found.trials),
            "seconds, median": median(seconds) if seconds else None, "first quartile": low, "third": high,
            "most": max(seconds, default=None), "steps lost, mean": mean(lost) if lost else None,
        }  # fmt: skip
