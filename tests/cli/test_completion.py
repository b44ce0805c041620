"""Shell completion: a real shell completes commands, options and fields of the config."""

import shutil
import subprocess

import pytest

from shoal.cli.commands import COMMANDS
from shoal.cli.completion import list_options
from shoal.cli.main import main

BASH = shutil.which("bash")


@pytest.mark.skipif(BASH is None, reason="bash is not installed")
@pytest.mark.parametrize(("words", "completed"), [
    (["pl"], ["plan"]),
    (["plan", "--so"], ["--software"]),
    (["plan", "au"], ["auto"]),
    (["data", ""], ["train-tokenizer", "inspect", "export"]),
    (["data", "export", "--o"], ["--out"]),
    (["train", "--parallel.ulys"], ["--parallel.ulysses"]),
    (["estimate", "--parallel.ulys"], ["--parallel.ulysses"]),
    (["estimate", "--train.st"], []),
])  # fmt: skip
def test_bash_completes(words, completed, capsys):
    assert main(["--completion", "bash"]) == 0
    script = capsys.readouterr().out
    quoted = " ".join(f"'{word}'" for word in ["shoal", *words])
    script += f"\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _shoal; echo ${{COMPREPLY[@]}}"
    done = subprocess.run([BASH, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == completed


def test_fish_gets_every_option(capsys):
    assert main(["--completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, command in COMMANDS.items():
        last = name.split()[-1]
        for option in list_options(command):
            assert f"complete -c shoal -n '__fish_seen_subcommand_from {last}' -l {option[2:]}" in lines


def test_another_shell_is_refused(capsys):
    assert main(["--completion", "powershell"]) == 2
    assert "--completion powershell: allowed: bash, fish, zsh" in capsys.readouterr().err


def test_help_of_a_command_by_the_word(capsys):
    with pytest.raises(SystemExit):
        main(["help", "goodput"])
    assert "shoal goodput" in capsys.readouterr().out
    assert main(["help"]) == 0
    assert "shoal COMMAND --help" in capsys.readouterr().out
