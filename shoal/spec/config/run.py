"""Configuration of a run, and its TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w

from shoal.base.files import read_toml
from shoal.base.section import Section, plain, validate
from shoal.spec.config.model import ModelConfig
from shoal.spec.config.renamed import rename_keys
from shoal.spec.config.sections import (
    CheckpointConfig,
    DataConfig,
    FailoverConfig,
    Float8Config,
    LossScaleConfig,
    MetricsConfig,
    OptimizerConfig,
    RelaxedConfig,
    TestingConfig,
    TrainConfig,
)
from shoal.spec.layout import Layout

RUN_FILE = "run.toml"
"""Name of the config file in a run folder."""

RUNS = Path("runs")
"""Parent folder of runs without a run folder of their own."""


class RunConfig(Section):
    """Complete configuration of a run.

    >>> config = RunConfig.model_validate({"parallel": {"dp": 2}, "train": {"steps": 100}})
    >>> config.parallel.dp, config.train.steps, config.optimizer.name
    (2, 100, 'adamw')
    """

    model: ModelConfig = ModelConfig()
    parallel: Layout = Layout()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss_scale: LossScaleConfig = LossScaleConfig()
    float8: Float8Config = Float8Config()
    relaxed: RelaxedConfig = RelaxedConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    failover: FailoverConfig = FailoverConfig()
    metrics: MetricsConfig = MetricsConfig()
    testing: TestingConfig = TestingConfig()


def load_config(path: str | Path) -> RunConfig:
    """Read a run's TOML file.

    Raises:
        UsageError: no such file, not TOML, an unknown key (the nearest existing key is suggested), or a bad value.

    >>> load_config("no-such-run.toml")
    Traceback (most recent call last):
    shoal.base.errors.UsageError: no such file: no-such-run.toml
    """
    return build_config(read_toml(path), source=str(path))


def build_config(values: dict[str, Any], *, source: str = "config") -> RunConfig:
    """Build a `RunConfig` from nested plain values; errors name the keys of the file."""
    return validate(RunConfig, rename_keys(values, RunConfig().model_dump()), source=source)


def save_config(config: RunConfig, path: Path, *, new: bool = False) -> None:
    """Write a config as TOML that `load_config` reads back unchanged.

    Args:
        new: raise FileExistsError if the file exists.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> config = RunConfig.model_validate({"train": {"steps": 7}})
    >>> with TemporaryDirectory() as folder:
    ...     save_config(config, Path(folder) / "run.toml")
    ...     load_config(Path(folder) / "run.toml") == config
    True
    """
    with open(path, "x" if new else "w") as file:
        file.write(tomli_w.dumps(plain(config)))
