"""Shell completion of commands and options: ``shoal --completion bash`` prints a shell's completion file."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import get_type_hints

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.section import Section
from shoal.cli.commands import COMMANDS, Command
from shoal.spec.config import RunConfig

_BASH = """\
# Completion of shoal, for bash (zsh: after autoload -U bashcompinit && bashcompinit).
_shoal() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} both="${{COMP_WORDS[1]}} ${{COMP_WORDS[2]}}" words
    case "$command" in
{first}
        *) words="{commands}" ;;
    esac
    case "$both" in
{second}
    esac
    if (( COMP_CWORD == 1 )); then words="{commands}"; fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _shoal shoal
"""


def print_completion(shell: str) -> None:
    """Print the completion script of a shell."""
    if shell not in ("bash", "zsh", "fish"):
        raise UsageError(f"--completion {shell}: {did_you_mean(shell, ('bash', 'zsh', 'fish'))}")
    options = {name: sorted(list_options(command)) for name, command in COMMANDS.items()}
    if shell == "fish":
        print("\n".join(_fish_lines(options)))
        return
    if shell == "zsh":
        print("autoload -U compinit bashcompinit && compinit && bashcompinit")
    firsts = dict.fromkeys(name.split()[0] for name in options)
    first = [
        f'        {name}) words="{" ".join(_seconds(name) + options.get(name, []))}" ;;' for name in firsts
    ]
    second = [f'        "{name}") words="{" ".join(words)}" ;;' for name, words in options.items() if " " in name]
    print(_BASH.format(first="\n".join(first), second="\n".join(second), commands=" ".join(firsts)), end="")


def list_options(command: Command) -> Iterator[str]:
    """Yield a command's options, and the fields of the config that it takes as options."""
    module = import_module(command.module)
    takes = get_type_hints(getattr(module, command.function))
    yield "--help"
    sections = [takes["options"]] if "options" in takes else [
        value for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Section) and value.__module__ == module.__name__
    ]  # fmt: skip
    for section in sections:
        yield from (f"--{name.rstrip('_').replace('_', '-')}" for name in section.model_fields)
    if "config" in takes or command.config:
        for name in command.config or RunConfig.model_fields:
            fields = type(RunConfig.model_fields[name].default).model_fields
            yield from (f"--{name}.{field.replace('_', '-')}" for field in fields)


def _seconds(first: str) -> list[str]:
    """Return the second words of the commands that begin with this one."""
    return [name.split()[1] for name in COMMANDS if name.startswith(f"{first} ")]


def _fish_lines(options: dict[str, list[str]]) -> Iterator[str]:
    for name, words in options.items():
        first, *rest = name.split()
        about = COMMANDS[name].help.split(": shoal ")[0].replace("'", "")
        if rest:
            yield f"complete -c shoal -f -n '__fish_seen_subcommand_from {first}' -a {rest[0]} -d '{about}'"
        else:
            yield f"complete -c shoal -f -n __fish_use_subcommand -a {first} -d '{about}'"
        for word in words:
            yield f"complete -c shoal -n '__fish_seen_subcommand_from {(rest or [first])[0]}' -l {word[2:]}"
    for first in dict.fromkeys(name.split()[0] for name in options if " " in name):
        yield f"complete -c shoal -f -n __fish_use_subcommand -a {first}"
