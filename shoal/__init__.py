"""shoal: train one transformer language model on many devices.

This is the Python API. Every name is imported on first use, so that ``import shoal`` loads neither torch nor numpy.
Commands call the same functions; ``docs/api.md`` lists them with examples.
"""

from functools import cache
from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shoal.base.errors import UsageError as UsageError
    from shoal.engine.checkpoint.load import describe_checkpoint as describe_checkpoint
    from shoal.engine.checkpoint.load import load_checkpoint as load_checkpoint
    from shoal.engine.checkpoint.load import verify_checkpoint as verify_checkpoint
    from shoal.engine.data.prepare import describe_data as describe_data
    from shoal.engine.data.prepare import export_megatron as export_megatron
    from shoal.engine.data.prepare import train_tokenizer as train_tokenizer
    from shoal.engine.own.definition import OwnModel as OwnModel
    from shoal.labs.autoshard.operators import plan_operators as plan_operators
    from shoal.labs.calibration.calibrate import calibrate as calibrate
    from shoal.labs.explain.subjects import explain as explain
    from shoal.labs.validate.by_dry_run import dry_run as dry_run
    from shoal.labs.validate.validation import validate_estimates as validate_estimates
    from shoal.launch.inference import evaluate as evaluate
    from shoal.launch.inference import evaluate_tasks as evaluate_tasks
    from shoal.launch.inference import open_chat as open_chat
    from shoal.launch.inference import sample as sample
    from shoal.launch.submit.submission import submit as submit
    from shoal.launch.train import train as train
    from shoal.pipeline.checker import check_program as check_program
    from shoal.pipeline.partition import pipedream_partition as pipedream_partition
    from shoal.pipeline.program import Program as Program
    from shoal.pipeline.program import build_program as build_program
    from shoal.pipeline.schedules import SCHEDULES as SCHEDULES
    from shoal.pipeline.simulator import simulate as simulate
    from shoal.pipeline.simulator.compare import compare_schedules as compare_schedules
    from shoal.planning.describe import estimate as estimate
    from shoal.planning.full_training import train_fully as train_fully
    from shoal.planning.goodput import goodput as goodput
    from shoal.planning.own_estimate import estimate_own_model as estimate_own_model
    from shoal.planning.schedule_times import compare_schedules_on_cluster as compare_schedules_on_cluster
    from shoal.planning.search.planner import LayoutPlanner as LayoutPlanner
    from shoal.planning.search.planner import plan as plan
    from shoal.report.run import write_report as write_report
    from shoal.report.watch import watch as watch
    from shoal.spec.catalog import model_shape as model_shape
    from shoal.spec.catalog.clusters import cluster as cluster
    from shoal.spec.catalog.tables import add_catalog as add_catalog
    from shoal.spec.cluster_job import ClusterJob as ClusterJob
    from shoal.spec.config import RunConfig as RunConfig
    from shoal.spec.config import load_config as load_config
    from shoal.spec.config import save_config as save_config
    from shoal.spec.layout import Layout as Layout
    from shoal.testing.chaos.run import chaos as chaos
    from shoal.testing.own_dry_run import dry_run_own_model as dry_run_own_model
    from shoal.testing.own_run import AdamW as AdamW
    from shoal.testing.own_run import Run as Run
    from shoal.testing.verify.verify import verify as verify
    from shoal.training.hugging_face import export_gguf as export_gguf
    from shoal.training.hugging_face import export_hf as export_hf
    from shoal.training.hugging_face import import_hf as import_hf

_HOMES = {
    "shoal.base.errors": ("UsageError",),
    "shoal.engine.checkpoint.load": ("describe_checkpoint", "load_checkpoint", "verify_checkpoint"),
    "shoal.engine.data.prepare": ("describe_data", "export_megatron", "train_tokenizer"),
    "shoal.engine.own.definition": ("OwnModel",),
    "shoal.labs.autoshard.operators": ("plan_operators",),
    "shoal.labs.calibration.calibrate": ("calibrate",),
    "shoal.labs.explain.subjects": ("explain",),
    "shoal.labs.validate.by_dry_run": ("dry_run",),
    "shoal.labs.validate.validation": ("validate_estimates",),
    "shoal.launch.inference": ("evaluate", "evaluate_tasks", "open_chat", "sample"),
    "shoal.launch.submit.submission": ("submit",),
    "shoal.launch.train": ("train",),
    "shoal.pipeline.checker": ("check_program",),
    "shoal.pipeline.partition": ("pipedream_partition",),
    "shoal.pipeline.program": ("Program", "build_program"),
    "shoal.pipeline.schedules": ("SCHEDULES",),
    "shoal.pipeline.simulator": ("simulate",),
    "shoal.pipeline.simulator.compare": ("compare_schedules",),
    "shoal.planning.describe": ("estimate",),
    "shoal.planning.full_training": ("train_fully",),
    "shoal.planning.goodput": ("goodput",),
    "shoal.planning.own_estimate": ("estimate_own_model",),
    "shoal.planning.schedule_times": ("compare_schedules_on_cluster",),
    "shoal.planning.search.planner": ("LayoutPlanner", "plan"),
    "shoal.report.run": ("write_report",),
    "shoal.report.watch": ("watch",),
    "shoal.spec.catalog": ("model_shape",),
    "shoal.spec.catalog.clusters": ("cluster",),
    "shoal.spec.catalog.tables": ("add_catalog",),
    "shoal.spec.cluster_job": ("ClusterJob",),
    "shoal.spec.config": ("RunConfig", "load_config", "save_config"),
    "shoal.spec.layout": ("Layout",),
    "shoal.testing.chaos.run": ("chaos",),
    "shoal.testing.own_dry_run": ("dry_run_own_model",),
    "shoal.testing.own_run": ("AdamW", "Run"),
    "shoal.testing.verify.verify": ("verify",),
    "shoal.training.hugging_face": ("export_gguf", "export_hf", "import_hf"),
}
"""The public names of each module."""

__all__ = ["__version__", *(name for names in _HOMES.values() for name in names)]


if not TYPE_CHECKING:  # so that a type checker reports names that do not exist

    def __getattr__(name: str) -> Any:
        for module, names in _HOMES.items():
            if name in names:
                value = getattr(import_module(module), name)
                return _make_public(name, value) if isinstance(value, FunctionType) else value
        from shoal.base.errors import did_you_mean

        raise AttributeError(f"module 'shoal' has no attribute '{name}'; {did_you_mean(name, __all__)}")


@cache
def _make_public(name: str, function: FunctionType) -> Any:
    """Return a function that checks its arguments, under its public name, by which it is pickled."""
    from shoal.base.calls import check_arguments

    public: Any = check_arguments(function)
    public.__module__, public.__qualname__ = __name__, name
    return public


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
