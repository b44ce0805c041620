"""shoal: train one transformer language model on many devices.

This is the Python API. Every name is imported on first use, so that ``import shoal`` loads neither torch nor numpy.
Commands call the same functions; ``docs/api.md`` lists them with examples.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shoal.base.errors import UsageError
    from shoal.pipeline.checker import check_program
    from shoal.pipeline.program import Program, build_program
    from shoal.pipeline.schedules import SCHEDULES
    from shoal.pipeline.simulator import simulate
    from shoal.spec.catalog import model_shape
    from shoal.spec.catalog.clusters import cluster
    from shoal.spec.config import RunConfig, load_config, save_config
    from shoal.spec.layout import Layout

_HOMES = {
    # what a run is
    "Layout": "shoal.spec.layout",
    "RunConfig": "shoal.spec.config",
    "load_config": "shoal.spec.config",
    "save_config": "shoal.spec.config",
    "model_shape": "shoal.spec.catalog",
    "cluster": "shoal.spec.catalog.clusters",
    "UsageError": "shoal.base.errors",
    # pipelines
    "SCHEDULES": "shoal.pipeline.schedules",
    "Program": "shoal.pipeline.program",
    "build_program": "shoal.pipeline.program",
    "check_program": "shoal.pipeline.checker",
    "simulate": "shoal.pipeline.simulator",
}
"""The module of each public name."""

__all__ = [
    "SCHEDULES",
    "Layout",
    "Program",
    "RunConfig",
    "UsageError",
    "__version__",
    "build_program",
    "check_program",
    "cluster",
    "load_config",
    "model_shape",
    "save_config",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'shoal' has no attribute '{name}'; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
