"""The search finds what pricing every layout finds, and no bound is above the estimate."""

import time
from dataclasses import replace
from itertools import islice, product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.pipeline.from_layout import check_schedule
from shoal.pipeline.partition import balance_layers
from shoal.planning.cost.memory.stage import TIMES, StageMemory
from shoal.planning.cost.parameters import StagePart
from shoal.planning.cost.time.stage import StagePrices
from shoal.planning.estimable import check_trained
from shoal.planning.estimate import Estimate
from shoal.planning.run import EstimatedRun
from shoal.planning.search.kinds import SLOWEST, TIE, Shelf, complexity
from shoal.planning.search.plan import PricedLayout
from shoal.planning.search.replicas import ReplicaChoices
from shoal.planning.search.search import Search, search
from shoal.planning.search.space import (
    LEVELS,
    LayoutSpace,
    build_layout,
    check_fixed,
    layouts,
    meshes,
    shardings,
    splits,
    works,
)
from shoal.report.planning.tables import build_estimate
from shoal.spec.catalog import ModelShape, model_shape
from shoal.spec.catalog.clusters import cluster
from shoal.spec.catalog.experts import Experts
from shoal.spec.compatibility.sizes import check_layout
from shoal.spec.layout import Layout

SMALL = ModelShape(
    family="llama", layers=6, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=512, vocab=1003, max_sequence=512,
    tied=False,
)  # fmt: skip
EXPERTS = Experts(count=4, per_token=2, ffn=256)
SCHEDULES = ("1f1b", "interleaved-1f1b", "gpipe", "looped-bfs", "zb-h1", "zb-h2", "interleaved-zb", "zb-v", "v-half",
             "v-min", "dualpipe", "dualpipev")  # fmt: skip


def brute_force(run: EstimatedRun, space: LayoutSpace) -> tuple[list[PricedLayout], int]:
    """The list of every layout, by the estimate alone; and how many do not fit."""
    known: dict = {}
    shelf, too_large = Shelf(run, diverse=True), 0
    for layout in layouts(run, space):
        estimate = Estimate(EstimatedRun(**{**vars(run), "layout": layout}), known=known)
        if not estimate.fits:
            too_large += 1
            continue
        shelf.keep(PricedLayout(estimate.step_seconds, layout, estimate.fullest), estimate.capacity)
    return shelf.list(), too_large


def with_memory(run: EstimatedRun, space: LayoutSpace, part: float) -> EstimatedRun:
    """The run on devices whose memory is enough for about so many of its layouts: for one at least, and not for all."""
    known: dict = {}
    every = list(layouts(run, space))
    some = [Estimate(replace(run, layout=layout), known=known) for layout in every[:: max(1, len(every) // 5)]]
    needs = sorted({estimate.fullest.reserved - estimate.library_bytes for estimate in some})
    at = min(int(part * len(needs)), len(needs) - 2)
    between = (needs[at] + needs[at + 1]) / 2

    def having(memory_bytes: float) -> EstimatedRun:
        chip = run.cluster.accelerator.model_copy(update={"memory_bytes": memory_bytes})
        return replace(run, cluster=replace(run.cluster, accelerator=chip))

    # What is left of a memory for a run grows evenly with it.
    one, two = (m.capacity - m.library_bytes for m in (StageMemory(having(1e9)), StageMemory(having(2e9))))
    return having(1e9 * (1 + (between - one) / (two - one)))


def just_enough(run: EstimatedRun) -> EstimatedRun:
    """The run on devices whose memory is just enough for its layout."""
    for _ in range(20):  # libraries keep more of a larger device
        estimate = Estimate(run)
        more = (1 + 1e-9) * estimate.fullest.reserved / estimate.capacity
        memory = {"memory_bytes": more * run.cluster.accelerator.memory_bytes}
        run = replace(run, cluster=replace(run.cluster, accelerator=run.cluster.accelerator.model_copy(update=memory)))
    assert Estimate(run).fits
    return run


@st.composite
def problems(draw: st.DrawFn, most_ranks: int = 8, full: bool = True) -> tuple[EstimatedRun, LayoutSpace]:
    """A small model, dense or with experts, on a few devices, each on a core of its own or not, whose memory is enough
    for some or few of its layouts if it decides."""
    changed = {
        "layers": draw(st.integers(2, 6)), "tied": draw(st.booleans()),
        "family": draw(st.sampled_from(("llama", "gpt"))), "vocab": draw(st.sampled_from((1003, 50_000))),
        "experts": draw(st.sampled_from((None, EXPERTS))),
    }  # fmt: skip
    machine = cluster(draw(st.sampled_from(("4xH100", "2x4xA100", "2x2xV100-ETH10", "1x6xH100", "v5e-4"))))
    if changed["experts"] or draw(st.booleans()) or machine.size > most_ranks:  # eight devices have many meshes
        machine = cluster("4xH100") if machine.size > min(6, most_ranks) else machine
    machine = replace(machine, at_once=draw(st.sampled_from((None, None, 2))))
    batch = machine.size * draw(st.sampled_from((1, 2)))
    rules = ("adamw", "sgd", "muon", "adafactor", "adam8bit", *(() if changed["experts"] else ("sophia-g",)))
    run = EstimatedRun(SMALL.model_copy(update=changed), Layout(), machine, draw(st.sampled_from((64, 512))), batch,
              draw(st.sampled_from([kind for kind in ("bf16", "fp32") if kind in machine.accelerator.peak_flops])),
              draw(st.sampled_from(rules)))  # fmt: skip
    one = {"recompute": draw(st.sampled_from(("none", "selective", "full")))} if changed["experts"] else {}
    space = LayoutSpace(tuple(draw(st.permutations(SCHEDULES))[: 1 if changed["experts"] else 2]), most_virtual=3,
                  least_tokens=draw(st.sampled_from((4096, 128))), fixed=one)  # fmt: skip
    return with_memory(run, space, draw(st.sampled_from((0.0, 0.3, 0.6, 1.0)))) if full else run, space


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems(most_ranks=6))  # more are in the bounds below
def test_the_search_finds_what_brute_force_finds(problem: tuple[EstimatedRun, LayoutSpace]) -> None:
    run, space = problem
    exact, too_large = brute_force(run, space)
    assert exact and too_large, "memory decides"
    found = search(run, space).best
    assert [f.role for f in found] == [f.role for f in exact]
    assert [f.seconds for f in found] == pytest.approx([f.seconds for f in exact], rel=1e-8)
    fastest = search(run, space, diverse=False).found
    assert fastest.seconds == pytest.approx(min(f.seconds for f in exact), rel=1e-8)
    levels = [complexity(vars(f.layout), run.cluster) for f in found]
    assert all(level < levels[0] for f, level in zip(found, levels, strict=True) if f.role == "simpler")
    across = fastest.layout.tp > run.cluster.per_node  # estimates of tensor parallelism between nodes are too short
    assert found[0].seconds <= (SLOWEST if across else 1 + TIE) * fastest.seconds
    for one in found:  # of equally fast layouts either may be listed
        estimate = Estimate(EstimatedRun(**{**vars(run), "layout": one.layout}))
        assert estimate.fits and estimate.step_seconds == pytest.approx(one.seconds, rel=1e-9)
        assert estimate.fullest.reserved == pytest.approx(one.memory.reserved, rel=1e-9)


def test_what_passes_between_two_stages_of_one_rank_is_there_once() -> None:
    """They are found where there is just room for them."""
    layout = Layout(
        dp=4, tp=2, sequence_parallel=True, zero=1, micro_batch=4, schedule="looped-bfs", virtual_stages=2
    )
    run = just_enough(EstimatedRun(SMALL, layout, cluster("2x4xA100"), 64, 16, "fp32"))
    fields = {name: getattr(layout, name) for name in LEVELS}
    space = LayoutSpace((layout.schedule,), fixed=fields)
    assert [found.layout for found in search(run, space, diverse=False).best] == [layout]


@pytest.mark.parametrize("fields", [
    {"recompute": "full"}, {"recompute": "selective"}, {"tp": 2, "sequence_parallel": True}, {"micro_batch": 1},
], ids=str)  # fmt: skip
def test_what_fits_only_with_less_activations_is_found(fields: dict) -> None:
    """Others of the mesh, which are looked at before, do not fit."""
    shape = SMALL.model_copy(update={"vocab": 64, "heads": 8, "kv_heads": 8, "head_dim": 32})
    layout = Layout(dp=4 // fields.get("tp", 1), **fields)
    run = just_enough(EstimatedRun(shape, layout, cluster("4xH100"), 512, 8))
    space = LayoutSpace(("1f1b",), fixed={"zero": 0, "dp": layout.dp, "tp": layout.tp})
    (found,) = search(run, space, diverse=False).best
    assert found.seconds <= (1 + 1e-9) * Estimate(run).step_seconds


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems(), st.randoms(use_true_random=False))
def test_no_bound_is_above_the_estimate(problem: tuple[EstimatedRun, LayoutSpace], random: object) -> None:
    run, space = problem
    every = list(layouts(run, space))
    layout = random.choice(every)
    estimate = Estimate(EstimatedRun(**{**vars(run), "layout": layout}))
    fields = {name: getattr(layout, name) for name in LEVELS}
    one = LayoutSpace(**{**vars(space), "schedules": (layout.schedule,), "fixed": fields})
    if not estimate.fits:
        assert search(run, one).best == []
        return
    searching = Search(run, one, False, estimate.step_seconds * (1 + 1e-9))  # a bound above it would leave it out
    searching.all()
    (found,) = searching.shelf.list()
    assert found.layout == layout
    assert found.seconds == pytest.approx(estimate.step_seconds, rel=1e-9)
    assert found.memory.reserved == pytest.approx(estimate.fullest.reserved, rel=1e-9)


@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipev"])
@pytest.mark.parametrize("overlap", ["auto", False])
def test_pairs_are_searched_as_they_are_estimated(schedule: str, overlap: object) -> None:
    layout = Layout(pp=4, dp=16, ep=16, zero=1, schedule=schedule, ep_overlap=overlap)
    run = EstimatedRun(model_shape("qwen3-30b-a3b"), layout, cluster("8x8xH100-IB200"), 2048, 1024)
    seconds = Estimate(run).step_seconds
    space = LayoutSpace((schedule,), fixed={name: getattr(layout, name) for name in LEVELS})
    # A bound above the estimate would leave it out.
    (found,) = search(run, space, diverse=False, within=seconds * (1 + 1e-9)).best
    assert found.layout == layout and found.seconds == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("shape, space, chosen", [
    (SMALL, LayoutSpace(("1f1b", "interleaved-1f1b", "dualpipe"), most_virtual=3, uneven=False), {
        "recompute": ("none", "selective", "full"), "schedule": ("1f1b", "interleaved-1f1b", "dualpipe"),
        "virtual_stages": (None, 2, 3), "zero": (0, 1, 2, 3),
    }),
    (SMALL.model_copy(update={"experts": EXPERTS}), LayoutSpace(
        ("1f1b",), least_tokens=16, uneven=False, fixed={"recompute": "selective", "zero": 3},
    ), {
        "recompute": ("selective",), "zero": (3,), "cp": (1, 2, 4), "ulysses": (1, 2, 4), "ep": (1, 2, 4),
        "etp": (None, 1),
    }),
], ids=["pipelines", "experts and contexts"])  # fmt: skip
def test_the_levels_make_every_layout_that_the_rules_allow(shape: ModelShape, space: LayoutSpace, chosen: dict) -> None:
    run = EstimatedRun(shape, Layout(), cluster("4xH100"), 64, 8)
    made = [str(layout) for layout in layouts(run, space)]
    assert len(set(made)) == len(made)
    sizes = (1, 2, 4)
    values = {
        "dp": sizes, "tp": sizes, "cp": (1,), "pp": sizes, "sequence_parallel": (False, True),
        "micro_batch": (1, 2, 4, 8), "zero_shard": (None, 1, 2), "reshard_after_forward": (True, False),
    } | chosen  # fmt: skip
    allowed = set()
    for fields in map(dict, product(*([(name, value) for value in every] for name, every in values.items()))):
        if fields["dp"] * fields["tp"] * fields["cp"] * fields["pp"] != 4:
            continue
        layout = Layout.model_construct(**fields)
        twice = (layout.pp == 1 and layout.schedule != "1f1b")  # the same as other words for it
        twice |= (layout.virtual_stages is None) == (layout.schedule == "interleaved-1f1b")
        twice |= layout.zero_shard == layout.dp or layout.etp == layout.tp
        twice |= layout.shards == 1 if layout.zero else layout.zero_shard is not None
        if twice:
            continue
        try:
            check_layout(layout, run.shape, global_batch=8, sequence_length=64, ranks=4)
            check_schedule(layout, run.shape, 8, sequence_length=64)
        except UsageError:
            continue
        allowed.add(str(layout))
    assert set(made) == allowed


@pytest.mark.parametrize("model, words, field, value", [
    ("llama-3.2-1b", "dp=8,zero=1,zero_shard=8", "dp_shard", 8),
    ("llama-3.2-1b", "dp=4,pp=2,zero_shard=2", "dp_shard", 2),
    ("llama-3.2-1b", "dp=8,reshard-after-forward=false", "reshard_after_forward", False),
    ("llama-3.2-1b", "pp=2,schedule=1f1b,stage_layers=7/9", "stage_layers", (7, 9)),
    ("llama-3-8b", "pp=2,schedule=interleaved-1f1b,virtual_stages=9", "virtual_stages", 9),
    ("olmoe-1b-7b", "tp=2,etp=2,micro_batch=1", "expert_tensor", 2),
    ("olmoe-1b-7b", "tp=4,etp=2,micro_batch=1", "expert_tensor", 2),
    ("olmoe-1b-7b", "pp=2,ep=4,ep_overlap=false", "ep_overlap", False),
    ("llama-3.2-1b", "pp=2,schedule=1f1b,ep_overlap=false", "ep_overlap", False),
    ("llama-3.2-1b", "cp=8", "cp", 8),
])  # fmt: skip
def test_whatever_a_layout_may_have_can_be_fixed(model: str, words: str, field: str, value: object) -> None:
    run = EstimatedRun(model_shape(model), Layout(), cluster("8xH100"), 1024, 8)
    found = list(islice(layouts(run, LayoutSpace(fixed=check_fixed(words))), 200))
    assert found and all(getattr(layout, field) == value for layout in found)
    check_trained(run, found[-1])


def test_given_stages_hold_all_layers_and_those_of_a_rank_with_several_stay_even() -> None:
    shape = SMALL.model_copy(update={"vocab": 50_000})

    def made(depth: int, **fixed: object) -> list[object]:
        return [split["stage_layers"] for split in splits(shape, 2, depth, LayoutSpace(fixed=fixed))]

    assert made(2, stage_layers=(2, 4)) == [(2, 4)]
    assert made(2, stage_layers=(2, 5)) == made(2, stage_layers=(2, 2, 2)) == []
    assert len(made(2)) > 1 and made(4) == [None]


@pytest.mark.parametrize("words, says", [
    ("bucket_mb=5", "--fix bucket_mb: it is not searched"),
    ("schedule=terapipe", "--fix schedule=terapipe: it is not searched"),
    ("tp=", "tp has none"),
    ("stage_layers=7/a", "write the layers of all stages"),
])  # fmt: skip
def test_what_cannot_be_fixed_is_refused(words: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_fixed(words)


def test_meshes_that_have_nothing_to_share_out_are_left_out_where_that_is_asked_for() -> None:
    run = EstimatedRun(SMALL, Layout(), cluster("4xH100"), 64, 8)
    space = LayoutSpace(("1f1b",), fixed={"zero": 3})
    assert all(degrees["dp"] > 1 for degrees in meshes(run, space))
    assert {found.layout.zero for found in search(run, space).best} == {3}


@given(layers=st.integers(1, 24), vocab=st.integers(1, 100_000), data=st.data())
def test_uneven_stages_hold_all_layers_and_none_is_tried_twice(layers: int, vocab: int, data: st.DataObject) -> None:
    shape, pp = SMALL.model_copy(update={"layers": layers, "vocab": vocab}), data.draw(st.integers(1, layers))
    even, *others = [split["stage_layers"] for split in splits(shape, pp, pp, LayoutSpace())]
    assert even is None and len({*others, tuple(map(len, balance_layers(shape, pp)))}) == len(others) + 1
    for sizes in others:
        assert (len(sizes), sum(sizes)) == (pp, layers) and min(sizes) >= 1
        assert max(sizes[1:-1], default=0) - min(sizes[1:-1], default=0) <= 1


def test_a_large_output_matrix_gives_more_ways_to_split() -> None:
    """Of 2.4 layers, so that the ends may have three fewer; of two thirds of one."""
    made = {name: [split["stage_layers"] for split in splits(model_shape(name), pp, pp, LayoutSpace())]
            for name, pp in (("llama-3-8b", 4), ("llama-3-405b", 16))}  # fmt: skip
    assert {(8, 8, 8, 8), (8, 8, 9, 7), (7, 9, 9, 7), (6, 9, 10, 7)} < set(made["llama-3-8b"])
    assert made["llama-3-405b"] == [None, (7, 7, *[8] * 14)], "where even ones are Llama 3's own: 7, 8, ..., 8, 7"


def test_a_large_cluster_in_seconds() -> None:
    """Of half a million layouts some hundreds are played."""
    run = EstimatedRun(model_shape("llama-3-70b"), Layout(), cluster("64x8xH100"), 4096, 1024)
    begin = time.process_time()
    plan = search(run)
    assert time.process_time() - begin < 5  # 2.3 on a machine in its slow hours, with nothing else to do
    found = {f.role: f for f in plan.best}
    assert list(found) == ["recommended", "fastest", "more memory free", "simpler"] and plan.played < 500
    usual = [found[role].layout.schedule for role in ("recommended", "more memory free", "simpler")]
    assert set(usual) <= {"interleaved-1f1b", "1f1b"}, "no V for less than an error"
    for one in plan.best:
        estimate = Estimate(EstimatedRun(**{**vars(run), "layout": one.layout}))
        assert estimate.fits and estimate.step_seconds == pytest.approx(one.seconds, rel=1e-9)
        assert build_estimate(plan, one).breakdown == pytest.approx(estimate.breakdown, rel=1e-9, abs=1e-9)


def test_a_model_that_is_too_large_for_its_cluster_has_nothing_to_search() -> None:
    run = EstimatedRun(model_shape("llama-4-maverick"), Layout(), cluster("8x8xH100"), 8192, 512)
    plan = search(run)  # 16 bytes of each of 400 billion parameters are 100 GB a device
    assert not plan.best and not plan.branches
    # Stages with some more of its large layers do not fit, so their programs are not built.
    plan = search(replace(run, optimizer="muon"), LayoutSpace(schedules=("1f1b",), fixed={"pp": 16, "cp": 1}))
    assert plan.branches and not plan.best and not plan.players


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems(full=False), st.randoms(use_true_random=False))
def test_the_bounds_of_all_ways_to_shard_are_below_each(
    problem: tuple[EstimatedRun, LayoutSpace], random: object
) -> None:
    run, space = problem
    degrees = random.choice(list(meshes(run, space)))
    way = random.choice(list(works(run, degrees, space)))
    ways = shardings(degrees, space)
    each = [StagePrices(replace(run, layout=build_layout(space, degrees, way, shards))) for shards in ways]
    part = StagePart(range(random.randint(1, run.shape.layers)), random.random() < 0.5, random.random() < 0.5)
    replicas, plain, alive = ReplicaChoices(ways, each), each[0], 1e6 * random.random()
    reserved, passed = replicas.reserved(plain, [part], alive), plain.stage_times(part)
    seconds = np.array([[passed.forward], [passed.backward_input], [passed.backward_weight]])
    added = replicas.adding(plain, [part], seconds)[:, :, 0]
    whole = passed.forward + passed.backward_input
    for i, stages in enumerate(each):
        times = stages.stage_times(part)
        for passes in (("full", "forward"), ("input", "weight", "forward")):  # whole backwards, and split ones
            there = {when: alive for when in TIMES if when.kind in passes}
            assert reserved[i] <= stages.peak_memory([part], [there]).reserved * (1 + 1e-9)
        assert added[0, i] <= (times.forward + times.backward_input - whole) + 1e-9 * whole
        for least, exact in zip(added[1:, i], stages.finish_times(part), strict=True):
            assert least <= exact * (1 + 1e-9)
