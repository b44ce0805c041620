"""The typed description of one run: what the TOML file and the command line set, and nothing else.

Every field has its meaning below it; ``shoal train --help`` prints them. Keys that do not exist are refused
with the nearest that does.
"""

from shoal.config.data import DataConfig
from shoal.config.failover import FailoverConfig
from shoal.config.model import DepthsConfig, ExpertsConfig, ModelConfig
from shoal.config.optimizer import OptimizerConfig
from shoal.config.precision import Float8Config, LossScaleConfig, Precision
from shoal.config.relaxed import RelaxedConfig
from shoal.config.run import RUN_FILE, RunConfig, build, load, save
from shoal.config.section import Section, plain, validate
from shoal.config.train import CheckpointConfig, MetricsConfig, TrainConfig

__all__ = [
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
    "Section",
    "TrainConfig",
    "build",
    "load",
    "plain",
    "save",
    "validate",
]
