"""The options of a command, and the config of the run that it works on, from a command line.

A command that takes a run has every field of `RunConfig` as an option; the values of the run's TOML file are the
defaults. Both are validated alike. The sections of the config are imported only where they are needed: making them
takes longer than an estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from shoal.base.errors import UsageError
from shoal.base.files import read_toml
from shoal.base.options import defaults, read
from shoal.base.section import Section, validate
from shoal.cli.commands import COMMANDS

if TYPE_CHECKING:
    from pydantic import BaseModel

    from shoal.spec.config import RunConfig

T = TypeVar("T", bound=Section)


def parse_options(command: str, options: type[T], args: list[str]) -> T:
    """Read the options of a command that takes no run; arguments and errors are those of `parse_run`."""
    return parse_sections(command, options, args, {}, {})[0]


def parse_run(
    command: str, options: type[T], args: list[str], sections: Sequence[str] | None = None
) -> tuple[T, RunConfig]:
    """Read a command's options and the run's config: defaults, then the TOML file, then the command line.

    With an option ``resume`` that is given, the config of that run takes the place of the defaults.

    Args:
        command: its name in the table, for the help.
        options: what it takes besides the config.
        args: the command line after the name. The run's TOML file is its first word, or the first that ends in .toml.
        sections: those of the config that can be set (default: all).

    Raises:
        UsageError: the file is missing or wrong, an option does not exist (the nearest is named), or a value cannot be
            read or is out of its range.
        SystemExit: 0, after ``--help``.
    """
    from shoal.spec.config import RunConfig, load_config

    if "resume" in options.model_fields:
        args = _complete_resume(args)
    file, args = split_run_file(args)
    base = (load_config(file) if file else RunConfig()).model_dump()
    kinds = _sections_of(RunConfig, sections or tuple(RunConfig.model_fields))
    own, given = parse_sections(command, options, args, kinds, {name: base[name] for name in kinds})
    return own, validate(RunConfig, base | given, where="command line")


def _sections_of(config: type[RunConfig], names: Sequence[str]) -> dict[str, type[BaseModel]]:
    return {name: cast("type[BaseModel]", config.model_fields[name].annotation) for name in names}


def parse_sections(
    command: str, options: type[T], args: list[str], sections: dict[str, type[BaseModel]], default: dict[str, Any]
) -> tuple[T, dict[str, dict[str, Any]]]:
    """Read a command's options, and the unchecked values of some sections.

    Args:
        sections: by the name that stands before their options.
        default: values of each.
    """
    given = read(
        f"shoal {command}", COMMANDS[command].help,
        {"": options, **sections}, {"": defaults(options), **default}, args,
    )
    return validate(options, given.pop(""), where="command line"), given


def split_run_file(args: list[str]) -> tuple[Path | None, list[str]]:
    """Take the run's TOML file out of the arguments."""
    for i, word in enumerate(args):
        option = word.startswith("-") or args[i - 1 : i] == ["--catalog"]  # whose value is a TOML file too
        if not option and (word.endswith(".toml") or i == 0):
            return Path(word), args[:i] + args[i + 1 :]
    return None, args


def is_given(section: str, name: str, args: list[str]) -> bool:
    """Whether a command line or its run's TOML file sets a field of the config."""
    file, words = split_run_file(args)
    if file and name in read_toml(file).get(section, {}):
        return True
    return any(word.partition("=")[0].replace("_", "-") == f"--{section}.{name}" for word in words)


def _complete_resume(args: list[str]) -> list[str]:
    """Write out what ``--resume`` leaves out: the folder, and that run's own config where no other is given."""
    args = [part for word in args for part in (word.split("=", 1) if word.startswith("--resume=") else [word])]
    if "--resume" not in args:
        return args
    from shoal.spec.config import RUN_FILE

    i = args.index("--resume") + 1
    if i == len(args) or args[i].startswith("-") or args[i].endswith(".toml"):
        args.insert(i, str(_folder_to_resume(args)))
    if split_run_file(args)[0] is None:
        run_file = Path(args[i]) / RUN_FILE
        if not run_file.is_file():
            raise UsageError(f"--resume {args[i]}: this is no run folder, it has no {RUN_FILE}.")
        args.insert(0, str(run_file))
    return args


def _folder_to_resume(args: list[str]) -> Path:
    if "--run-folder" in args[:-1]:
        return Path(args[args.index("--run-folder") + 1])
    from shoal.spec.config import RUN_FILE, RUNS

    runs = sorted(RUNS.glob(f"*/{RUN_FILE}"), key=lambda file: file.stat().st_mtime)
    if not runs:
        raise UsageError(f"--resume: there is no run under {RUNS.resolve()}.\n  Name a run folder: --resume PATH.")
    return runs[-1].parent
