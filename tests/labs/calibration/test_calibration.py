"""A profile recovers the machine that its measurements came from, and estimates with it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.cli.calibrate import CalibrateOptions, run
from shoal.cli.main import main
from shoal.labs.bench.step.workload import Workload
from shoal.labs.calibration import measure as calibration_measure
from shoal.labs.calibration.check import (
    RANKS,
    MeasuredLayout,
    build_run,
    draw_layouts,
    format_check,
    is_right,
    pick,
    spearman,
    write_scatter,
)  # fmt: skip
from shoal.labs.calibration.measure import (
    AGAIN,
    ATTENTION,
    COPIED,
    MODELS,
    PRODUCTS,
    REDUCED,
    SPLIT,
    SPLIT_MODELS,
    UPDATED,
    CoreMeasurements,
    build_model_shape,
    measure,
    measure_waits,
    time_kernels,
    time_reference,
    time_split,
)  # fmt: skip
from shoal.labs.calibration.profile import PASSES, _both, _kernels, build_profile, solve
from shoal.launch.worker_pool import Pool
from shoal.planning.estimate import Estimate
from shoal.planning.search.search import search
from shoal.planning.search.space import LayoutSpace
from shoal.spec.catalog import tables
from shoal.spec.catalog.clusters import cluster
from shoal.spec.layout import Layout

PEAK, BANDWIDTH = 1e11, 2e10
TRUE = {
    "product": 1.0, "short_m": 20.0, "short_k": 30.0, "flash_2": 0.3, "narrow_head": 20.0, "hbm": 1.0,
    "short_sequence": 40.0, "launch_backward": 1.5, "launch_selective": 0.7,
    "launch": 1e-4, "passes_loss": 9.0, **{name: 2 * value for name, value in PASSES.items()},
}  # fmt: skip


@pytest.fixture
def found() -> CoreMeasurements:
    """What a machine takes that is exactly as the cost model says, but for the bytes of products."""
    rate = {"fp32": PEAK, "bf16": 3 * PEAK, "fp64": PEAK / 2}
    products = {
        (kind, m, k, n): 2 * m * k * n / peak * (1 + 20 / m + 30 * (1 / k + 1 / n))
        for kind, peak in rate.items() for m, k, n in PRODUCTS
    }  # fmt: skip
    attention = {
        (heads, s, d): 3.5 * 2 * 1024 * heads * (s + 40) * (d + 20) / (PEAK * 0.3) for heads, s, d in ATTENTION
    }
    reduces = {
        (n, size): max(1, n / 2) * (2 * min(n - 1, (n - 1).bit_length()) * 1e-5 + 2 * (n - 1) / n * size / 4e9)
        for n in (2, 4) for size in REDUCED
    }  # fmt: skip
    ones = dict.fromkeys(MODELS, 1.0)
    empty = CoreMeasurements(2, 2, products, attention, ones, ones, {}, 8 * COPIED / BANDWIDTH,
                     1.5 * 32 * UPDATED / BANDWIDTH, 0.1, reduces, {})  # fmt: skip
    k = _kernels(MODELS, PEAK, BANDWIDTH, TRUE)
    head = k.product(k.runs.tokens, k.runs.hidden, k.runs.vocab, k.rate)
    loss = 4 * 9 * k.runs.tokens * k.runs.vocab / BANDWIDTH
    layer = k.products + k.attention[0] + k.elements + 1e-4
    backward = 2 * k.products + 2.5 * k.attention[0] + 2 * k.elements + 1.5e-4
    forwards = k.runs.layers * layer + head + loss / 3 + 1e-4
    models = k.runs.layers * (layer + backward) + 3 * head + loss + 3e-4
    models, forwards = (dict(zip(MODELS, seconds.tolist(), strict=True)) for seconds in (models, forwards))
    more = dict(zip(MODELS, (k.runs.layers * (k.attention[0] + 0.7e-4)).tolist(), strict=True))
    again = {size: models[size] + more[size] for size in AGAIN}
    return replace(empty, models=models, forwards=forwards, again=again, split=_split())


def _split() -> dict[tuple[str, int, int, int], float]:
    """Two ranks on that machine: collectives take three times as long as in a row, and tp launches 20 % more; of ranks
    that meet the last is 10 % later."""
    more = {"micro_batch": 3e-4, "latency_inside": 3e-5, "launch_exchange": 0.2, "inside": 1 / 3, "wait": 0.0}
    more["collective_launch"] = 0.0
    copies, tp, sequence = (
        _both(_kernels(SPLIT_MODELS, PEAK, BANDWIDTH, {**TRUE, **more}, tp=n, sequence_parallel=cut, inside=2 * 4e9 / 4,
                       per_node=2, through_memory=1)) for n, cut in ((1, False), (2, False), (2, True))
    )  # fmt: skip
    zero = [
        alone + 3 * (layers + 2) * 2 * 3e-5 + 3 * 6 * build_model_shape(layers, hidden).parameters() / 4e9
        for alone, (layers, hidden, _) in zip(copies, SPLIT_MODELS, strict=True)
    ]
    ways = {"copies": copies, "zero 3": zero, "tp": tp, "sequence": sequence}
    return {
        (way, *size): (1.0 if way == "copies" else 1.1) * float(one)
        for way, of in ways.items() for size, one in zip(SPLIT_MODELS, of, strict=True)
    }


@pytest.fixture
def here(found: CoreMeasurements, tmp_path: Path):
    """A catalog with that machine."""
    file = tmp_path / "here.toml"
    file.write_text(tomli_w.dumps(build_profile(found, 4e9, "a test")))
    tables.add_catalog(file)
    yield file
    tables.forget()


def test_a_profile_recovers_the_machine(found: CoreMeasurements) -> None:
    made = build_profile(found, 4e9, "a test")
    machine, node = made["accelerators"]["here"], made["nodes"]["here"]
    assert machine["peak_flops"] == pytest.approx({"fp32": PEAK, "bf16": 3 * PEAK, "fp64": PEAK / 2}, rel=0.03)
    assert machine["memory_bandwidth"] == pytest.approx(BANDWIDTH)
    assert made["links"]["here"]["bandwidth"] == pytest.approx(4e9, rel=1e-3)
    assert made["links"]["here"]["latency"] == pytest.approx(1e-5, rel=1e-3)
    assert node["constants"]["latency_inside"] == pytest.approx(3e-5, rel=0.1)
    assert node["constants"]["inside"] == pytest.approx(1 / 3, rel=0.1)
    assert node["constants"]["launch_exchange"] == pytest.approx(0.2, abs=0.1)
    assert node["constants"]["update_slow"] == pytest.approx(1.5, rel=1e-3)
    assert {name: node["constants"][name] for name in TRUE} == pytest.approx(TRUE, rel=0.2)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False))
def test_whatever_a_busy_machine_measures_makes_a_profile(found: CoreMeasurements, random: Random) -> None:
    """Every number is finite, and what is divided by is not 0."""
    def disturbed(times: dict[Any, float]) -> dict[Any, float]:
        return {key: seconds * random.choice((0.3, 1, 1, 10)) for key, seconds in times.items()}

    names = ("products", "attention", "reduces", "models", "forwards", "again")
    made = build_profile(replace(found, **{name: disturbed(getattr(found, name)) for name in names}), 4e9, "a test")
    machine, link, node = (made[kind]["here"] for kind in ("accelerators", "links", "nodes"))
    for value in (*machine["peak_flops"].values(), link["bandwidth"], *node["constants"].values()):
        assert 0 <= value < float("inf")
    assert min(*machine["peak_flops"].values(), link["bandwidth"], node["constants"]["flash_2"]) > 0


def test_of_a_single_core_collectives_take_what_they_take_alone(found: CoreMeasurements) -> None:
    constants = build_profile(replace(found, split={}), 4e9, "a test")["nodes"]["here"]["constants"]
    assert constants["latency_inside"] == pytest.approx(1e-5, rel=1e-3) and constants["launch_exchange"] == 0


def test_no_factor_is_negative() -> None:
    design = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]])
    assert solve(design, design @ [2.0, 3.0]) == pytest.approx([2.0, 3.0])
    assert (solve(design, design @ [2.0, -0.1]) >= 0).all()


def test_ranks_that_share_cores_take_turns(here: Path) -> None:
    step = {layout: Estimate(build_run(layout, "here")).step_seconds for layout in map(_dp, (1, 2, 4))}
    one, two, four = step.values()
    assert 1.1 * one / 2 < two < 0.75 * one, "two cores, and 10 % because they meet"
    assert four > 1.2 / 1.1 * 0.95 * two, "no more cores, but more that meet"
    one_by_one = Estimate(build_run(Layout(pp=4, micro_batch=12), "here"))
    assert one_by_one.step_seconds == pytest.approx(one_by_one.timeline.step_time, rel=0.01), "one computes at a time"
    pipe = Estimate(build_run(Layout(pp=4), "here"))
    busy = sum(sum(pipe.times[:, stage]) * 12 + sum(pipe.finishing[stage]) for stage in range(4))
    assert max(pipe.timeline.step_time, busy / 2) < pipe.step_seconds < pipe.timeline.step_time + busy / 2


def test_ranks_share_a_machines_memory_and_all_of_its_cores(found: CoreMeasurements, here: Path) -> None:
    one, four = cluster("1xhere"), cluster("4xhere")
    assert one.memory_bytes == 4e9 == 4 * four.memory_bytes
    assert Estimate(build_run(Layout(dp=4, micro_batch=3), "here")).capacity == 1e9
    here.write_text(tomli_w.dumps(build_profile(replace(found, cores=8, usable=96), 4e9, "eight were measured")))
    tables.add_catalog(here)
    assert cluster("96xhere").turns == 1 == cluster("16xhere").turns


def _dp(ranks: int) -> Layout:
    return Layout(dp=ranks, micro_batch=12 // ranks)


def test_a_search_prices_turns_as_an_estimate_does(here: Path) -> None:
    plan = search(build_run(Layout(dp=4), "here"), LayoutSpace(("1f1b", "zb-v"), most_virtual=2))
    assert plan.best
    for one in plan.best:
        assert one.seconds == pytest.approx(Estimate(build_run(one.layout, "here")).step_seconds, rel=1e-9)


@pytest.mark.parametrize("words", [
    "estimate --global-batch 12 --catalog FILE",
    "estimate --global-batch 12 --out page.html --catalog=FILE",
    "plan --global-batch 12 --sequence-length 128 --fix schedule=1f1b,recompute=none --catalog FILE",
])  # fmt: skip
def test_a_profile_is_a_catalog(here: Path, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = f"{words} --model tiny --precision fp32 --cluster 2xhere".replace("FILE", str(here))
    assert main(words.split()) == 0


def test_layouts_of_every_number_of_ranks_are_drawn() -> None:
    drawn = draw_layouts(20)
    assert len({str(layout) for layout in drawn}) == 20
    assert {layout.world_size for layout in drawn} == set(RANKS)


def test_the_table_says_how_far_off_and_whether_the_order_isis_right(tmp_path: Path) -> None:
    times = ((1, 4.0, 4.4), (2, 2.0, 2.0), (4, 1.0, 0.8))
    found = [MeasuredLayout(Layout(dp=n), measured, estimated) for n, measured, estimated in times]
    assert spearman(found) == 1.0
    assert spearman([MeasuredLayout(one.layout, one.measured, 1 / one.measured) for one in found]) == -1.0
    assert format_check(found)[-1].startswith("median error 10.0 %; order (Spearman) 1.000;")
    kept = MeasuredLayout(Layout(dp=2, zero=3, recompute="full", reshard_after_forward=False), 1.0, 1.0)
    assert kept.describe() == "dp 2 (ZeRO-3), micro-batch 1, recompute full, kept after forward"
    assert is_right(found[:2]) and not is_right(found[::2]), "4.4 for 4, and 0.8 for 1"
    others = [MeasuredLayout(Layout(), one, one * off) for one, off in ((1.0, 1.09), (1.05, 1.0), (1.1, 0.93))]
    assert not is_right(others), "near, but the other way round"
    write_scatter(tmp_path / "scatter.svg", found)
    drawn = (tmp_path / "scatter.svg").read_text()
    assert all(f">{n} rank{'s' * (n > 1)}<" in drawn for n in (1, 2, 4)) and ">3 ranks<" not in drawn


def test_a_pick_is_measured_beside_the_fastest(here: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts = [Layout(micro_batch=n) for n in (12, 4)]
    monkeypatch.setattr("shoal.labs.calibration.check.list_layouts", lambda ranks: layouts)
    monkeypatch.setattr("shoal.labs.calibration.check.REFERENCES", 1)
    monkeypatch.setattr("shoal.labs.calibration.check.WORK", Workload("tiny", sequence_length=16, sequences=12))
    monkeypatch.setattr("shoal.labs.calibration.check.time_reference", time_smaller_reference)
    found = pick(pool, 1, 1, lambda done, what: None)
    assert {one.layout.micro_batch for one in found} == {4, 12}
    assert found[0].estimated < found[1].estimated and min(one.measured for one in found) > 0


def test_the_fastest_are_measured_again_and_the_last_by_new_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    every = [Layout(micro_batch=n) for n in range(1, 31)]
    estimated = {layout: 1.0 if layout.micro_batch == 20 else 2.0 for layout in every}
    asked = []

    def compare(pool, chosen, rounds, say, steps=2):
        say(1.0, "")
        asked.append((rounds, {layout.micro_batch for layout in chosen}))
        backwards = len(asked) == 2  # who was fastest in one step is not in ten
        return [MeasuredLayout(layout, 100 - m if backwards else m, estimated[layout])
                for layout, m in ((layout, layout.micro_batch) for layout in chosen)]  # fmt: skip

    monkeypatch.setattr("shoal.labs.calibration.check.list_layouts", lambda ranks: every)
    monkeypatch.setattr("shoal.labs.calibration.check.compare", compare)
    said: list[float] = []
    found = pick(None, 4, 5, lambda done, what: said.append(done))
    assert asked == [(1, set(range(1, 31))), (5, {20, *range(1, 13)}), (15, {20, 12, 11, 10})]
    assert [one.layout.micro_batch for one in found] == [20, 12, 11, 10]
    assert [one.measured for one in found] == [20, 12, 11, 10], "the last measurements alone"
    assert said == sorted(said) and said[-1] == 1.0


@contextmanager
def fewer() -> Iterator[None]:
    """Measure the smallest of the products and models, as many as there are constants to fit, and few meetings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration_measure, "PRODUCTS", PRODUCTS[2:5])
        patch.setattr(calibration_measure, "MODELS", (MODELS[0], MODELS[1], *AGAIN, (1, 128, 256)))
        patch.setattr(calibration_measure, "REFERENCE", MODELS[0])
        patch.setattr(calibration_measure, "MEETINGS", 4)
        yield


def time_fewer_kernels(turn: int) -> dict[tuple[str, tuple], float]:
    with fewer():
        return time_kernels(turn)


def measure_fewer_waits(rounds: int) -> float:
    with fewer():
        return measure_waits(rounds)


def time_smaller_reference(repeats: int) -> list[float]:
    with fewer():
        return time_reference(repeats)


def test_what_is_measured_here_makes_a_profile(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_measure, "time_kernels", time_fewer_kernels)
    monkeypatch.setattr(calibration_measure, "REFERENCE", MODELS[0])
    said = []
    found = measure(pool, 1, 1, [2], 1, lambda done, what: said.append(what))
    made = build_profile(found, 1e9, "a test")
    assert made["accelerators"]["here"]["peak_flops"]["fp32"] > 1e8
    assert all(value >= 0 for value in made["nodes"]["here"]["constants"].values())
    assert len(said) == 2 and found.waits == 0 and not found.split
    assert 0 <= pool.run(measure_fewer_waits, 2, 1)[0] < 5
    every = pool.run(time_split, 2, (1, 128, 128), 1)
    assert set(every[0]) == set(every[1]) == set(SPLIT)
    assert min(every[0].values()) > 1e-4


def test_a_profile_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "here.toml"
    file.write_text("")
    assert main(["calibrate", "--out", str(file)]) == 2
    assert "not overwritten" in capsys.readouterr().err
    with pytest.raises(UsageError, match=r"ending in \.toml"):
        run(CalibrateOptions(out=tmp_path / "here.json"))


def test_a_figure_is_not_drawn_over_another(here: Path, tmp_path: Path) -> None:
    (tmp_path / "scatter.svg").write_text("of another machine")
    with pytest.raises(UsageError, match="not overwritten"):
        run(CalibrateOptions(check=here, scatter=tmp_path / "scatter.svg"))
    with pytest.raises(UsageError, match="there is no folder"):
        run(CalibrateOptions(check=here, scatter=tmp_path / "none" / "scatter.svg"))


def test_a_profile_without_its_reference_is_refused(here: Path) -> None:
    here.write_text("".join(line for line in here.read_text().splitlines(True) if not line.startswith("reference")))
    with pytest.raises(UsageError, match="no profile of this version"):
        run(CalibrateOptions(check=here))


def test_a_constant_that_is_not_known_is_refused(here: Path) -> None:
    here.write_text(here.read_text().replace("short_m =", "shortm ="))
    tables.add_catalog(here)
    with pytest.raises(UsageError, match="no constant 'shortm'"):
        Estimate(build_run(Layout(), "here"))
