"""What else a search answers: the fewest devices, the fastest for some money, a map; each as asking one by one says."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import shoal
from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.planning.search.planner import LayoutPlanner
from shoal.planning.search.search import search
from shoal.planning.search.space import LayoutSpace, check_fixed

FEW = LayoutSpace(("1f1b", "zb-h1"), most_virtual=2, uneven=False)
SMALL = "--global-batch 30 --sequence-length 512 --fix recompute=none,micro-batch=1"


def planner(*names: str, global_batch: int, space: LayoutSpace = FEW) -> LayoutPlanner:
    found = LayoutPlanner(*names, global_batch=global_batch, sequence_length=4096)
    found.space = space
    return found


def test_the_fewest_may_be_a_number_that_does_not_divide_a_node() -> None:
    asked = planner("llama-2-13b", "2x8xH100", global_batch=12)
    assert asked.fewest().run.cluster.size == 3
    assert all(asked.best_on(asked.run.cluster.part(1, n)) is None for n in (1, 2))


def test_an_awkward_size_names_the_batch_and_the_devices_that_gain(capsys: pytest.CaptureFixture) -> None:
    fixed = "recompute=none,micro-batch=1,schedule=1f1b"
    words = f"plan --cluster 25x8xH100 --global-batch 512 --fix {fixed}"
    assert main(words.split()) == 0
    said = capsys.readouterr().out
    batch = re.search(r"^Faster: --global-batch 500 \(-2.3 %\): (\d+) % more tokens per second, dp", said, re.M)
    fewer = re.search(r"^Faster: --cluster 24x8xH100 \(8 devices fewer\): (\d+) % more tokens per second", said, re.M)
    assert batch and fewer
    before = search(LayoutPlanner(cluster="25x8xH100", global_batch=512).run, LayoutSpace(fixed=check_fixed(fixed)))
    gained = LayoutPlanner(cluster="25x8xH100", global_batch=500, fixed=fixed).plan()
    assert int(batch[1]) == round(100 * (gained.tokens_per_second / before.tokens_per_second - 1))
    assert gained.nearby == [], "what was named is not awkward itself"


def test_a_size_that_no_layout_has_names_the_nearest_that_has(capsys: pytest.CaptureFixture) -> None:
    words = "plan --model gpt2-124m --cluster 37x8xH100 --global-batch 500"
    assert main(words.split()) == 2
    remedy = re.search(r"Give --global-batch (\d+) or --cluster (\w+)\.", capsys.readouterr().err)
    assert remedy and remedy[2] == "36x8xH100"
    assert int(remedy[1]) % 37 == 0 and abs(int(remedy[1]) - 500) < 37


def test_the_fastest_for_some_money_is_that_of_all_numbers_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """30 sequences divide into 2, 6 and 10 replicas: 4 nodes are dearer than 5, and 2 than 3."""
    few = replace(FEW, fixed={"recompute": "selective"})
    asked = planner("llama-3.2-1b", "5x2xH100", global_batch=30, space=few)
    every = [asked.best_on(asked.run.cluster.part(n)) for n in range(1, 6)]
    prices = [plan.found.seconds * plan.run.cluster.size for plan in every]
    assert prices[1] > prices[2] and prices[3] > prices[4], "they do not rise with the nodes"
    for limit in (1.0001 * prices[2], 1.0001 * prices[4], 0.99 * min(prices)):
        cheap = [plan for plan, price in zip(every, prices, strict=True) if price <= limit]
        found = asked.affordable(limit)
        fastest = min(cheap, key=lambda plan: plan.found.seconds, default=None)
        assert (found and found.found.seconds) == (fastest and fastest.found.seconds)
    monkeypatch.setattr(asked, "best_on", None)
    assert asked.affordable(0.1 * min(prices)) is None, "nothing is sought where the products alone take longer"


def test_days_and_dollars_are_seconds_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = planner("llama-3.2-1b", "5x2xH100", global_batch=30)
    steps = {"tokens": 1000 * asked.run.tokens, "price": 2.0}
    limits: list[float] = []
    monkeypatch.setattr(asked, "doubling", lambda progress: ())
    monkeypatch.setattr(asked, "affordable", lambda limit, progress: limits.append(limit))
    monkeypatch.setattr(asked, "fast_enough", lambda limit, known, progress: limits.append(limit))
    asked.train_within(budget=100, **steps)  # pays for 50 hours of a device
    asked.train_within(days=2, **steps)
    assert limits == pytest.approx([50 * 3600 / 1000, 2 * 86400 / 1000])
    with pytest.raises(UsageError, match=r"--budget 191: a node for 2 days is \$192"):
        asked.limit(2, 191, 2)
    for budget, nodes in ((10_000, 5), (3 * 192, 3), (3 * 192 - 1, 2)):
        asked.limit(2, budget, 2)
        assert asked.run.cluster.nodes == nodes


def test_a_budget_is_met(capsys: pytest.CaptureFixture) -> None:
    words = f"plan --model gpt2-124m --cluster 5x2xH100 {SMALL} --tokens 1e12 --price 2"
    assert main([*words.split(), "--budget", "1e9"]) == 0
    said = capsys.readouterr().out
    rows = {int(row[1]): (float(row[2]), int(row[3].replace(",", ""))) for row in
            re.finditer(r"^(\d+) +([\d.]+) +\$([\d,]+) ", said, re.M)}  # fmt: skip
    assert set(rows) == {2, 4, 8, 10} and "over budget" not in said
    assert min(days for days, _ in rows.values()) == rows[10][0]
    for size, (days, dollars) in rows.items():
        assert dollars == pytest.approx(days * 24 * size * 2, rel=0.02)
    assert "$1,000,000,000: 10 devices" in said
    assert main([*words.split(), "--budget", "1"]) == 1
    assert "does not pay for 1e+12 tokens on 1 to 5 nodes" in capsys.readouterr().out


def test_the_fewest_are_said(capsys: pytest.CaptureFixture) -> None:
    words = "plan --model gpt2-124m --cluster 2x2xH100 --global-batch 4 --sequence-length 512"
    assert main([*words.split(), "--fix", "schedule=1f1b", "--fewest"]) == 0
    assert "1 x h100-sxm is the smallest number that holds gpt2-124m" in capsys.readouterr().out
    assert main([*["plan", "--model", "llama-3-405b", "--cluster", "8xH100", "--global-batch", "8", "--fewest"]]) == 1
    assert "does not fit on any tried number of h100-sxm" in capsys.readouterr().out


def test_a_map_has_a_cell_for_each_model_and_number_of_nodes(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    out = tmp_path / "map.svg"
    words = f"plan --model gpt2-124m,llama-3-405b --cluster 2x2xH100 {SMALL} --map 1,3 --out {out}"
    assert main(words.split()) == 0
    said = capsys.readouterr().out
    assert re.search(r"^gpt2-124m +2 +\d", said, re.M) and re.search(r"^gpt2-124m +6 +\d", said, re.M)
    assert said.count("does not fit") == 2
    figure = out.read_text()
    assert figure.count("MFU") == 2 and figure.count("does not fit") == 2 and "3 nodes" in figure


def test_a_batch_that_is_not_given_divides_among_awkward_devices() -> None:
    """512 sequences on 100 devices took 25 pipeline stages, and half as many tokens per second as 500."""
    free, given = (LayoutPlanner("llama-3-8b", "100xH100", global_batch=batch).plan() for batch in (None, 512))
    assert free.run.global_batch == 500 and free.tokens_per_second > 1.9 * given.tokens_per_second
    fixed = LayoutPlanner("llama-3-8b", "25x8xH100", fixed="dp=8,zero=1,schedule=1f1b,micro_batch=1").plan()
    assert fixed.run.global_batch == 512, "500 sequences do not divide among 8 replicas"
    alone = shoal.estimate(free.found.layout, model="llama-3-8b", cluster="100xH100")
    assert alone.run.global_batch == 500 and alone.step_seconds == pytest.approx(free.found.seconds)
