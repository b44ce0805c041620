"""Typed configuration of one run, from its TOML file and the command line.

Each field is described by the docstring below it; ``shoal train --help`` prints them. Unknown keys are rejected, and
the error suggests the nearest existing key.
"""

from shoal.spec.config.data import DataConfig, MixtureSource, SourceConfig
from shoal.spec.config.run import (
    RUN_FILE,
    RUNS,
    SAVED,
    RunConfig,
    build_config,
    load_config,
    save_config,
    suggest_resume,
    suggest_run,
)
from shoal.spec.config.sections import FailoverConfig, Float8Config, OptimizerConfig

__all__ = [
    "RUNS", "RUN_FILE", "SAVED", "DataConfig", "FailoverConfig", "Float8Config", "MixtureSource", "OptimizerConfig",
    "RunConfig", "SourceConfig", "build_config", "load_config", "save_config", "suggest_resume", "suggest_run",
]  # fmt: skip
