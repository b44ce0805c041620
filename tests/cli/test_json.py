"""--json: one object with the values that the text rounds."""

import json

import pytest

import shoal
from shoal.cli.main import main
from tests.testing.own.test_equality import PLAIN


def read(words: list[str], capsys: pytest.CaptureFixture, code: int = 0) -> dict:
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_an_estimate(capsys):
    values = read(["estimate", "--parallel.zero", "3", "--days", "2"], capsys)
    wanted = shoal.estimate(shoal.Layout(dp=8, zero=3), model="llama-3-8b", cluster="8xH100")
    assert values["fits"] and values["step_seconds"] == wanted.step_seconds
    assert values["layout"]["dp"] == 8 and values["training"]["days"] == pytest.approx(2)
    assert sum(values["seconds"].values()) == pytest.approx(values["step_seconds"], rel=0.01)
    low, high = values["step_seconds_80"]
    assert low < values["step_seconds"] < high


def test_an_estimate_of_a_model_of_ones_own(capsys, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(f'model = {{module = "{PLAIN}:lstm"}}\nparallel = {{dp = 8}}\ntrain = {{global_batch = 16}}\n')
    values = read(["estimate", str(file)], capsys)
    wanted = shoal.estimate_own_model(shoal.load_config(file), "8xH100")
    assert values["fits"] and values["step_seconds_at_least"] == wanted.step_seconds
    assert values["memory_bytes"]["parts"] == wanted.memory and values["layout"]["dp"] == 8


def test_a_plan_and_one_that_does_not_fit(capsys):
    words = ["plan", "--model", "llama-3.2-1b", "--global-batch", "64"]
    values = read([*words, "--cluster", "4xH100"], capsys)
    assert values["layouts"][0]["role"] == "recommended" and values["layouts"][0]["fits"]
    assert read(["plan", "--model", "llama-3-70b", "--cluster", "1xH100"], capsys, code=1)["layouts"] == []


def test_a_simulation(capsys):
    first, second = read(["simulate", "--compare", "gpipe"], capsys)["schedules"]
    assert (first["schedule"], second["schedule"]) == ("1f1b", "gpipe")
    assert first["bubble"] == second["bubble"] == pytest.approx(3 / 11)
    assert max(first["peak_live"]) < max(second["peak_live"])


def test_a_verification(capsys, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[model]\nlayers = 1\n[data]\nsource = "synthetic"\nsequence_length = 16\n')
    assert read(["verify", str(file), "--steps", "1"], capsys)["same"]
