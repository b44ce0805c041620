"""Entry point of the command line, `shoal COMMAND`: find the command, call it, and convert errors to exit codes."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import get_type_hints

from shoal.base.errors import UsageError, did_you_mean, from_os_error, redact
from shoal.base.terminal import printable, replace_unencodable
from shoal.cli.commands import COMMANDS, GROUPS

READ_AT_IMPORT = {"OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1"}
"""Environment that torch's and numpy's libraries read when imported: threads that spin would take cores from other
processes, and a process without any can be forked (`shoal.launch.forked_process`)."""

READER_GONE = 141
"""Exit code of a shell for a command that SIGPIPE ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Returns:
        0 success, 1 failure or a failed check, 2 bad input, 130 interrupted, 141 stdout's reader has exited.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        os.environ.update({name: value for name, value in READ_AT_IMPORT.items() if name not in os.environ})
    replace_unencodable()
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except UsageError as error:
        return _refuse(error)
    except OSError as error:
        return READER_GONE if isinstance(error, BrokenPipeError) and _unread() else _refuse(from_os_error(error))
    except KeyboardInterrupt:
        return 130


def _run(args: list[str]) -> int:
    if args[:1] == ["help"]:
        args = _find_help(args[1:])
    if not args or args[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if args == ["--version"]:
        from importlib.metadata import version

        from shoal import __version__

        print(f"shoal {__version__}\ntorch {version('torch')}")
        return 0
    if args[0] == "--completion":
        from shoal.cli.completion import print_completion

        print_completion(args[1] if len(args) > 1 else "")
        return 0
    if len(args) == 2 and args[1] in ("-h", "--help") and (group := _in_group(args[0])):
        print("\n".join(f"  {name:<22}{COMMANDS[name].help.split(': shoal ')[0]}" for name in group))
        return 0
    name, words = _split_command(args)
    command = COMMANDS[name]
    from shoal.base.options import parse
    from shoal.cli.arguments import parse_run, refuse_model_name, split_run_file
    from shoal.spec.config.run import rename_option
    from shoal.spec.run_options import join_fixed

    words = [rename_option(word) for word in words]
    function = getattr(import_module(command.module), command.function)
    takes = get_type_hints(function)
    if "args" in takes:
        return function(words)
    if "config" not in takes:
        if words and "model" in takes["options"].model_fields:
            refuse_model_name(words[0], "--model")
            if words[0].endswith(".toml") and "file" not in takes:
                own = " One of your own is a table of --catalog." if "catalog" in takes["options"].model_fields else ""
                raise UsageError(f"{words[0]}: shoal {name} reads no config of a run."
                                 f"\n  Name a model with --model.{own}")
        if "fix" in takes["options"].model_fields:
            words = join_fixed(words)
        file, words = split_run_file(words) if "file" in takes else (None, words)
        options = parse(f"shoal {name}", takes["options"], words, description=command.help)
        return function(options, file) if file else function(options)
    return function(*parse_run(name, takes["options"], words, command.config))


def _find_help(topic: list[str]) -> list[str]:
    """Return the command line that shows a topic: a command, a section of the config, a technique or a word."""
    from shoal.spec.config import RunConfig

    if not topic or topic[0] in ("-h", "--help", *COMMANDS) or _in_group(topic[0]):
        return [*topic, "--help"]
    return ["train", "--help", *topic] if topic[0] in RunConfig.model_fields else ["explain", *topic]


def _in_group(word: str) -> list[str]:
    """Return the commands of two words that begin with a word."""
    return [name for name in COMMANDS if name.startswith(f"{word} ") and word not in COMMANDS]


def _split_command(args: list[str]) -> tuple[str, list[str]]:
    """Split the command (one or two words) from its arguments."""
    for words in (2, 1):
        if (name := " ".join(args[:words])) in COMMANDS:
            return name, args[words:]
    group = [name.split()[1] for name in _in_group(args[0])]
    if group and len(args) == 1:
        raise UsageError(f"'{args[0]}' needs one of: {', '.join(group)}")
    if group:
        raise UsageError(f"there is no command '{args[0]} {args[1]}'; {did_you_mean(args[1], group)}")
    raise UsageError(f"there is no command '{args[0]}'; {did_you_mean(args[0], COMMANDS)}")


def _usage() -> str:
    lines = ["shoal: train one transformer language model on many devices, moving as one"]
    for name, command in COMMANDS.items():
        group, _, last = name.partition(" ")
        if last and group in COMMANDS:  # plan auto: named in plan's line
            continue
        if group not in GROUPS:
            lines.append(f"  {name:<14}{command.help.split(': shoal ')[0]}")
        elif lines[-1].startswith(f"  {group} "):
            lines[-1] += f", {last}"
        else:
            lines.append(f"  {group:<14}{GROUPS[group]}: {last}")
    return "\n".join([*lines, "shoal COMMAND --help: options, defaults; shoal help zero: a topic; --version."])


def _refuse(error: UsageError) -> int:
    print(f"shoal: error: {printable(redact(str(error)))}", file=sys.stderr)
    return 2


def _unread() -> bool:
    """Return whether stdout's reader has exited, as in `shoal estimate | head`; if so, redirect stdout to /dev/null."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in output.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
