"""Complete trainings: of tokens, days and dollars each gives the others; beside published ones."""

import re
from pathlib import Path

import pytest

from shoal import Layout, UsageError, cluster, estimate, train_fully
from shoal.cli.main import main
from shoal.planning.estimate import StepEstimate
from shoal.report.planning.estimate_lines import training_facts

PAGE = Path(__file__).parents[2] / "docs" / "plan.md"
PUBLISHED = {  # layout, model, cluster, sequences, tokens of a sequence, software, tokens, published device-hours
    # Narayanan et al. 2021, section 5.1: 34 days
    "GPT-3": (
        Layout(tp=8, pp=8, virtual_stages=6, schedule="interleaved-1f1b", recompute="full"), "gpt3-175b",
        "128x8xA100", 1536, 2048, "megatron-2021", 300e9, 34 * 24 * 1024,
    ),
    # Touvron et al. 2023 (Llama 2), table 2; without a published layout
    "Llama 2 70B": (
        Layout(tp=8, pp=4, zero=1, sequence_parallel=True), "llama-2-70b",
        "256x8xA100", 1024, 4096, "shoal", 2e12, 1_720_320,
    ),
    # Meta 2024, model card of Llama 3; without a published layout or software
    "Llama 3 70B": (
        Layout(tp=8, pp=4, zero=1, sequence_parallel=True, virtual_stages=5, schedule="interleaved-1f1b"),
        "llama-3-70b", "512x8xH100", 2048, 8192, "other", 15e12, 6.4e6,
    ),
    # Meta 2024, model card of Llama 3.1; layout of Dubey et al. 2024, table 4
    "Llama 3.1 405B": (
        Layout(tp=8, pp=16, zero=1, sequence_parallel=True, virtual_stages=7, schedule="interleaved-1f1b"),
        "llama-3.1-405b", "2048x8xH100", 2048, 8192, "shoal", 15.6e12, 30.84e6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_trainings_took_about_as_long(name: str) -> None:
    layout, model, machine, batch, length, software, tokens, hours = PUBLISHED[name]
    found = estimate(layout, model=model, cluster=machine, global_batch=batch, sequence_length=length,
                     software=software, precision="fp16" if software == "megatron-2021" else "bf16")  # fmt: skip
    training = train_fully(found.run, found.step_seconds, tokens=tokens)
    estimated = training.devices * training.seconds / 3600
    assert estimated == pytest.approx(hours, rel=0.15)
    stated = re.search(rf"^\| {name}.* \| (\S+) \| [^|]*\|$", PAGE.read_text(), re.M)[1]
    assert stated == f"{round(estimated, -3):,.0f}", "docs/plan.md"


@pytest.fixture(scope="module")
def step() -> StepEstimate:
    return estimate(Layout(dp=16, zero=1), model="llama-3.2-1b", cluster="2x8xH100", global_batch=64)


def test_each_of_tokens_days_and_dollars_gives_the_others(step: StepEstimate) -> None:
    first = train_fully(step.run, step.step_seconds, tokens=1e12, price=2)
    for limits in ({"days": first.days}, {"budget": first.dollars}):
        again = train_fully(step.run, step.step_seconds, price=2, **limits)
        assert again == pytest.approx(first)
    assert first.dollars == pytest.approx(first.days * 24 * 16 * 2)
    assert first.kilowatt_hours == pytest.approx(first.kilowatts * first.days * 24)
    assert first.kilowatts == pytest.approx(2 * 10.2 * 1.1), "two nodes of 10.2 kW, and the building"
    assert train_fully(step.run, step.step_seconds).tokens == 20 * step.run.shape.parameters()
    with pytest.raises(UsageError, match="Give one"):
        train_fully(step.run, step.step_seconds, tokens=1e12, days=3)


def test_a_nodes_power_is_published_or_a_multiple_of_its_boards() -> None:
    assert cluster("8xH800").watts == pytest.approx(1.8 * 700) and "1.8 times" in cluster("8xH800").watts_of
    assert cluster("h800-sxm").watts == 700 and "board alone" in cluster("h800-sxm").watts_of
    assert cluster("v5p-64").watts is None


SMALL = "--model gpt2-124m --cluster 5x2xH100 --global-batch 30 --sequence-length 512 --price 2"
FIXED = "--fix recompute=none,micro-batch=1,schedule=1f1b"


def test_the_fewest_nodes_for_some_days(capsys: pytest.CaptureFixture) -> None:
    words = f"plan {SMALL} {FIXED} --tokens 1e12"
    assert main([*words.split(), "--days", "100000"]) == 0
    rows = re.findall(r"^(\d+) +([\d.]+) +\$", capsys.readouterr().out, re.M)
    assert [size for size, _ in rows] == ["2", "4", "8", "10"]
    days = (float(rows[1][1]) + float(rows[2][1])) / 2  # 4 devices take longer
    assert main([*words.split(), "--days", f"{days}"]) == 0
    said = capsys.readouterr().out
    found = re.search(rf"^{days:g} days: (\d+) devices, the fewest nodes that keep it", said, re.M)
    assert found and int(found[1]) in (6, 8)
    assert said.count("too long") == 2
    assert main([*words.split(), "--days", "0.1"]) == 1
    assert "0.1 days are too short for 1e+12 tokens on 1 to 5 nodes" in capsys.readouterr().out


def test_days_and_a_budget_give_devices_and_tokens(capsys: pytest.CaptureFixture) -> None:
    words = f"plan {SMALL} {FIXED} --days 10"
    assert main([*words.split(), "--budget", "4000"]) == 0  # a node is 960
    said = capsys.readouterr().out
    assert "8 x h100-sxm" in said and re.search(r"^training on .* tokens: 10.0 days, 1,920 device-hours", said, re.M)
    assert "cost: $3,840 at $2 a device-hour" in said
    assert main([*words.split(), "--budget", "40"]) == 2
    assert "a node for 10 days is $960" in capsys.readouterr().err
    assert main([*words.split(), "--budget", "40", "--tokens", "1"]) == 2
    assert "--days and --budget determine them" in capsys.readouterr().err


def test_an_estimate_says_what_a_time_or_a_budget_trains(capsys: pytest.CaptureFixture) -> None:
    words = ["estimate", "--model", "llama-3.2-1b", "--cluster", "8xH100", "--parallel.zero", "1"]
    assert main([*words, "--days", "7"]) == 0
    assert re.search(r"training on [\d.e+]+ tokens +7.0 days, 1,344 device-hours", capsys.readouterr().out)
    assert main([*words, "--tokens", "1e7"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"on 1e\+07 tokens +[\d.]+ seconds, 0.0\d+ device-hours, \S+ FLOPs", said)
    assert re.search(r"cost +\$0\.[1-9]\d at", said)
    assert main([*words, "--tokens", "1e4"]) == 0
    assert re.search(r"cost +less than a cent at", capsys.readouterr().out)
    assert main([*words, "--budget", "1000", "--price", "1"]) == 0
    assert re.search(r"cost +\$1,000 at \$1 a device-hour", capsys.readouterr().out)
    assert main([*words, "--budget", "1000", "--days", "7"]) == 2
    assert "one determines the others" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [{"step_seconds": -1.0}, {"tokens": 0}, {"days": -3}, {"budget": -1}, {"price": 0.0}])
def test_what_is_not_positive_is_refused(wrong):
    run = estimate(Layout(), model="tiny", cluster="1xH100").run
    (name, value), = wrong.items()
    with pytest.raises(UsageError, match=f"train_fully: {name} = {value}.\n  Give float > 0"):
        train_fully(run, **{"step_seconds": 1.0} | wrong)


@pytest.mark.parametrize(("price", "cost"), [
    (None, "the catalog has no price of mi300x: give --price"), (2.0, "at $2 a device-hour"),
])  # fmt: skip
def test_a_device_without_a_price_is_named(price: float | None, cost: str) -> None:
    found = estimate(Layout(zero=1), model="llama-2-7b", cluster="8xMI300X")
    training = train_fully(found.run, found.step_seconds, tokens=1e12, price=price)
    assert cost in dict(training_facts(found.run, training))["cost"]
