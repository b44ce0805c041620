"""Configuration of a run, its TOML file, and old names that files, run folders and command lines may still use."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Literal

import tomli_w

from shoal.base.errors import UsageError, did_you_mean, from_os_error
from shoal.base.files import check_writable, expanded, read_toml, write_atomically
from shoal.base.section import Section, plain, truncate, validate
from shoal.base.terminal import quote
from shoal.spec.config import sections
from shoal.spec.config.data import DataConfig
from shoal.spec.config.model import ModelConfig
from shoal.spec.layout import Layout

RUN_FILE = "run.toml"
"""Name of the config file in a run folder."""

RUNS = Path("runs")
"""Parent folder of runs without a run folder of their own."""

SAVED = re.compile(r"step-(\d{8,})")
"""Name of a complete checkpoint in a run's folder of checkpoints, with the number of steps done."""

RENAMED_KEYS = {  # if several old keys are given, the first applies
    "testing.pace": "testing.min_step_seconds",
    "testing.dead": "testing.kill",
    "train.straggler": "testing.straggler",
    "train.pace": "testing.min_step_seconds",
    "train.dead": "testing.kill",
    "train.link_gbs": "testing.link_gbs",
    "optimizer.rates": "optimizer.lr_factors",
    "optimizer.minimum": "optimizer.min_lr_fraction",
    "failover.silence_seconds": "failover.heartbeat_timeout_seconds",
    "failover.stall_seconds": "failover.progress_timeout_seconds",
}
RENAMED_OPTIONS = {
    "keep_going": "auto_resume",  # train
    "no_keep_going": "no_auto_resume",
    "plant": "inject",  # verify
    "seq": "sequence_length",  # plan, plan auto
}


class RunConfig(Section):
    """Complete configuration of a run.

    >>> config = RunConfig(parallel={"dp": 2}, train={"steps": 100})
    >>> config.parallel.dp, config.train.steps, config.optimizer.name
    (2, 100, 'adamw')
    """

    model: ModelConfig = ModelConfig()
    parallel: Layout = Layout()
    data: DataConfig = DataConfig()
    train: sections.TrainConfig = sections.TrainConfig()
    optimizer: sections.OptimizerConfig = sections.OptimizerConfig()
    loss_scale: sections.LossScaleConfig = sections.LossScaleConfig()
    float8: sections.Float8Config = sections.Float8Config()
    relaxed: sections.RelaxedConfig = sections.RelaxedConfig()
    checkpoint: sections.CheckpointConfig = sections.CheckpointConfig()
    failover: sections.FailoverConfig = sections.FailoverConfig()
    metrics: sections.MetricsConfig = sections.MetricsConfig()
    testing: sections.TestingConfig = sections.TestingConfig()

    @property
    def counted(self) -> Literal["token", "sample"]:
        """What the run counts: tokens, or the samples of a model of one's own, whose losses have no known unit."""
        return "sample" if self.model.module else "token"

    @property
    def counted_per_sample(self) -> int:
        """How many of them a sample has."""
        return 1 if self.model.module else self.data.sequence_length

    def replace(self, **sections: Section | Mapping[str, Any]) -> RunConfig:
        """Return the config with other sections, or with other values of some of their fields.

        Raises:
            UsageError: no such section or field, or a bad value. Whether they go together is checked in use.

        >>> config = RunConfig().replace(parallel=Layout(dp=2), train={"steps": 5})
        >>> config.parallel.dp, config.train.steps
        (2, 5)
        """
        return self.model_copy(update={name: self._change(name, given) for name, given in sections.items()})

    def _change(self, name: str, given: object) -> Section:
        if name not in (known := type(self).model_fields):
            raise UsageError(f"RunConfig.replace: there is no section '{name}'; {did_you_mean(name, known)}")
        old: Section = getattr(self, name)
        if isinstance(given, type(old)):
            return given
        if not isinstance(given, Mapping):
            raise UsageError(
                f"RunConfig.replace: {name} = {truncate(given)}: it is a section."
                f"\n  Give a {type(old).__name__}, or its fields: {name}={{...}}."
            )
        return validate(type(old), old.model_dump() | dict(given), source="RunConfig.replace", prefix=name)


def load_config(path: str | Path, **sections: Section | Mapping[str, Any]) -> RunConfig:
    """Read a run's TOML file.

    Args:
        sections: fields that replace the file's, by section, as options of the command line do: ``train={"steps": 3}``;
            or sections, all of whose fields do: ``parallel=Layout(dp=2)``.

    Raises:
        UsageError: no such file, a run folder, not TOML, an unknown key (the nearest existing key is suggested), or a
            bad value.

    >>> load_config("no-such-run.toml")
    Traceback (most recent call last):
    shoal.base.errors.UsageError: no such file: no-such-run.toml
    """
    path = expanded(path, "load_config")
    if os.path.isfile(inside := path / RUN_FILE):  # false for what is no name of a file
        raise UsageError(
            f"{path} is the folder of a run.\n  Its config is {inside}. "
            f"shoal train --resume {quote(path)} continues it."
        )
    if (file := str(path).partition(":")[0]).endswith(".py") and Path(file).is_file():
        raise UsageError(
            f"{path} is a Python file, not the TOML file of a run.\n  A run's file names a module of your own: "
            f"module = \"{path}\" under [model]."
        )
    complete = {name: given for name, given in sections.items() if isinstance(given, Section)}
    fields = {name: dict(given) for name, given in sections.items() if name not in complete}
    if unknown := complete.keys() - RunConfig.model_fields:
        known = did_you_mean(min(unknown), RunConfig.model_fields)
        raise UsageError(f"load_config: there is no section '{min(unknown)}'; {known}")
    return build_config(read_toml(path), fields, source=str(path)).replace(**complete)


def suggest_run(path: str | Path) -> str:
    """Return the end of an error about what is no run folder: the newest run in it, or the run around it, if any."""
    inside = sorted(Path(path).glob(f"*/{RUN_FILE}"), key=lambda file: file.stat().st_mtime)
    around = [parent for parent in Path(path).parents if parent.parts and (parent / RUN_FILE).is_file()]
    near = [*(file.parent for file in inside[-1:]), *around[:1]]  # a folder of runs may lie beside a run.toml
    return f"\n  Did you mean {near[0]}?" if near else ""


def suggest_resume(checkpoint: Path) -> str:
    """Return the end of an error about a checkpoint given as a run: the command that resumes the run from this step."""
    folder, name = checkpoint.absolute().parent, checkpoint.absolute().name
    run, own = folder.parent, SAVED.fullmatch(name)
    if folder.name != "checkpoints" or own is None or not (run / RUN_FILE).is_file():
        return " It resumes from its newest checkpoint: for an older one, move the later ones away."
    steps = {int(found[1]): path for path in folder.iterdir() if (found := SAVED.fullmatch(path.name))}
    later = [str(steps[step]) for step in sorted(steps) if step > int(own[1])]
    words = shlex.join(["shoal", "train", "--resume", str(run)])
    if later:  # a run resumes from its newest; the later ones are kept, but out of its sight
        names = (run / f"after-{name}{'' if n == 1 else f'-{n}'}" for n in count(1))
        aside = str(next(free for free in names if not free.exists()))
        words = f"{shlex.join(['mkdir', aside])} && {shlex.join(['mv', *later, aside])} && {words}"
    return f"\n  Once the run has ended, resume from this step, with the options to change: {words}"


def build_config(
    values: dict[str, Any], changes: Mapping[str, Mapping[str, Any]] | None = None, *, source: str = "config"
) -> RunConfig:
    """Build a `RunConfig` from nested plain values; errors name the keys of the file.

    Args:
        changes: fields by section; they replace fields of the values.
    """
    for name, fields in (changes or {}).items():
        given = values.get(name, {})
        values = values | {name: given | dict(fields) if isinstance(given, dict) else given}
    return validate(RunConfig, rename_keys(values, RunConfig().model_dump()), source=source)


def save_config(config: RunConfig, path: str | Path, *, new: bool = False) -> None:
    """Write a config as TOML that `load_config` reads back unchanged.

    Args:
        new: refuse to overwrite a file.

    Raises:
        UsageError: the file cannot be written, is a folder, or (``new``) exists.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> config = RunConfig(train={"steps": 7})
    >>> with TemporaryDirectory() as folder:
    ...     save_config(config, Path(folder) / "run.toml")
    ...     load_config(Path(folder) / "run.toml") == config
    True
    """
    path = expanded(path, "save_config")
    check_writable(path, "save_config", new=new)
    try:
        write_atomically(path, tomli_w.dumps(plain(config)), new=new)
    except OSError as error:
        raise from_os_error(error) from None


def rename_keys(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return a config's nested values with the old keys renamed, if the new key is not given too.

    Args:
        defaults: the config's default values. A run folder has every key, so a default value prints no note.
    """
    for old, new in RENAMED_KEYS.items():
        (section, key), (target, name) = old.split("."), new.split(".")
        given = values.get(section)
        if not isinstance(given, dict) or key not in given or not isinstance(values.get(target, {}), dict):
            continue
        values = values | {section: {k: v for k, v in given.items() if k != key}}
        values[target] = {name: given[key]} | values.get(target, {})
        if given[key] != defaults[target][name]:
            print_rename(old, new)
    return values


def rename_option(word: str) -> str:
    """Return a word of the command line with its option renamed, if that has an old name."""
    option, equals, value = word.partition("=")
    key = option.removeprefix("--").replace("-", "_")
    new = (RENAMED_KEYS | RENAMED_OPTIONS).get(key)
    if key == option or new is None:
        return word
    new = f"--{new.replace('_', '-')}"
    print_rename(option, new)
    return f"{new}{equals}{value}"


@cache
def print_rename(old: str, new: str) -> None:
    """Print a note on stderr, once per name, that a name has changed."""
    print(f"note: {old} is now {new}", file=sys.stderr)
