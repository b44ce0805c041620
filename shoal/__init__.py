"""shoal: train one transformer language model on many devices.

This is the Python API. Every name is imported on first use, so that ``import shoal`` loads neither torch nor numpy.
Commands call the same functions; ``docs/api.md`` lists them with examples.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shoal.base.errors import UsageError
    from shoal.engine.checkpoint.whole import describe_checkpoint, load_checkpoint, verify_checkpoint
    from shoal.engine.data.prepare import describe_data, train_tokenizer
    from shoal.labs.autoshard.operators import plan_operators
    from shoal.labs.calibration.calibrate import calibrate
    from shoal.labs.explain.subjects import explain
    from shoal.labs.validate.by_dry_run import dry_run
    from shoal.labs.validate.validation import validate_estimates
    from shoal.launch.train import train
    from shoal.pipeline.checker import check_program
    from shoal.pipeline.program import Program, build_program
    from shoal.pipeline.schedules import SCHEDULES
    from shoal.pipeline.simulator import simulate
    from shoal.pipeline.simulator.compare import compare_schedules
    from shoal.planning.describe import estimate
    from shoal.planning.goodput.forecast import goodput
    from shoal.planning.schedule_times import compare_schedules_on_cluster
    from shoal.planning.search.planner import LayoutPlanner, plan
    from shoal.report.run.report import write_report
    from shoal.spec.catalog import model_shape
    from shoal.spec.catalog.clusters import cluster
    from shoal.spec.catalog.tables import add_catalog
    from shoal.spec.config import RunConfig, load_config, save_config
    from shoal.spec.layout import Layout
    from shoal.testing.chaos.run import chaos
    from shoal.testing.verify.verify import verify
    from shoal.training.sample import sample

_HOMES = {
    # what a run is
    "Layout": "shoal.spec.layout",
    "RunConfig": "shoal.spec.config",
    "load_config": "shoal.spec.config",
    "save_config": "shoal.spec.config",
    "model_shape": "shoal.spec.catalog",
    "cluster": "shoal.spec.catalog.clusters",
    "add_catalog": "shoal.spec.catalog.tables",
    "UsageError": "shoal.base.errors",
    # pipelines
    "SCHEDULES": "shoal.pipeline.schedules",
    "Program": "shoal.pipeline.program",
    "build_program": "shoal.pipeline.program",
    "check_program": "shoal.pipeline.checker",
    "simulate": "shoal.pipeline.simulator",
    "compare_schedules": "shoal.pipeline.simulator.compare",
    "compare_schedules_on_cluster": "shoal.planning.schedule_times",
    # before a run
    "estimate": "shoal.planning.describe",
    "plan": "shoal.planning.search.planner",
    "LayoutPlanner": "shoal.planning.search.planner",
    "plan_operators": "shoal.labs.autoshard.operators",
    "goodput": "shoal.planning.goodput.forecast",
    "dry_run": "shoal.labs.validate.by_dry_run",
    "calibrate": "shoal.labs.calibration.calibrate",
    "validate_estimates": "shoal.labs.validate.validation",
    "explain": "shoal.labs.explain.subjects",
    # a run, its data and its checkpoints
    "train": "shoal.launch.train",
    "verify": "shoal.testing.verify.verify",
    "chaos": "shoal.testing.chaos.run",
    "sample": "shoal.training.sample",
    "write_report": "shoal.report.run.report",
    "train_tokenizer": "shoal.engine.data.prepare",
    "describe_data": "shoal.engine.data.prepare",
    "load_checkpoint": "shoal.engine.checkpoint.whole",
    "verify_checkpoint": "shoal.engine.checkpoint.whole",
    "describe_checkpoint": "shoal.engine.checkpoint.whole",
}
"""The module of each public name."""

__all__ = [
    "SCHEDULES",
    "Layout",
    "LayoutPlanner",
    "Program",
    "RunConfig",
    "UsageError",
    "__version__",
    "add_catalog",
    "build_program",
    "calibrate",
    "chaos",
    "check_program",
    "cluster",
    "compare_schedules",
    "compare_schedules_on_cluster",
    "describe_checkpoint",
    "describe_data",
    "dry_run",
    "estimate",
    "explain",
    "goodput",
    "load_checkpoint",
    "load_config",
    "model_shape",
    "plan",
    "plan_operators",
    "sample",
    "save_config",
    "simulate",
    "train",
    "train_tokenizer",
    "validate_estimates",
    "verify",
    "verify_checkpoint",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'shoal' has no attribute '{name}'; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
