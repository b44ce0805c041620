"""Results of races; variants that do different work are refused."""

import csv
import io
import json
import os
import re
import signal
import tempfile
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from shoal.base.errors import UsageError
from shoal.cli import bench
from shoal.engine.models.products import _multiplies_faster
from shoal.labs.bench import collectives, kernels
from shoal.labs.bench.benchmark import Benchmark, Notify, Row, write_records
from shoal.labs.bench.kernels import AttentionBenchmark, PeakBenchmark
from shoal.labs.bench.race import (
    Race,
    RaceError,
    Variant,
    VariantProcesses,
    VariantResult,
    VariantTurn,
    check_agreement,
    run_race,
    summarise,
    take_turns,
    time_in_turns,
)
from shoal.labs.bench.step import benchmark as step_benchmark
from shoal.labs.bench.step.benchmark import build_races
from shoal.labs.bench.step.torch_baselines import SCHEDULES
from shoal.labs.bench.step.workload import MatmulWorkload, Workload
from shoal.launch.worker_pool import Pool

WORK = Workload()


def result(name: str, *turns: list[float], losses: float = 1.0) -> VariantResult:
    variant = Variant(name, build, WORK)
    return VariantResult(variant, [VariantTurn(seconds, seconds, [losses] * len(seconds)) for seconds in turns])


def build(workload: Workload, rank: int, ranks: int, fails: bool = False):
    """A variant whose losses tell who and where it is."""

    def step(number: int) -> float:
        if fails and number == 2:
            raise ValueError("third step")
        return number + 0.25 * rank

    return step


def test_ratio_is_that_of_medians_against_the_fastest_reference():
    ours = result("ours", [1.0, 9.0], [1.0, 1.0])
    slow, fast = result("slow", [4.0], [4.0]), result("fast", [2.0], [3.0])
    race = Race("x", (ours.variant,), (slow.variant, fast.variant), target=2.6)
    first, second, third = summarise(race, [ours, slow, fast])
    assert first["ratio"] == pytest.approx(2.5)  # median of 2 and 3, over that of 1, 9, 1, 1
    assert first["met"] is False and first["tokens_per_second"] == WORK.tokens
    assert second["ratio"] == pytest.approx(2.5 / 4) and second["target"] is None and second["met"] is None
    assert third["ratio"] == third["spread_low"] == third["spread_high"] == 1.0


def test_of_several_only_the_fastest_may_have_to_reach_the_target():
    slow, fast, other = result("slow", [4.0], [4.0]), result("fast", [1.0], [1.0]), result("other", [2.0], [2.0])
    for fastest, met in ((True, [None, True, None]), (False, [False, True, None])):
        race = Race("x", (slow.variant, fast.variant), (other.variant,), target=1.5, fastest=fastest)
        assert [row["met"] for row in summarise(race, [slow, fast, other])] == met


@pytest.mark.parametrize(
    ("sequences", "ranks", "targets"),
    [(8, 2, {"dp": 1.05, "tp": 1.4}), (2, 2, {"dp": 1.2, "tp": 1.9}), (8, 4, {"dp": 1.05, "tp": 1.6})],
)
def test_targets_are_those_of_the_tokens_and_ranks(sequences, ranks, targets):
    every = {race.name: race for race in build_races(Workload(sequences=sequences), ranks)}
    assert {name: every[name].target for name in targets} == targets
    assert every["pp best"].target == 1.1 and len(every["pp best"].references) == len(SCHEDULES)
    assert every["pp one-process"].target == 0.93


@pytest.mark.parametrize("products", [True, False])
def test_torchs_variants_alone_have_torchs_products_where_that_is_asked(products):
    for race in build_races(WORK, products=products):
        for variant in race.variants:
            build = getattr(variant.build, "func", variant.build)
            module = build.__module__.rpartition(".")[2]
            torchs = module in ("torch_baselines", "own_races") and build.__name__ != "own_step"
            bound = variant.name == "independent processes"
            assert variant.products == (products or not torchs or bound or not variant.tuned), variant.name


def multiplies(workload: Workload, rank: int, ranks: int):
    """A variant whose losses tell who makes its products."""
    return lambda number: float(torch.get_float32_matmul_precision() == "medium")


def test_a_variant_multiplies_by_its_library():
    for products, medium in ((False, False), (True, _multiplies_faster())):
        with VariantProcesses(Variant("c", multiplies, WORK, products=products)) as processes:
            assert processes.step(1).losses == [float(medium)]


def test_functions_are_timed_in_turn():
    calls: list[str] = []
    functions = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    seconds = time_in_turns(functions, 2, warmup=1, prepare=lambda name: calls.append(name.upper()), in_a_row=2)
    assert "".join(calls) == "AaaBbb" * 3
    assert [len(times) for times in seconds.values()] == [2, 2] and min(map(min, seconds.values())) >= 0


def test_share_of_a_peak_compares_flops():
    ours = result("ours", [2.0])
    product = VariantResult(Variant("product", build, MatmulWorkload(side=1000)), [VariantTurn([1.0], [1.0], [0.0])])
    race = Race("x", (ours.variant,), (product.variant,), target=0.5)
    assert summarise(race, [ours, product])[0]["ratio"] == pytest.approx(WORK.flops / 2.0 / 2e9)


@pytest.mark.parametrize("tuned", [False, True])
def test_a_peak_is_told_for_each_library_that_multiplies(tuned, monkeypatch):
    monkeypatch.setattr(kernels, "tune_products", lambda: tuned)
    out = io.StringIO()
    assert PeakBenchmark(sides=(64,)).run(Console(file=out, width=120), str)
    assert out.getvalue().count("fp32") == 1 + tuned and out.getvalue().count("bf16") == 1
    assert ("oneDNN" in out.getvalue()) == tuned


def test_flops_of_a_step_are_those_of_the_definition():
    shape = WORK.shape
    matrices = 8 * (4 * 256 * 256 + 3 * 256 * 688) + 8192 * 256
    assert WORK.flops == 2048 * (6 * matrices + 12 * 8 * 256 * 256)
    assert shape.parameters() == matrices + 8192 * 256 + 17 * 256


def test_different_losses_are_refused():
    check_agreement([result("a", [1.0]), result("b", [1.0], losses=1.0001)], 1e-3)
    with pytest.raises(match=r"a has the loss 1\.000000, b 1\.100000"):
        check_agreement([result("a", [1.0]), result("b", [1.0], losses=1.1)], 1e-3)


def test_a_variant_steps_on_from_turn_to_turn_and_adds_the_shares_of_the_ranks():
    with VariantProcesses(Variant("c", build, WORK, ranks=2)) as processes:
        assert processes.step(2).losses == [0.25, 2.25]
        turn = processes.step(1)
    assert turn.losses == [4.25] and len(turn.seconds) == len(turn.cpu_seconds) == 1


def test_what_failed_is_named_by_its_variant_and_why():
    with VariantProcesses(Variant("broken", partial(build, fails=True), WORK, ranks=2)) as processes:
        processes.step(2)
        with pytest.raises(RaceError, match=r"broken, rank \d: ValueError: third step"):
            processes.step(1)


def unbuildable(workload: Workload, rank: int, ranks: int):
    """A variant that cannot be built, for a reason of two lines."""
    raise ValueError("no such kernel\nand no other")


def test_a_variant_that_cannot_be_built_says_why():
    with VariantProcesses(Variant("broken", unbuildable, WORK)) as processes, pytest.raises(RaceError) as failed:
        processes.step(1)
    assert str(failed.value) == "broken, rank 0: ValueError: no such kernel"
    assert re.search(r"Traceback[\s\S]*no such kernel\nand no other", *failed.value.__notes__)


def sleeping(workload: Workload, rank: int, ranks: int):
    """A variant that hangs in step 8."""

    def step(number: int) -> float:
        time.sleep(60 if number == 8 else 0.1)
        return 0.0

    return step


def test_the_limit_of_a_turn_grows_with_its_steps_and_what_hangs_is_noticed(monkeypatch):
    with VariantProcesses(Variant("sleeper", sleeping, WORK)) as processes:
        assert len(processes.step(3).seconds) == 3
        monkeypatch.setattr("shoal.labs.bench.race.TIMEOUT", 0.05)
        assert len(processes.step(5).seconds) == 5
        with pytest.raises(RaceError, match="sleeper, rank 0: hung") as failed:
            processes.step(1)
    assert "in step" in failed.value.__notes__[0]


def test_a_first_turn_of_many_steps_is_given_time_by_its_first_step(monkeypatch):
    limits: list[float] = []
    run = Pool.run
    monkeypatch.setattr(Pool, "run", lambda *args, timeout: limits.append(timeout) or run(*args, timeout=timeout))
    (result,) = take_turns([Variant("sleeper", sleeping, WORK)], 1, 1, 4, str)
    assert len(result.losses) == 1
    assert limits[0] == 300 and limits[1] > 300 + 10 * 3 * 0.1


def test_batches_of_the_parts_make_up_the_step():
    whole = WORK.batch(5)
    parts = [WORK.batch(5, part, 2) for part in range(2)]
    assert torch.equal(whole.tokens, torch.cat([part.tokens for part in parts]))
    assert torch.equal(whole.tokens[:, 1:], whole.targets[:, :-1])
    assert torch.equal(whole.tokens, WORK.batch(9).tokens) and not torch.equal(whole.tokens, WORK.batch(6).tokens)


def test_attention_kernels_agree():
    timing = AttentionBenchmark(tokens=64, repeats=1).measure(32, "fp32", torch.device("cpu"))
    assert timing["difference"] < 1e-5 and timing["sdpa ms"] > 0 and timing["explicit ms"] > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["stpe"], "did you mean 'step'"),
        (["step", "--only", "dp,fsdq"], "did you mean 'fsdp'"),
        (["step", "--out", "table.xls"], "ending in .csv or .json"),
        (["step", "--out", "none/table.csv"], "there is no folder none"),
        (["step", "--turns", "0"], "turns = 0"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(args, message):
    with pytest.raises(UsageError, match=message):
        bench.main(args)


def test_a_command_that_is_asked_to_end_removes_what_it_made(tmp_path, monkeypatch):
    class Ended(Benchmark):
        def run(self, console: Console, notify: Notify) -> bool:
            with tempfile.TemporaryDirectory(dir=tmp_path):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(10)
            raise AssertionError("it goes on")

    monkeypatch.setattr(bench, "load_benchmark", lambda name: Ended)
    former = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # not this process, whatever the command does
    try:
        with pytest.raises(SystemExit, match="143"):
            bench.main(["peak"])
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, former)
    assert not list(tmp_path.iterdir())


def test_foreign_allocator_settings_are_refused(monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    with pytest.raises(UsageError, match="unset MALLOC_MMAP_MAX_"):
        bench.main(["step", "--quick"])


@pytest.mark.parametrize("ending", ["csv", "json"])
def test_table_is_written(tmp_path, ending):
    ours, theirs = result("ours", [1.0]), result("theirs", [2.0])
    table = summarise(Race("x", (ours.variant,), (theirs.variant,), target=1.5), [ours, theirs])
    out = tmp_path / f"table.{ending}"
    write_records(table, out)
    if ending == "csv":
        records = list(csv.DictReader(out.open()))
        assert float(records[0]["ratio"]) == 2.0 and records[0]["met"] == "True"
    else:
        assert json.loads(out.read_text())["rows"][0]["ratio"] == 2.0


def toy(name: str, **changes: bool) -> Race:
    """A race of two variants of no work."""
    ours, theirs = (Variant(who, partial(build, **changes), WORK) for who in ("ours", "theirs"))
    return Race(name, (ours,), (theirs,), target=0.0)


def test_a_race_that_fails_ends_no_other(tmp_path, monkeypatch, capsys):
    races = [toy("dp"), toy("tp", fails=True), toy("single")]
    monkeypatch.setattr(step_benchmark, "build_races", lambda *_, **__: races)
    out = tmp_path / "table.csv"
    assert bench.main(["step", "--quick", "--out", str(out)]) == 1
    assert [record["race"] for record in csv.DictReader(out.open())] == ["dp", "dp", "single", "single"]
    said = capsys.readouterr().out
    assert "tp failed: ours, rank 0: ValueError: third step\n" in said and "Traceback" not in said


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_races_that_are_done_are_told_whatever_ends_the_next(end, tmp_path, monkeypatch, capsys):
    def run_race(race: Race, *_: object, **__: object) -> list[Row]:
        if race.name == "tp":
            raise end
        return summarise(race, [result("ours", [1.0]), result("theirs", [2.0])])

    ours, theirs = result("ours", [1.0]).variant, result("theirs", [2.0]).variant
    every = [Race(name, (ours,), (theirs,), target=1.5) for name in ("dp", "tp")]
    monkeypatch.setattr(step_benchmark, "build_races", lambda *_, **__: every)
    monkeypatch.setattr(step_benchmark, "run_race", run_race)
    out = tmp_path / "table.json"
    with pytest.raises(end):
        bench.main(["step", "--out", str(out)])
    assert [row["race"] for row in json.loads(out.read_text())["rows"]] == ["dp", "dp"]
    assert "one training step" in capsys.readouterr().out


@pytest.mark.parametrize("options", ["step --out", "collectives --out"])
def test_a_table_is_not_written_over_another(options, tmp_path):
    there, folder = (tmp_path / f"{name}.csv" for name in ("there", "folder"))
    there.write_text("measured for hours")
    folder.mkdir()
    for path, message in ((there, "not overwritten"), (folder, "it is a folder")):
        with pytest.raises(UsageError, match=message):
            bench.main([*options.split(), str(path)])


DTENSOR = ("DTensor",) if torch.__version__ >= "2.12" else ()
"""torch 2.11 gathers a vocabulary of 257 over 2 ranks with the padding of the last one, and then fails."""


def train(variants: list[Variant]) -> list[list[float]]:
    """Return this rank's shares of the losses of three steps of each variant."""
    steps = [variant.build(variant.workload, dist.get_rank(), variant.ranks) for variant in variants]
    return [[step(number) for number in range(3)] for step in steps]


@pytest.mark.parametrize("races", [{
    "tp": ("shoal tp", "DTensor, inputs prepared"), "fsdp": ("FSDP2 fully_shard",), "zero 0": ("DDP, buckets of 8 MB",),
    "pp best": ("torch ZBVZeroBubble",),
}, {
    "own dp": ("shoal zero 1", "DDP, buckets of 8 MB"), "own fsdp": ("shoal zero 3", "FSDP2 fully_shard"),
    "own tp": ("shoal tp", *DTENSOR),
}], ids=["catalog", "own"])  # fmt: skip
def test_variants_of_a_small_model_do_the_same_work(races, pool):
    """Every kind of reference beside one of ours, on the tiny model: equal losses show that equal work is compared."""
    every = {race.name: race for race in build_races(Workload("tiny", sequence_length=16, sequences=8))}
    variants = [
        variant for name, wanted in races.items()
        for variant in (*every[name].ours, *every[name].references) if variant.name in wanted
    ]
    assert len(variants) == sum(map(len, races.values()))
    results = []
    for variant, shares in zip(variants, zip(*pool.run(train, 2, variants), strict=True), strict=True):
        losses = [sum(ranks) for ranks in zip(*shares, strict=True)]
        results.append(VariantResult(variant, [VariantTurn([1.0] * 3, [1.0] * 3, losses)]))
    assert all(len(result.losses) == 3 for result in results)
    check_agreement(results, 1e-5)


def test_all_transports_are_timed():
    (timing,) = collectives.TransportBenchmark(sizes=(4,), repeats=1).measure(2)
    assert timing["KiB"] == 4
    for way in collectives.WAYS[:2]:
        assert timing[f"gloo / {way}"] == timing["gloo us"] / timing[f"{way} us"] > 0


def test_a_bound_need_not_agree():
    """It leaves a part of the work out; it is shown, and its time is compared as any."""
    race, *_ = build_races(Workload("tiny", sequence_length=16, sequences=8))
    (bound,) = race.bounds
    race = Race("x", race.ours[:1], race.references[:1], target=0.0, bounds=race.bounds, tolerance=1e-5)
    assert [row["variant"] for row in run_race(race, 3, 1, 1, str)][-1] == bound.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("transport --ranks 1", "2 or more"),
        ("step --ranks 1", "2 or more"),
        ("step --only pp --sequences 12", "Use 16"),
        ("step --only dp --sequences 3", "Use 4"),
        ("step --only overlap-network --ranks 3", "Use 9"),
        ("step --only tp --ranks 3", "bench step, tp: parallel.tp = 3"),
    ],
)
def test_work_that_cannot_be_shared_out_is_refused(arguments: str, message: str):
    with pytest.raises(UsageError, match=message):
        bench.main(arguments.split())
