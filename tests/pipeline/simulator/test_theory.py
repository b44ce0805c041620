"""The simulator against the papers' closed forms, and against the table of formulas."""

import csv
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.pipeline.program import Program, build_program
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.schedules.auto import zb_auto
from shoal.pipeline.schedules.placement import looped
from shoal.pipeline.simulator import ActionTimes, Timeline, simulate
from shoal.pipeline.simulator.theory import THEORY, EqualStages

FORMULAS = Path(__file__).parents[4] / "shared" / "measured" / "schedule_formulas.csv"
SPANS = st.sampled_from((0.5, 0.75, 1.0, 1.25, 1.5, 2.0))


def play(name: str, step: EqualStages) -> Timeline:
    program = build_program(SCHEDULES[name], step.p, step.m, virtual_stages=step.v, transfers=False)
    return simulate(program, ActionTimes(step.f, step.b, step.w, pair=step.pair))


@st.composite
def steps(draw: st.DrawFn, name: str) -> EqualStages:
    """A step that a schedule's closed forms hold for."""
    schedule = SCHEDULES[name]
    both_ways = name.startswith("dualpipe")
    p = 2 * draw(st.integers(1, 4)) if name == "dualpipe" else draw(st.integers(1, 8))
    v = schedule.virtual or draw(st.integers(1, 3))
    least = {"zb": 2 * p, "du": 4 * p}.get(name[:2], 1)
    m = p * draw(st.integers(-(-least // p), 6)) if v > 1 else draw(st.integers(least, 48))
    w, f, b = sorted(draw(st.tuples(SPANS, SPANS, SPANS))) if name[:2] in ("zb", "du", "in") else (1.0, 1.0, 1.5)
    if name == "zb-v":
        f = b = w
    pair = draw(st.sampled_from((1.0, 0.9))) * (f + b + w) if both_ways else None
    step = EqualStages(p, m, v, f, b, w, pair)
    assume(THEORY[name].holds(step))
    return step


@pytest.mark.parametrize("name", sorted(THEORY))
@settings(deadline=None, max_examples=40)
@given(st.data())
def test_idle_time_and_memory_are_those_of_the_papers_exactly(name: str, data: st.DataObject) -> None:
    step, theory = data.draw(steps(name)), THEORY[name]
    timeline = play(name, step)
    idle = timeline.idle if theory.flushed else timeline.stall
    assert idle.max() == pytest.approx(theory.idle(step), abs=1e-6)
    assert timeline.peak_live.max() == theory.alive(step)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "looped-bfs", "interleaved-1f1b"])
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 3))
def test_the_bubble_by_its_two_definitions(name: str, p: int, rounds: int, v: int) -> None:
    """GPipe's, over the step: (p-1)/(v m + p-1); Megatron's, over the ideal time: (p-1)/(v m)."""
    v = SCHEDULES[name].virtual or v
    m = p * rounds
    timeline = play(name, EqualStages(p, m, v))
    assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1))
    assert timeline.bubble_over_ideal == pytest.approx((p - 1) / (v * m))
    assert timeline.bubble_of_slowest_rank == pytest.approx(timeline.bubble)


def test_1f1b_keeps_fewer_activations_on_every_later_rank() -> None:
    assert play("1f1b", EqualStages(4, 8)).peak_live.tolist() == [4, 3, 2, 1]


def test_the_halves_of_a_backward_free_memory_one_after_the_other() -> None:
    """Qi et al. 2024, table 2: ZB-H1 needs no more than 1F1B's p M_B; ZB-H2 no more than (2p-1) M_B + M_W."""
    p, m = 8, 24
    for kept in (0.0, 0.4, 1.0):
        assert play("zb-h1", EqualStages(p, m)).columns.peak_bytes(10.0, 10 * kept).max() <= 10 * p
        assert play("zb-h2", EqualStages(p, m)).columns.peak_bytes(10.0, 10 * kept).max() <= 10 * (2 * p - 1 + kept)


# ---- the table of formulas -----------------------------------------------------------------------------------------

P, M = 8, 24
FIRST = "zero-bubble README"
LATER = "DeepSeek-V3 Table 2"


def idle(name: str, **times: float) -> float:
    """Relative to the step's work, of the slowest rank."""
    timeline = play(name, EqualStages(P, M, SCHEDULES[name].virtual or 1, **times))
    return float(timeline.stall.max())


def automatic(memory: int) -> float:
    orders = zb_auto(P, M, memory=memory)
    return float(simulate(Program(tuple(map(tuple, orders)), looped(P, 1), M)).stall.max())


def read_formulas() -> dict[tuple[str, str], str]:
    """The formulas by (source, schedule), as printed; transcribed where the table is not there."""
    if not FORMULAS.is_file():
        return {
            (LATER, "1F1B"): "bubble=(PP-1)(F+B); parameters=1x; activations=PP",
            (LATER, "ZB1P"): "bubble=(PP-1)(F+B-2W); parameters=1x; activations=PP",
            (LATER, "DualPipe"): "bubble=(PP/2-1)(F&B+B-3W); parameters=2x; activations=PP+1",
            (FIRST, "1F1B"): "bubble rate=(p-1)/(m+p-1)=B; activation memory=1x",
            (FIRST, "ZB1P"): "bubble rate=B/3; activation memory=1x",
            (FIRST, "ZB2P"): "bubble rate=0; activation memory=2x",
            (FIRST, "ZBV"): "bubble rate=0; activation memory=1x",
            (FIRST, "V-Half"): "bubble rate=B/2; activation memory=1/2x",
            (FIRST, "V-Min"): "bubble rate=2B/3+O(n) overhead; activation memory=1/3x",
        }
    with FORMULAS.open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["kind"] == "theoretical"]
    return {(FIRST if FIRST in row["source"] else LATER, row["schedule"]): row["note"] for row in rows}


def test_every_formula_of_the_table_is_known_here() -> None:
    assert {name for _, name in read_formulas()} == {"1F1B", "ZB1P", "ZB2P", "ZBV", "V-Half", "V-Min", "DualPipe"}


def test_the_formulas_of_deepseek_v3() -> None:
    """B is the whole backward, W its weight half, F&B a pair computed at once; times that differ tell them apart."""
    f, b, w = 1.0, 1.25, 0.75
    whole = b + w
    formulas = {schedule: note for (source, schedule), note in read_formulas().items() if source == LATER}
    assert formulas.pop("1F1B").startswith("bubble=(PP-1)(F+B); parameters=1x; activations=PP")
    one = play("1f1b", EqualStages(P, M, 1, f, b, w))
    assert (one.stall.max(), one.peak_live.max()) == ((P - 1) * (f + whole), P)
    assert formulas.pop("ZB1P").startswith("bubble=(PP-1)(F+B-2W); parameters=1x; activations=PP")
    zero = play("zb-h1", EqualStages(P, M, 1, f, b, w))
    assert (zero.stall.max(), zero.peak_live.max()) == ((P - 1) * (f + whole - 2 * w), P)
    assert formulas.pop("DualPipe").startswith("bubble=(PP/2-1)(F&B+B-3W); parameters=2x; activations=PP+1")
    for pair in (f + whole, 0.9 * (f + whole)):
        dual = play("dualpipe", EqualStages(P, 32, 2, f, b, w, pair))
        assert dual.idle.max() == pytest.approx((P / 2 - 1) * (pair + whole - 3 * w))
        assert dual.peak_live.max() == P + 1
        assert dual.columns.program.model_copies == 2  # parameters
    assert not formulas


def test_the_formulas_of_the_zero_bubble_repository() -> None:
    """With T_F = T_B = T_W = 1; the "rates" compare bubbles with 1F1B's, in time."""
    formulas = {schedule: note for (source, schedule), note in read_formulas().items() if source == FIRST}
    assert formulas["1F1B"].startswith("bubble rate=(p-1)/(m+p-1)=B; activation memory=1x")
    one = idle("1f1b")
    assert play("1f1b", EqualStages(P, M)).bubble == pytest.approx((P - 1) / (M + P - 1))
    assert formulas["ZB1P"].startswith("bubble rate=B/3; activation memory=1x")
    assert idle("zb-h1") == automatic(memory=P) == pytest.approx(one / 3)
    assert formulas["ZB2P"].startswith("bubble rate=0; activation memory=2x")
    assert automatic(memory=2 * P) == idle("zb-h2") == 0
    assert formulas["ZBV"].startswith("bubble rate=0; activation memory=1x")
    vee = play("zb-v", EqualStages(P, M, 2))
    assert vee.stall.max() == 0
    assert vee.peak_live.max() / 2 == P  # its stages are half as large


@pytest.mark.parametrize(
    ("name", "formula", "bubble", "memory"),
    [
        ("v-half", "bubble rate=B/2; activation memory=1/2x", 1 / 2, 1 / 2),
        ("v-min", "bubble rate=2B/3+O(n) overhead; activation memory=1/3x", 2 / 3, 1 / 3),
    ],
)
@pytest.mark.parametrize("p", [6, 8, 16, 32])
def test_less_memory_than_1f1b(name: str, formula: str, bubble: float, memory: float, p: int) -> None:
    """Up to the turns at the ends of the V, which the formulas leave out: two activations, some hundredths of time."""
    assert read_formulas()[FIRST, {"v-half": "V-Half", "v-min": "V-Min"}[name]].startswith(formula)
    one, vee = play("1f1b", EqualStages(p, 4 * p)), play(name, EqualStages(p, 4 * p, 2, 0.5, 0.5, 0.5))
    assert vee.stall.max() / one.stall.max() == pytest.approx(bubble, abs=0.075)
    assert memory * p <= vee.peak_live.max() / 2 <= memory * p + 2  # its stages are half as large
