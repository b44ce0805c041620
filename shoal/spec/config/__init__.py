"""Typed configuration of one run, from its TOML file and the command line.

Each field is described by the docstring below it; ``shoal train --help`` prints them. Unknown keys are rejected, and
the error suggests the nearest existing key.
"""

from shoal.spec.config.model import DepthsConfig, ExpertsConfig, ModelConfig
from shoal.spec.config.run import RUN_FILE, RUNS, RunConfig, build_config, load_config, save_config
from shoal.spec.config.sections import (
    CheckpointConfig,
    DataConfig,
    FailoverConfig,
    Float8Config,
    LossScaleConfig,
    MetricsConfig,
    OptimizerConfig,
    Precision,
    RelaxedConfig,
    TestingConfig,
    TrainConfig,
)

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
    "TestingConfig",
    "TrainConfig",
    "build_config",
    "load_config",
    "save_config",
]
