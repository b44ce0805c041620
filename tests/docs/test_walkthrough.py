"""The walkthrough is a transcript: its commands run in order, and print what the page shows."""

import importlib.util
import os
import re
import shlex

import pytest

from tests.trainings.forked import command as start_command
from tests.trainings.runs import DEADLINE, ROOT, shoal

PAGE = ROOT / "docs" / "walkthrough.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d[\d,.]*(e[-+]?\d+)?\s?([kMG]i?B?\b|s\b|%)?")


def steps() -> list[tuple[str, list[str]]]:
    """Each command of the page, with the lines that it prints there."""
    found: list[tuple[str, list[str]]] = []
    for kind, text in BLOCK.findall(PAGE.read_text()):
        for line in text.replace("\\\n", " ").splitlines() if kind == "console" else ():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            else:
                found[-1][1].append(line)
    return found


def mask(line: str) -> str:
    """A line without its numbers, which differ between machines, and its spaces."""
    return re.sub(r"\s", "", NUMBER.sub("#", line))


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, str]:
    """What each command of the page prints; "" for a benchmark without its library."""
    folder = tmp_path_factory.mktemp("walkthrough")
    for kind, text in BLOCK.findall(PAGE.read_text()):
        if kind in ("python", "yaml"):
            (folder / text.splitlines()[0].removeprefix("# ")).write_text(text)
    printed = {}
    for command, _ in steps():
        program, *words = shlex.split(command)
        if "--tasks" in words and importlib.util.find_spec("lm_eval") is None:
            printed[command] = ""
            continue
        if program == "shoal":
            code, output = shoal(*words, cwd=folder)
        else:
            script = start_command([], os.environ, folder, script=words[0])
            output, code = script.communicate(timeout=DEADLINE)[0], script.returncode
        assert code == 0, f"{command}\n{output}"
        printed[command] = output
    return printed


@pytest.mark.parametrize("number", range(len(steps())))
def test_a_command_prints_what_the_page_shows(number, said) -> None:
    command, shown = steps()[number]
    if not said[command] and "--tasks" in command:
        pytest.skip("lm_eval is not installed: the extra shoal[eval]")
    lines = iter([mask(line) for line in said[command].splitlines()])
    missing = [line for line in shown if mask(line) not in lines]  # each after the one before
    assert not missing, said[command]


def test_transformers_computes_the_loss_of_the_trained_model(said) -> None:
    before, after, theirs = (
        float(re.search(r"loss +([\d.]+)", said[command])[1])
        for command, _ in steps() if command.startswith(("shoal eval Qwen3", "shoal eval trained", "python read"))
    )
    assert abs(after - theirs) < 1e-4 and after < before - 2
