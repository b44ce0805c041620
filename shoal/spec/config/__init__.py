"""The typed description of one run: what the TOML file and the command line set, and nothing else.

Every field has its meaning below it; ``shoal train --help`` prints them. Keys that do not exist are refused
with the nearest that does.

Each file of this room is imported when something of it is asked for: to make all sections takes a third of the time of
an estimate, which reads two of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.spec.config.data import DataConfig
    from shoal.spec.config.failover import FailoverConfig
    from shoal.spec.config.model import DepthsConfig, ExpertsConfig, ModelConfig
    from shoal.spec.config.optimizer import OptimizerConfig
    from shoal.spec.config.precision import Float8Config, LossScaleConfig, Precision
    from shoal.spec.config.relaxed import RelaxedConfig
    from shoal.spec.config.run import RUN_FILE, RUNS, RunConfig, build_config, load_config, save_config
    from shoal.spec.config.train import CheckpointConfig, MetricsConfig, TrainConfig

_FILES = {
    "data": ("DataConfig",),
    "failover": ("FailoverConfig",),
    "model": ("DepthsConfig", "ExpertsConfig", "ModelConfig"),
    "optimizer": ("OptimizerConfig",),
    "precision": ("Float8Config", "LossScaleConfig", "Precision"),
    "relaxed": ("RelaxedConfig",),
    "run": ("RUN_FILE", "RUNS", "RunConfig", "build_config", "load_config", "save_config"),
    "train": ("CheckpointConfig", "MetricsConfig", "TrainConfig"),
}


def __getattr__(name: str) -> Any:
    for file, names in _FILES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{file}"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")


__all__ = [
    "RUNS",
    "RUN_FILE",
    "CheckpointConfig",
    "DataConfig",
    "DepthsConfig",
    "ExpertsConfig",
    "FailoverConfig",
    "Float8Config",
    "LossScaleConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Precision",
    "RelaxedConfig",
    "RunConfig",
    "TrainConfig",
    "build_config",
    "load_config",
    "save_config",
]
