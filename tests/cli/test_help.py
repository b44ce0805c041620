"""Help texts of the commands, and how the command starts."""

import subprocess
import sys
from contextlib import suppress

import pytest

from shoal.base.section import docstrings
from shoal.cli.commands import COMMANDS
from shoal.cli.main import main
from shoal.spec.config import RunConfig


@pytest.mark.parametrize(("topic", "says"), [
    ("data", "data inspect          Show what a run's data holds"),  # a group of commands
    ("plan auto", "usage: shoal plan auto"), ("parallel", "--parallel.tp"), ("zero-1", "ZeRO"), ("1f1b", "a pipeline"),
    ("zero bubble", "bubble\nPipeline schedules"), ("gradient accumulation", "several micro-batches"),
    ("muon", "--optimizer.momentum\n    momentum and muon"), ("Weight decay", "--optimizer.weight-decay"),
])
def test_help_of_a_topic(topic, says, capsys):
    with suppress(SystemExit):
        assert main(["help", *topic.split()]) == 0
    assert says.lower() in capsys.readouterr().out.lower()


def test_help_of_an_unknown_topic_suggests_one(capsys):
    assert main(["help", "zer"]) == 2
    assert "did you mean 'zero'?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"], ["help", "--help"]])
def test_help_fits_one_screen_and_names_every_command(words, capsys):
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines)
    for name in COMMANDS:  # or its group, with its last word
        group, _, last = name.partition(" ")
        assert any(line.startswith((f"  {name} ", f"  {group} ")) and last in line for line in lines), name


def test_a_commands_help_shows_its_options_and_names_the_sections(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "--run-folder PATH" in shown and "--parallel.tp" not in shown and "None" not in shown
    assert all(f"\n  {name} " in shown for name in RunConfig.model_fields)


@pytest.mark.parametrize("name", RunConfig.model_fields)
def test_help_of_a_section_shows_every_field_with_the_files_value(name, tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text("[train]\nsteps = 4321")
    with pytest.raises(SystemExit) as stop:
        main(["train", str(file), "--help", name])
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert ("(default: 4321)" in shown) == (name == "train")
    for key, about in docstrings(RunConfig.model_fields[name].annotation).items():
        assert f"--{name}.{key}".replace("_", "-") in shown
        assert " ".join(about.split()) in shown


def test_help_of_an_unknown_section_suggests_the_nearest(capsys):
    assert main(["verify", "--help", "paralel"]) == 2
    assert "--help paralel: no such section of the config; did you mean 'parallel'?" in capsys.readouterr().err


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "bench"])
def test_every_commands_help_says_what_it_does(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert stop.value.code == 0
    assert COMMANDS[command].help.split(":")[0] in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", ["sample", "eval", "chat", "report", "watch"])
def test_the_help_of_what_follows_a_training_fits_one_screen(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and all(len(line) <= 80 for line in lines), "\n".join(lines)
    assert len([line for line in lines if line.startswith("│ --")]) >= 1


def test_starting_does_not_import_torch():
    code = (
        "import sys; from shoal.cli.main import main; from shoal.cli.arguments import parse_run; "
        "from shoal.cli.run.train import TrainOptions; "
        "main(['--help']); parse_run('train', TrainOptions, ['--parallel.tp', '2'], ('parallel',)); "
        "main(['explain', 'zero']); import shoal.report.watch, shoal.labs.interactive.training; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_python_m_shoal_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "shoal", "data"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "shoal: error: 'data' needs one of: train-tokenizer, inspect, export\n"


@pytest.mark.parametrize("words", ["train --help", "estimate"])
def test_a_closed_pipe_is_quiet(words: str):
    command = f"{sys.executable} -m shoal {words} | head -c 20"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stderr == ""
