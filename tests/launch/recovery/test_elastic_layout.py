"""The nearest layout for the devices that are left; a run that loses some, and gets them back."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.launch.devices import LOST_FILE, find_failing_devices, read_lost_devices, visible_devices_variable
from shoal.launch.recovery.elastic_layout import replan
from shoal.spec.catalog import model_shape
from shoal.spec.compatibility.sizes import check_layout
from shoal.spec.config import RunConfig, build_config
from shoal.spec.layout import Layout
from shoal.training.check import check
from shoal.training.resilience.events import read_events
from tests.testing.own.test_equality import config_of as config_of_own
from tests.trainings.runs import checkpoints, curve
from tests.trainings.supervised import STEPS, config_of

SHAPE = model_shape("tiny").model_copy(update={"layers": 8, "heads": 8, "kv_heads": 4, "ffn": 64, "hidden": 64})
LENGTH = 64


def run(batch: int = 16, **parallel: object) -> RunConfig:
    return build_config({
        "parallel": parallel, "train": {"global_batch": batch}, "data": {"sequence_length": LENGTH},
    })


def layout(devices: int, batch: int = 16, **parallel: object) -> Layout:
    return replan(run(batch, **parallel), SHAPE, devices).parallel


@pytest.mark.parametrize(("parallel", "devices", "expected"), [
    ({"dp": 8, "zero": 3}, 8, {"dp": 8}),
    ({"dp": 8, "zero": 3}, 7, {"dp": 4}),  # 7, 6 and 5 replicas do not divide 16
    ({"dp": 4, "zero": 1, "zero_shard": 2}, 3, {"dp": 2, "zero_shard": 2}),
    ({"dp": 4, "zero": 1, "zero_shard": 4}, 3, {"dp": 2, "zero_shard": 2}),
    ({"dp": 2, "tp": 2, "pp": 2}, 7, {"dp": 1, "tp": 2, "pp": 2}),  # replicas first
    ({"dp": 1, "tp": 2, "pp": 2}, 3, {"tp": 1, "pp": 2, "dp": 1}),  # then the axis that moves least
    ({"cp": 3, "pp": 2}, 3, {"cp": 3, "pp": 1}),  # pp moves more than cp, but cp 1 would leave a device idle
    ({"dp": 5, "tp": 4, "batch": 10}, 19, {"dp": 5, "tp": 2}),  # 10 devices; 2 replicas with tp 4 would use 8
    ({"tp": 4, "sequence_parallel": True}, 3, {"tp": 2, "sequence_parallel": True}),
    ({"tp": 2, "sequence_parallel": True}, 1, {"tp": 1, "sequence_parallel": False}),
    ({"cp": 4, "ulysses": 2, "zero": 1}, 2, {"cp": 2}),
    ({"dp": 2, "ep": 2, "schedule": "dualpipev", "ep_overlap": True}, 1, {"ep": 1, "ep_overlap": "auto"}),
    ({"dp": 2, "ep": 2, "pp": 2, "schedule": "dualpipe", "ep_overlap": True}, 3, {"dp": 1, "ep": 1, "pp": 2}),
    ({"pp": 4, "schedule": "interleaved-1f1b", "virtual_stages": 2}, 3, {"pp": 2, "virtual_stages": None}),
])
def test_the_nearest(parallel, devices, expected):
    found = layout(devices, **parallel)
    assert {name: getattr(found, name) for name in expected} == expected


def test_a_smaller_micro_batch_makes_room_for_more_replicas():
    """12 = 4 replicas x 3; of 3 replicas with at most 3 sequences each, 12 = 3 x 2 x 2."""
    found = layout(3, batch=12, dp=4, micro_batch=3)
    assert (found.dp, found.micro_batch) == (3, 2)


DEGREE = st.sampled_from([1, 2, 4])


@settings(max_examples=60)
@given(
    dp=st.integers(1, 6), tp=DEGREE, cp=st.sampled_from([1, 2]), pp=DEGREE, zero=st.sampled_from([0, 1, 2, 3]),
    micro=st.integers(1, 3), several=st.integers(1, 3), lost=st.integers(0, 40),
)
def test_any_layout_on_any_number_of_devices(dp, tp, cp, pp, zero, micro, several, lost):
    batch = dp * micro * several * pp
    config = run(batch, dp=dp, tp=tp, cp=cp, pp=pp, zero=zero, micro_batch=micro)
    sizes = {"global_batch": batch, "sequence_length": LENGTH}
    try:
        check_layout(config.parallel, SHAPE, **sizes)
    except UsageError:
        assume(False)
    devices = max(1, config.parallel.world_size - lost)
    now = replan(config, SHAPE, devices)
    check_layout(now.parallel, SHAPE, **sizes)
    found = now.parallel
    assert found.world_size <= devices
    assert now.train.global_batch == batch == found.dp * found.micro_batch * found.microbatches(batch)
    assert found.micro_batch <= micro and found.zero == zero
    if not lost:
        assert now == config
    one, same = tp * cp * pp, (found.tp, found.cp, found.pp) == (tp, cp, pp)
    replicas = max((n for n in range(1, min(dp, devices // one) + 1) if batch % n == 0), default=0)
    assert found.world_size >= replicas * one
    assert same == (found.world_size == replicas * one)  # other axes change only to use more devices


def test_a_module_of_ones_own_keeps_its_split_layers():
    config = config_of_own("wide_qwen3_moe", {"dp": 2, "tp": 2, "ep": 4, "etp": 1, "sequence_parallel": True})
    found = replan(config, check(config), 3).parallel
    assert (found.dp, found.tp, found.ep, found.sequence_parallel) == (1, 2, 2, True)


def test_what_does_not_fit_into_memory_is_passed_over():
    def fits(config: RunConfig) -> None:
        if config.parallel.tp < 2:
            raise UsageError("too large")

    assert replan(run(dp=2, tp=4), SHAPE, 2, fits).parallel.tp == 2
    with pytest.raises(UsageError, match=r"no layout for 1 of 8 devices\.\n  The nearest fails: too large"):
        replan(run(dp=2, tp=4), SHAPE, 1, fits)


def test_replicas_with_states_of_their_own_are_not_given_up():
    with pytest.raises(UsageError, match="keeps a state of each of its 2 replicas"):
        replan(run(dp=2, sync="local-sgd"), SHAPE, 1)


@pytest.mark.parametrize(("devices", "replicas"), [(7, 2), (5, 2), (3, 1)])
def test_only_replicas_are_left_out(devices, replicas):
    """Replicas have two ranks each, and three replicas do not divide a batch of 16."""
    now = replan(run(dp=4, tp=2, micro_batch=2), SHAPE, devices, replicas=True).parallel
    assert (now.dp, now.tp, now.micro_batch) == (replicas, 2, 2)
    with pytest.raises(UsageError, match="no layout for 1 of 8 devices"):
        replan(run(dp=4, tp=2), SHAPE, 1, replicas=True)


def test_fault_knobs_of_ranks_that_are_gone_are_dropped():
    config = build_config({"parallel": {"dp": 2}, "train": {"global_batch": 4}, "testing": {"straggler": "1=2"}})
    assert replan(config, SHAPE, 1).testing.straggler == "" and replan(config, SHAPE, 2) == config


def test_the_last_replica_computes_twice_by_itself():
    asked = {"reexecute_every": 10, "reexecute_on": "replica"}
    config = build_config({"parallel": {"dp": 2}, "train": {"global_batch": 4}, "failover": asked})
    assert replan(config, SHAPE, 1, check).failover.reexecute_on == "same"


# ---- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "lost"), [("[3, 1]", {1, 3}), ("[]", set()), ("", set())])
def test_what_is_marked_as_lost(text, lost, tmp_path):
    assert read_lost_devices(tmp_path) == set()
    (tmp_path / LOST_FILE).write_text(text)
    assert read_lost_devices(tmp_path) == lost


@pytest.mark.parametrize("text", ["3", "{}", '["a"]', "[-1]", "[true]", "nonsense"])
def test_a_list_that_is_none_is_refused(text, tmp_path):
    (tmp_path / LOST_FILE).write_text(text)
    with pytest.raises(UsageError, match="must hold a JSON list"):
        read_lost_devices(tmp_path)


def test_devices_are_asked_for_a_sum(rank_server, capfd):
    assert find_failing_devices(rank_server, ["cpu", "cpu"]) == set()
    assert find_failing_devices(rank_server, ["cpu", "nonsense:1"]) == {1}
    assert "nonsense:1 fails:\nTraceback" in capfd.readouterr().err


def test_devices_are_chosen_among_those_that_are_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_devices_variable([0, 2]) == {"CUDA_VISIBLE_DEVICES": "0,2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-7")
    assert visible_devices_variable([0, 2]) == {"CUDA_VISIBLE_DEVICES": "4,GPU-7"}


# ---- a run -----------------------------------------------------------------------------------------------------------


def test_fewer_devices_then_all_again_and_the_same_curve(supervised, undisturbed, corpus, monkeypatch, tmp_path):
    """Rank 1 dies with its device in step 6; the one that is left dies in step 9, when the other is back."""
    monkeypatch.setenv("LOST_DEVICES", "[[1], []]")
    code, folder = supervised(config_of(corpus, checkpoint={"every": 2}), "kill@6:1:B,kill@9:0:F")
    assert code == 0
    plans = [(event["ranks"], event["devices"]) for event in read_events(folder) if event["event"] == "replanned"]
    assert plans == [(1, [0]), (2, [0, 1])]
    assert [step for step, _, _ in curve(folder)] == list(range(1, STEPS + 1))
    for (_, loss, norm), (_, same_loss, same_norm) in zip(curve(folder), curve(undisturbed), strict=True):
        assert loss == pytest.approx(same_loss, rel=2e-5)
        assert norm == pytest.approx(same_norm, rel=4e-4)
    assert STEPS in checkpoints(folder)


def test_without_replanning_the_run_ends(supervised, corpus, monkeypatch):
    monkeypatch.setenv("LOST_DEVICES", "[[1]]")
    config = config_of(corpus, failover={"replan": False, "restarts": 2})
    with pytest.raises(UsageError, match="1 of 2 devices available"):
        supervised(config, "kill@6:1:B")
