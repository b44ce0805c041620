"""`shoal bench collectives` runs everything, agrees with the backend, and writes what it prints."""

import csv
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from shoal.cli.bench import main as main_of_bench
from shoal.cli.main import main
from shoal.labs.bench import collectives
from shoal.labs.bench.benchmark import Row
from shoal.labs.collectives.description import Collective
from shoal.labs.collectives.textbook import TEXTBOOK
from shoal.launch.worker_pool import RankError


def test_every_collective_and_algorithm_is_measured(tmp_path, capsys):
    out = tmp_path / "x.csv"
    words = ["--only", "all", "--ranks", "4", "--sizes", "1kB", "--turns", "1"]
    assert main(["bench", "collectives", *words, "--out", str(out)]) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    wanted = {(c, "4", name) for c in Collective for name in ("backend", *TEXTBOOK[c])}
    assert {(row["collective"], row["ranks"], row["algorithm"]) for row in rows} == wanted
    assert len(rows) == len(wanted)
    for row in rows:
        n, bus = int(row["ranks"]), float(row["bus"])
        factor = {"all-reduce": 2 * (n - 1) / n, "broadcast": 1, "reduce": 1}.get(row["collective"], (n - 1) / n)
        assert bus == pytest.approx(factor * int(row["size"]) / float(row["seconds"]))
        assert (row["algorithm"] == "backend") <= (float(row["ratio"]) == 1)


def test_sizes_are_rounded_up_and_measured_once(pool, monkeypatch):
    monkeypatch.setattr(collectives, "Pool", lambda *_: nullcontext(pool))
    rows = list(collectives.measure([Collective.BROADCAST], [3], [1000, 1004], 1, str))
    assert {row["size"] for row in rows} == {1008}
    assert len(rows) == len({row["algorithm"] for row in rows})


@pytest.mark.parametrize("end", [RankError("x", 1, [(0, "other result")]), KeyboardInterrupt()])
def test_what_is_measured_is_told_whatever_ends_the_rest(end, tmp_path, monkeypatch, capsys):
    def measure(*_: object) -> Iterator[Row]:
        timing = {"size": 64, "seconds": 1e-3, "bus": 1e6, "ratio": 1.0}
        for collective, ranks, names in (
            ("all-reduce", 2, ("backend", "ring")), ("all-reduce", 4, ("backend", "ring")),
            ("reduce", 2, ("backend", "chain")),
        ):
            yield from ({"collective": collective, "ranks": ranks, "algorithm": name, **timing} for name in names)
        raise end

    monkeypatch.setattr(collectives, "measure", measure)
    out = tmp_path / "x.csv"
    with pytest.raises(type(end)):
        main_of_bench(["collectives", "--only", "all-reduce,reduce", "--out", str(out)])
    with out.open() as file:
        assert [row["algorithm"] for row in csv.DictReader(file)] == ["backend", "ring"] * 2 + ["backend", "chain"]
    assert "chain" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "all-redcue"], "did you mean 'all-reduce'"),
        (["--sizes", "0MB"], "above 0"),
        (["--sizes", "much"], "--sizes much"),
        (["--ranks", "1"], "2 to 32"),
        (["--out", "x.txt"], "ending in .csv"),
        (["--out", "nowhere/x.csv"], "there is no folder nowhere"),
    ],
)
def test_bad_options(words, message, capsys):
    assert main(["bench", "collectives", *words]) == 2
    assert message in capsys.readouterr().err
