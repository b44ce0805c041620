"""The runs in `examples` are accepted by training, and fit the clusters that they name."""

import re
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.spec.config import load_config
from shoal.training.check import check

PAGE = Path(__file__).parents[2] / "docs" / "train.md"
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_can_be_trained_and_fits(file: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    monkeypatch.chdir(file.parents[1])  # where its commands are typed
    check(load_config(file, data={"tokenizer": "bytes"}, model={"weights": ""}))  # without files of the hub
    for command in re.findall(r"^#   shoal estimate (.+)", file.read_text(), re.MULTILINE):
        code, printed = main(["estimate", *command.split()]), capsys.readouterr().out
        assert code == 0, printed
        row = re.search(rf"`examples/{file.name}` .* \| (\S+) s, (\S+ GB) \|$", PAGE.read_text(), re.MULTILINE)
        step, unit = re.search(r"^  step +(\S+) (m?s);", printed, re.MULTILINE).groups()
        assert float(row[1]) == pytest.approx(float(step) / (1000 if unit == "ms" else 1), rel=0.006), PAGE
        assert f"{row[2]} reserved" in printed, PAGE


def test_examples_name_their_clusters() -> None:
    named = [file.stem for file in EXAMPLES if "shoal estimate" in file.read_text()]
    assert len(named) == len(EXAMPLES) - 1, "all but the one of the CPU"
