"""`shoal explain`: what is printed and drawn is what the description counts; what cannot be is refused."""

import re
import xml.etree.ElementTree as ET

import pytest

from shoal.cli.main import main
from shoal.labs.collectives.description import Collective
from shoal.labs.collectives.textbook import TEXTBOOK, describe
from shoal.labs.explain.rounds import describe_round, shade
from shoal.labs.explain.scaling import CHINCHILLA
from shoal.labs.explain.subjects import SUBJECTS

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def explained(capsys, *words):
    assert main(["explain", *words]) == 0
    return capsys.readouterr().out


def test_the_broadcast_that_textbooks_work_out(capsys):
    out = explained(
        capsys, "broadcast", "--ranks", "8", "--algorithm", "tree",
        "--size", "5MB", "--bandwidth", "1MB/s", "--alpha", "0s",
    )
    assert re.search(r"^tree +3 +3 +0 +7 +15 s", out, re.M)
    assert re.search(r"^flat +7 +7 +0 +7 +35 s", out, re.M)
    assert "0→2 4→6: 1 block" in out
    assert re.search(r"time, this network +0 s \+ S x 3 s per MB = 15 s", out)


def test_scaling_laws_and_years(capsys):
    out = explained(capsys, "scaling", "--flops", "5.88e23")
    best = CHINCHILLA.optimum(5.88e23)
    assert re.search(rf"Chinchilla +{best.parameters:.3g} +{best.tokens:.3g} .* {best.loss:.3f}".replace("+", r"\+")
                     .replace(r" \+", " +"), out)  # fmt: skip
    assert re.search(r"5.88e\+23 +6,810 +Kaplan ", out)
    assert re.search(r"20 tokens each +7e\+10 +1.4e\+12 +20 +1.921", out), "Hoffmann et al. 2022: Chinchilla"
    assert re.search(r"macbook-m3, fp16 +18 +923 +66,781", out)
    assert re.search(r"core-ultra-258v, fp16 +24 +692 .*\n  as printed, int8 +48 +346 +25,043", out)
    assert re.search(r"tpu-v6e, bf16 +918 +18.1 +[\d.]+ +1,309", out)
    assert re.search(r"h100-sxm, bf16 +989 +16.8 .*\n  as printed, sparse +1,979 +8.4 +607", out)
    assert re.search(r"macbook-m3, fp16 +18 +1,846 +133,562", explained(capsys, "scaling", "--utilisation", "0.5"))


def test_all_reduce(capsys):
    out = explained(capsys, "all-reduce", "--ranks", "8", "--algorithm", "ring")
    assert "every rank r → r + 1: 1 block, added" in out and "every rank r → r + 1: 1 block" in out
    assert re.search(r"total volume +14 S = 224 MB over 112 messages", out)
    assert re.search(r"peak volume +7/4 S = 28 MB", out)
    assert re.search(r"lower bound +3 7/4 7/8", out)
    assert re.search(r"fastest: recursive-doubling from 0 B to 1.07 MB, halving-doubling from 1.07 MB on", out)
    assert out.count("████████") == 8  # all ranks complete after the last round, and none before


@pytest.mark.parametrize("topology", ["full", "ring", "torus-2d", "torus-3d", "fat-tree", "islands"])
def test_every_network(capsys, topology):
    out = explained(capsys, "all-reduce", "--topology", topology, "--ranks", "12", "--algorithm", "hierarchical")
    assert all(f"\n{name} " in out for name in TEXTBOOK[Collective.ALL_REDUCE])


def test_no_algorithm_is_broken_on_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["explain", "all-reduce"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in TEXTBOOK[Collective.ALL_REDUCE])


@pytest.mark.parametrize("collective", Collective)
def test_every_collective_is_drawn(capsys, tmp_path, collective):
    out = explained(
        capsys, collective, "--topology", "islands", "--ranks", "4", "--per-node", "2", "--algorithm", "hierarchical",
        "--out", str(tmp_path / "x.svg"),
    )
    assert all(f"\n{name} " in out for name in TEXTBOOK[collective])
    messages = list(describe(collective, "hierarchical", 4, per_node=2).messages)
    paths = [path.get("d", "").split() for path in ET.parse(tmp_path / "x.svg").iter(f"{SVG}path")]
    assert len([path for path in paths if path.count("C") == 1]) == len(messages)  # an arrow is one curve


@pytest.mark.parametrize("ranks", [1, 2, 18])
def test_any_number_of_ranks(capsys, tmp_path, ranks):
    drawn = tmp_path / "x.svg"
    out = explained(capsys, "all-reduce", "--ranks", str(ranks), "--algorithm", "ring", "--out", str(drawn))
    assert f"on {ranks} ranks by ring" in out
    assert ("more rounds" in out) == (ranks == 18)
    ET.parse(drawn)


def test_the_pipelined_chain(capsys):
    out = explained(capsys, "broadcast", "--ranks", "4", "--algorithm", "ring", "--segments", "10")
    assert re.search(r"rounds +12 *\n", out)


def test_phrases():
    doubling = describe("all-reduce", "recursive-doubling", 8)
    assert [describe_round(doubling, messages) for messages in doubling.rounds] == [
        "0↔1 2↔3 4↔5 6↔7: 1 block, added",
        "0↔2 1↔3 4↔6 5↔7: 1 block, added",
        "every rank r → r + 4: 1 block, added",
    ]
    scatter = describe("scatter", "tree", 6)
    assert [describe_round(scatter, messages) for messages in scatter.rounds] == [
        "0→4: 2 blocks", "0→2: 2 blocks", "0→1 2→3 4→5: 1 block"
    ]
    assert "".join(shade(part / 8) for part in range(9)) == "·░░▒▒▒▓▓█"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["all-redcue"], "did you mean 'all-reduce'"),
        (["all-reduce", "--size", "16 Mb"], "--size 16 Mb: give a number and a unit"),
        (["all-reduce", "--algorithm", "rign"], "did you mean 'ring'"),
        (["all-reduce", "--topology", "torus"], "--topology torus: did you mean 'torus-"),
        (["all-reduce", "--link", "infiniband"], "link 'infiniband' is not in the catalog"),
        (["all-reduce", "--bandwidth", "0GB/s"], "must be above 0"),
        (["all-reduce", "--root", "1"], "all-reduce has no root"),
        (["broadcast", "--root", "8"], "root 8 is no rank of 8"),
        (["broadcast", "--ranks", "0"], "ranks = 0"),
        (["broadcast", "--ranks", "65"], "at most 64"),
        (["broadcast", "--out", "x.png"], "ending in .svg"),
        (["broadcast", "--topology", "islands", "--per-node", "3"], "3"),
        (["all-reduce", "--oversubscription", "8"], "--oversubscription 8.0: only for --topology fat-tree, not full"),
        (["all-reduce", "--topology", "fat-tree", "--nics", "2"], "only for --topology islands, not fat-tree"),
        (["all-reduce", "--segments", "4"], "--segments 4: only for a broadcast or reduce, not all-reduce"),
        (["all-reduce", "--values", "1,2"], "--values 1,2: 2 numbers for 8 ranks; give --ranks 2"),
        (["all-reduce", "--ranks", "2", "--values", "1,nan"], "--values 1,nan: give numbers with commas"),
        (["all-reduce", "--ranks", "2", "--algorithm", "ring", "--values", "1,2"], "by ring moves 2 blocks"),
        (["all-gather", "--ranks", "1", "--values", "1"], "the full vector: broadcast, reduce or all-reduce"),
        (["backprop", "--samples", "1,2"], "--samples 1,2: give 2 inputs and the target"),
        (["backprop", "--weights", "1"], "--weights 1: give 1 to 4 weights and the bias"),
        (["backprop", "--ranks", "3"], "2 do not fill steps of --ranks 3 x --accumulate 1 = 3 samples"),
        (["backprop", "--ranks", "9"], "--ranks 9: each rank is printed; at most 8"),
    ],
)
def test_what_cannot_be_explained(capsys, words, message):
    assert main(["explain", *words]) == 2
    assert message in capsys.readouterr().err


def test_subjects_are_listed_on_one_screen(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        main(["explain", "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"\b{subject}\b", out) for subject in SUBJECTS)
    assert len(out.splitlines()) <= 24 and max(map(len, out.splitlines())) <= 80
