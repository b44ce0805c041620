"""Parse a command's options and the config of its run from the command line.

A command that takes a run has every field of `RunConfig` as an option; the values of the run's TOML file are the
defaults. Both are validated by the same rules.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.files import read_toml
from shoal.base.options import listed, read
from shoal.base.section import Section, validate
from shoal.base.terminal import quote
from shoal.cli.commands import COMMANDS
from shoal.spec.catalog.models import model_names
from shoal.spec.config import RUN_FILE, RUNS, RunConfig, load_config, suggest_resume, suggest_run

T = TypeVar("T", bound=Section)


def parse_run(command: str, options: type[T], args: list[str], sections: Sequence[str] = ()) -> tuple[T, RunConfig]:
    """Read a command's options and the run's config: the TOML file or the command's defaults, then the command line.

    If the option ``resume`` is given, the config of that run replaces the defaults.

    Args:
        command: its name in the table, for the help.
        options: section of its options besides the config.
        args: the command line after the name. The run's TOML file is its first word, or the first that ends in .toml.
        sections: sections of the config that can be set (default: all).

    Raises:
        UsageError: the file is missing or wrong, an option is unknown (the nearest is suggested), or a value cannot be
            parsed or is out of range.
        SystemExit: 0, after ``--help``, which shows the command's own options and the names of the config's sections;
            ``--help SECTION`` shows one section.
    """
    wants_help = [word for word in args if word in ("-h", "--help")]
    if wants_help:
        section, args = _split_section(args, wants_help[0], sections or list(RunConfig.model_fields))
    elif "resume" in options.model_fields:
        args = _complete_resume(args)
    file, args = split_run_file(args)
    if file and not file.exists():
        refuse_model_name(str(file), "--model" if "model" in options.model_fields else "--model.name")
    if file and file.suffix in (".jsonl", ".parquet", ".txt", ".md") and "data" in (sections or RunConfig.model_fields):
        raise UsageError(f"{file}: this is no run's TOML file.\n  Give a text with --data.paths {quote(file)}, or "
                         "end the name of a run's file in .toml.")
    base = (load_config(file) if file else RunConfig.model_validate(COMMANDS[command].run or {})).model_dump()
    fields = RunConfig.model_fields
    types = {"": options} | {name: type(fields[name].default) for name in sections or fields}
    if wants_help:
        _show_help(command, types, section, base)
    given = read(f"shoal {command}", COMMANDS[command].help, types, base, args)
    own = validate(options, given.pop(""), source="command line")
    return own, validate(RunConfig, base | given, source="command line")


def refuse_model_name(word: str, option: str) -> None:
    """Raise a `UsageError` if a word is the name of a model, which an option takes."""
    if word in model_names():
        raise UsageError(f"{word}: a model of the catalog is chosen with {option} {word}.")


def _split_section(args: list[str], option: str, sections: Sequence[str]) -> tuple[str, list[str]]:
    """Split the section named after ``--help`` from the arguments ("" for none)."""
    i = args.index(option)
    after = args[i + 1] if i + 1 < len(args) else ""
    if not after or after.startswith("-") or after.endswith(".toml"):
        return "", args[:i] + args[i + 1 :]
    if after not in sections:
        raise UsageError(f"--help {after}: no such section of the config; {did_you_mean(after, sections)}")
    return after, args[:i] + args[i + 2 :]


def _show_help(command: str, types: Mapping[str, type[Section]], section: str, values: dict[str, Any]) -> NoReturn:
    """Print the help of a command ("") or of one section of the config, and exit."""
    with suppress(SystemExit):
        read(f"shoal {command}", COMMANDS[command].help, {section: types[section]}, values, ["--help"])
    if not section:
        print("\nSections of the run's config, set in a TOML file or as --SECTION.FIELD VALUE:")
        print("\n".join(listed({name: inspect.getdoc(types[name]) or "" for name in types if name}, 12)))
        print(f"\nshoal {command} --help {list(types)[1]} lists that section's fields.")
    raise SystemExit(0)


def split_run_file(args: list[str]) -> tuple[Path | None, list[str]]:
    """Split the run's TOML file from the arguments."""
    for i, word in enumerate(args):
        before = args[i - 1 : i]  # the values of these options may be TOML files too, or be given as such by mistake
        option = word.startswith("-") or before in (["--catalog"], ["--toml"], ["--data.paths"], ["--cluster"])
        if not option and (word.endswith(".toml") or i == 0):
            return Path(word), args[:i] + args[i + 1 :]
    return None, args


def is_given(section: str, name: str, args: list[str]) -> bool:
    """Return whether a command line or its run's TOML file sets a field of the config."""
    file, words = split_run_file(args)
    if file and name in read_toml(file).get(section, {}):
        return True
    return any(word.partition("=")[0].replace("_", "-") == f"--{section}.{name}" for word in words)


def _complete_resume(args: list[str]) -> list[str]:
    """Complete ``--resume`` with its defaults: the folder, and that run's own config if no other is given."""
    args = [part for word in args for part in (word.split("=", 1) if word.startswith("--resume=") else [word])]
    if "--resume" not in args:
        return args
    i = args.index("--resume") + 1
    if i == len(args) or args[i].startswith("-") or args[i].endswith(".toml"):
        args.insert(i, str(_folder_to_resume(args)))
    if split_run_file(args)[0] is None:
        run_file = Path(args[i]) / RUN_FILE
        if not run_file.is_file():
            near = suggest_run(args[i])
            if near and Path(args[i], "manifest.json").is_file():
                near += suggest_resume(Path(args[i]))
            raise UsageError(f"--resume {args[i]}: not a run folder: it has no {RUN_FILE}.{near}")
        args.insert(0, str(run_file))
    return args


def _folder_to_resume(args: list[str]) -> Path:
    if "--run-folder" in args[:-1]:
        return Path(args[args.index("--run-folder") + 1])
    runs = sorted(RUNS.glob(f"*/{RUN_FILE}"), key=lambda file: file.stat().st_mtime)
    if not runs:
        raise UsageError(f"--resume: there is no run under {RUNS.resolve()}.\n  Name a run folder: --resume PATH.")
    return runs[-1].parent
