"""Every schedule trains between processes and computes what one device computes, or is refused before launch."""

from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from shoal.base.errors import UsageError
from shoal.launch.worker_pool import Pool
from shoal.pipeline.partition import stage_layers
from shoal.pipeline.program import Action, Op, Program, build_program
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.schedules.file import dump_csv
from shoal.pipeline.schedules.placement import looped
from shoal.testing.verify.case import prepare, run_case
from tests.engine.parallel.counting import engine_of
from tests.testing.verify.runs import small_run

TINY = {"layers": 1, "hidden": 8, "heads": 2, "kv_heads": 2, "head_dim": 4, "ffn": 6}


def differs(pool: Pool, parallel: dict, model: dict, microbatches: int, steps: int = 1) -> str:
    """What differs from one device, or ""."""
    batch = microbatches * parallel.get("dp", 1) * parallel.setdefault("micro_batch", 1)
    case = prepare(small_run(parallel, {**TINY, **model}, global_batch=batch), own_precision=False, accumulate=False)
    verdict, _ = run_case(case, pool, steps=steps)
    assert verdict.findings or verdict.worst_gradient <= 1e-9
    return verdict.findings[0].text if verdict.findings else ""


@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    name=st.sampled_from(sorted(SCHEDULES)), pp=st.sampled_from((2, 3, 4)), tied=st.booleans(),
    virtual=st.integers(1, 2), more=st.integers(0, 1), data=st.data(),
)
def test_every_schedule_equals_one_device_or_is_refused(pool, name, pp, tied, virtual, more, data) -> None:
    microbatches = data.draw(st.integers(1, 2 * pp), "microbatches")
    stages = pp * (SCHEDULES[name].virtual or virtual)
    parallel = {"pp": pp, "schedule": name}
    if SCHEDULES[name].virtual is None:
        parallel["virtual_stages"] = virtual
    model = {"layers": stages // SCHEDULES[name].model_copies + more, "tied": tied}
    if reason := SCHEDULES[name].refuses(pp, microbatches, stages // pp):
        with pytest.raises(UsageError) as refused:
            differs(pool, parallel, model, microbatches)
        assert reason in str(refused.value)
    else:
        assert differs(pool, parallel, model, microbatches) == ""


COMBINED = {
    "ZB-V, ZeRO-1, tied": ({"pp": 2, "schedule": "zb-v", "dp": 2, "zero": 1}, {"tied": True}, 2),
    "ZB-H2, ZeRO-3, recomputed": ({"pp": 2, "schedule": "zb-h2", "dp": 2, "zero": 3, "recompute": "full"}, {}, 1),
    "ZB-V, tp, sequence parallel, recomputed": (
        {"pp": 2, "schedule": "zb-v", "tp": 2, "sequence_parallel": True, "recompute": "full"}, {"name": "tiny-gpt"},
        1),
    "DualPipe, hybrid shards, tied": (
        {"pp": 2, "schedule": "dualpipe", "dp": 4, "zero": 1, "zero_shard": 2}, {"tied": True}, 1),
    "DualPipeV, tp, tied": ({"pp": 2, "schedule": "dualpipev", "tp": 2}, {"tied": True}, 1),
    "interleaved ZB, ZeRO-3, recomputed": (
        {"pp": 2, "schedule": "interleaved-zb", "dp": 2, "zero": 3, "recompute": "selective"}, {"tied": True}, 2),
    "one rank with two stages": ({"pp": 1, "schedule": "interleaved-1f1b"}, {"tied": True}, 2),
}


@pytest.mark.parametrize("name", COMBINED)
def test_schedules_compose_with_the_other_axes(pool, name) -> None:
    parallel, model, steps = COMBINED[name]  # a second step begins with what the first has left
    microbatches = 2 * max(2, parallel["pp"])  # the fewest that DualPipe takes
    layers = parallel["pp"] * parallel.get("virtual_stages", 2)
    assert differs(pool, dict(parallel), {"layers": layers, **model}, microbatches, steps) == ""


def test_a_schedule_from_a_file_trains(pool, tmp_path) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text(dump_csv(build_program(SCHEDULES["zb-v"], 2, 4)))
    parallel = {"pp": 2, "schedule": f"file:{file}"}
    assert differs(pool, parallel, {"layers": 5, "tied": True}, microbatches=4) == ""
    with pytest.raises(UsageError, match="was written for 2 pipeline ranks and 4 micro-batches"):
        differs(pool, parallel, {"layers": 5}, microbatches=5)


def any_order(ranks: int, microbatches: int, virtual: int, halves: bool, random: Random) -> Program:
    """Computations in an order by chance: each comes some time after what it needs."""
    placement = looped(ranks, virtual)
    last = len(placement) - 1
    back = Op.BACKWARD_INPUT if halves else Op.BACKWARD
    ops = (Op.FORWARD, back, Op.BACKWARD_WEIGHT) if halves else (Op.FORWARD, back)
    todo = [Action(op, stage, m) for op in ops for stage in range(last + 1) for m in range(microbatches)]
    random.shuffle(todo)
    orders, done = [[] for _ in range(ranks)], set()

    def needed(action: Action) -> list[Action]:
        op, stage, *_ = action
        if op is Op.FORWARD:
            return [action._replace(stage=stage - 1)] if stage else []
        if op is Op.BACKWARD_WEIGHT:
            return [action._replace(op=back)]
        return [action._replace(op=Op.FORWARD), *([action._replace(stage=stage + 1)] if stage < last else [])]

    while todo:
        action = next(action for action in todo if done.issuperset(needed(action)))
        todo.remove(action)
        done.add(action)
        orders[placement[action.stage]].append(action)
    return Program(tuple(map(tuple, orders)), placement, microbatches)


@settings(
    max_examples=4, derandomize=True, phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    ranks=st.integers(2, 3), microbatches=st.integers(1, 6), virtual=st.integers(1, 2), halves=st.booleans(),
    tied=st.booleans(), random=st.randoms(use_true_random=False),
)
def test_any_order_that_is_accepted_trains(
    pool, tmp_path_factory, ranks, microbatches, virtual, halves, tied, random
) -> None:
    """No program that the checker accepts waits for ever, or computes something else, whoever wrote it."""
    file = tmp_path_factory.mktemp("order") / "schedule.csv"
    file.write_text(dump_csv(any_order(ranks, microbatches, virtual, halves, random)))
    parallel = {"pp": ranks, "schedule": f"file:{file}"}
    assert differs(pool, parallel, {"layers": ranks * virtual, "tied": tied}, microbatches) == ""


# ---- the halves of the backward --------------------------------------------------------------------------------------


class Flops:
    """FLOPs of each action, by op."""

    def __init__(self):
        self.of: dict[Op, int] = {}

    def begin(self, action):
        self.counter = FlopCounterMode(display=False)
        self.counter.__enter__()

    def arrived(self, action):
        pass

    def end(self, action):
        self.counter.__exit__(None, None, None)
        self.of[action.op] = self.of.get(action.op, 0) + self.counter.get_total_flops()


def flops(config) -> dict[str, int]:
    engine = engine_of(config)
    flops = Flops()
    engine.runtime.recorders.append(flops)
    engine.step(0)
    return {str(op): count for op, count in flops.of.items() if count}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("model", [{"tied": True}, {"name": "tiny-gpt"}], ids=["llama", "gpt"])
def test_the_halves_take_the_flops_of_a_whole_backward(pool, model, recompute) -> None:
    """Exactly, and the second half alone has those of the weights: as many as the matrices' products in forward."""
    counted = {}
    for name in ("1f1b", "zb-h1"):
        parallel = {"pp": 2, "schedule": name, "recompute": recompute, "micro_batch": 1}
        run = small_run(parallel, {**TINY, "layers": 3, **model}, global_batch=2)
        run = run.model_copy(update={"train": run.train.model_copy(update={"attention": "explicit"})})
        counted[name] = pool.run(flops, 2, run)
    for rank, (whole, halves) in enumerate(zip(counted["1f1b"], counted["zb-h1"], strict=True)):
        assert halves["I"] + halves["W"] == whole["B"]
        assert halves["F"] == whole["F"]
        shape = prepare(run, own_precision=True).shape
        layers = engine_layers(shape, rank)
        head = shape.vocabulary_rows(1) * shape.hidden if rank == 1 else 0
        assert halves["W"] == 2 * 2 * 8 * (layers * shape.layer_matrices(0) + head)


def engine_layers(shape, rank: int) -> int:
    """Layers of a stage of two."""
    head = shape.vocab * shape.hidden / shape.layer_matrices(0)
    return len(stage_layers(shape.layers, 2, head)[rank])
