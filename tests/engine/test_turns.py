"""Pairs of micro-batches that take turns at the exchanges of experts' rows compute the bits of one after the other."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shoal.base.errors import UsageError
from shoal.engine.collectives import uneven
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.models.experts.grouped import GroupedExperts
from shoal.engine.models.experts.layer import MoE
from shoal.engine.turns import OtherFailed, Turns
from shoal.launch.worker_pool import Pool
from shoal.pipeline.checker import check_program
from shoal.pipeline.program import Op, build_program, pair_up
from shoal.pipeline.schedules import SCHEDULES
from shoal.spec.config import RunConfig
from shoal.spec.layout import Layout
from shoal.spec.schedules import PAIRED
from shoal.testing.verify.case import prepare, run_case
from shoal.training.check import check
from shoal.training.dry_run.dry_run import make_samples
from shoal.training.step.engine import Engine
from tests.testing.verify.runs import small_run

CPU = torch.device("cpu")
EXPERTS = {"count": 4, "per_token": 2, "ffn": 12, "balance_loss": 0.1, "bias_update": 0.01}


def run_of(parallel: dict, experts: dict | None = None, model: dict | None = None, **train: Any) -> RunConfig:
    parallel = {"ep": 2, "micro_batch": 1, "ep_overlap": True, **parallel}
    batch = 2 * (1 + parallel.get("pp", 1)) * parallel.get("dp", 1)  # a pair more than the warm-up takes
    model = {"layers": 2 * parallel.get("pp", 1), "experts": {**EXPERTS, **(experts or {})}, **(model or {})}
    return small_run(parallel, model, **{"global_batch": batch, "device": "cpu", **train})


def engine_of(config: RunConfig, transport: str = "auto") -> Engine:
    shape = check(config)
    mesh = Mesh(config.parallel, dist.get_rank(), transport=transport)
    return Engine(config, shape, mesh, make_samples(config, shape))


# ---- turns ---------------------------------------------------------------------------------------------------------


def test_turns_change_at_fixed_points_and_the_longer_computation_ends_alone() -> None:
    turns, log = Turns(), []

    def computation(name: str, parts: int) -> Callable[[], None]:
        def run() -> None:
            for part in range(parts):
                log.append(f"{name}{part}")
                turns.give()
            assert threading.active_count() < 20

        return run

    for first, second, expected in ((2, 4, "a0 b0 a1 b1 b2 b3"), (3, 1, "a0 b0 a1 a2"), (0, 2, "b0 b1")):
        log.clear()
        turns.run(computation("a", first), computation("b", second), CPU)
        assert log == expected.split()
    turns.give()  # alone: nothing to wait for
    assert len(log) == 2


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("when", ["before its first turn ends", "later"])
def test_an_exception_ends_both_and_is_the_one_that_is_raised(failing: int, when: str) -> None:
    turns, ended = Turns(), []

    def computation(own: int) -> None:
        try:
            for part in range(3):
                if own == failing and part == 2 * (when == "later"):
                    raise ValueError(f"of {own}")
                turns.give()
        except BaseException as error:
            ended.append(type(error))
            raise

    with pytest.raises(ValueError, match=f"of {failing}"):
        turns.run(lambda: computation(0), lambda: computation(1), CPU)
    started = 1 if failing == 0 and when != "later" else 2
    assert ended == [ValueError, OtherFailed][:started]
    log: list[int] = []
    turns.run(lambda: log.append(0), lambda: log.append(1), CPU)  # the next pair is not disturbed
    assert log == [0, 1]


class Interrupted(BaseException):
    """What a signal raises."""


def test_an_interrupt_ends_both_whichever_computes() -> None:
    """An interrupt comes in the main thread, as a supervisor sends it, and is repeated until both have ended."""
    before = signal.getsignal(signal.SIGURG)

    def interrupt(*_: Any) -> None:
        raise Interrupted

    signal.signal(signal.SIGURG, interrupt)
    try:
        for interrupted in (0, 1):
            turns, ended = Turns(), []

            def computation(own: int, *, interrupted: int = interrupted, turns: Turns = turns, ended=ended) -> None:
                try:
                    for _ in range(3):
                        if own == interrupted:
                            os.kill(os.getpid(), signal.SIGURG)
                            time.sleep(0.05)
                            os.kill(os.getpid(), signal.SIGURG)
                            time.sleep(0.05)
                        turns.give()
                finally:
                    ended.append(own)

            with pytest.raises(Interrupted):
                turns.run(lambda: computation(0), lambda: computation(1), CPU)
            assert ended == ([0] if interrupted == 0 else [0, 1])
    finally:
        signal.signal(signal.SIGURG, before)


# ---- programs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAIRED)
def test_paired_programs_have_no_deadlock_and_nothing_between_a_pair(name: str) -> None:
    schedule, pairs = SCHEDULES[name], 0
    for ranks in range(1, 7):
        for microbatches in range(1, 3 * ranks + 3):
            if not schedule.refuses(ranks, microbatches, 2):
                program = build_program(schedule, ranks, microbatches, paired=True)
                check_program(program)
                apart = build_program(schedule, ranks, microbatches, transfers=False)
                found = [sum(len(group) == 2 for order in p.actions for group in pair_up(order))
                         for p in (program, apart)]
                assert found[0] == found[1]
                pairs += found[0]
    assert pairs > 700


@pytest.mark.parametrize(("parallel", "background", "expected"), [
    ({}, True, True), ({}, False, False), ({"ep_overlap": True}, False, True), ({"ep_overlap": False}, True, False),
    ({"ep": 1}, True, False), ({"schedule": "zb-v"}, True, False),
])
def test_where_pairs_take_turns(parallel: dict, background: bool, expected: bool) -> None:
    layout = Layout(**{"dp": 2, "ep": 2, "pp": 2, "schedule": "dualpipe", **parallel})
    assert layout.overlaps_rows(background) == expected


@pytest.mark.parametrize(("parallel", "message"), [
    ({"dp": 2, "schedule": "zb-v"}, "ep_overlap = true with parallel.schedule = 'zb-v'"),
    ({"dp": 2, "ep": 1, "schedule": "dualpipev"}, "ep_overlap = true with parallel.ep = 1"),
])
def test_what_is_refused(parallel: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(run_of(parallel))


# ---- ranks ---------------------------------------------------------------------------------------------------------


def train(config: RunConfig, transport: str, beside: bool) -> tuple[list[float], list[torch.Tensor], int]:
    """Loss and norm of a step, all weights of this rank after it, and the number of its pairs.

    Args:
        beside: whether rows travel beside the shared experts, as on CUDA.
    """
    engine, pairs = engine_of(config, transport), 0
    for module in (module for stage in engine.stages for module in stage.module.modules() if isinstance(module, MoE)):
        module.experts.overlaps = beside
    run = engine.runtime.turns.run

    def counted(*args: Any) -> None:
        nonlocal pairs
        pairs += 1
        run(*args)

    engine.runtime.turns.run = counted  # type: ignore[method-assign]
    result = engine.step(0)
    weights = [piece.tensor.clone() for pieces in engine.weights().values() for piece in pieces]
    return [result.loss, result.gradient_norm], weights, pairs


LAYOUTS: dict[str, tuple[dict, dict, dict, str]] = {
    "dualpipev on one pipeline rank": ({"dp": 2, "schedule": "dualpipev"}, {}, {}, "auto"),
    "dualpipe, shared experts": ({"dp": 2, "pp": 2, "schedule": "dualpipe"}, {"shared": 1}, {}, "backend"),
    "dualpipev, recomputed, dense layers between": (
        {"dp": 2, "pp": 2, "schedule": "dualpipev", "recompute": "full"}, {"every": 2, "shared": 1}, {"layers": 6},
        "auto"),
    "dualpipev, ZeRO-3, recomputed attention": (
        {"dp": 2, "schedule": "dualpipev", "zero": 3, "recompute": "selective"}, {"shared": 1}, {}, "backend"),
    "dualpipev, tp with sequence parallelism": (
        {"tp": 2, "dp": 2, "schedule": "dualpipev", "sequence_parallel": True, "etp": 1, "ep": 4}, {}, {}, "auto"),
    "dualpipev, cp": ({"cp": 2, "schedule": "dualpipev", "zero": 1}, {"first": 1}, {}, "backend"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_pairs_compute_the_bits_of_one_after_the_other(pool: Pool, name: str) -> None:
    parallel, experts, model, transport = LAYOUTS[name]
    beside = transport == "backend"
    config = run_of(parallel, experts, model)
    apart = run_of({**parallel, "ep_overlap": False}, experts, model)
    ranks = config.parallel.world_size
    for (results, weights, pairs), (right, right_weights, none) in zip(
        pool.run(train, ranks, config, transport, beside), pool.run(train, ranks, apart, transport, False), strict=True
    ):
        assert pairs > 0 == none
        assert results == right
        assert all(torch.equal(a, b) for a, b in zip(weights, right_weights, strict=True))


def travel_and_compute(config: RunConfig) -> tuple[float, int, int]:
    """Take a step.

    Returns:
        the loss; the exchanges of pairs; and of these, the ones during which the other computation began a part.
    """
    engine, exchanges, hidden = engine_of(config), 0, 0
    turns, start, blocks = engine.runtime.turns, uneven.start_all_to_all_rows, GroupedExperts.blocks
    begun = [0, 0]  # attentions and experts, of either computation

    def compute(*_: Any) -> None:
        begun[turns._turn] += 1

    def counted_experts(*args: Any) -> torch.Tensor:
        compute()
        y = blocks(*args)
        if y.requires_grad:
            y.register_hook(compute)
        return y

    for layer in (layer for stage in engine.stages for layer in stage.module.layers.values()):
        layer.attention.register_forward_pre_hook(compute)
        layer.attention.register_full_backward_pre_hook(compute)

    class Waiting:
        def __init__(self, work: Any):
            self.work, self.paired, self.side = work, all(turns._running), turns._turn
            self.before = begun[1 - self.side]

        def wait(self) -> None:
            nonlocal exchanges, hidden
            if self.paired:
                exchanges += 1
                hidden += begun[1 - self.side] > self.before
            self.work.wait()

    def watched(*args: Any) -> Any:
        rows, work = start(*args)
        return rows, Waiting(work)

    with (
        patch.object(uneven, "start_all_to_all_rows", watched), patch.object(GroupedExperts, "blocks", counted_experts),
    ):  # fmt: skip
        loss = engine.step(0).loss
    return loss, exchanges, hidden


def test_the_rows_of_one_travel_while_the_other_computes(pool: Pool) -> None:
    """Attention or experts of the other begin between the start of an exchange and the wait for it."""
    parallel, model = {"dp": 2, "schedule": "dualpipev", "stage_layers": (2, 2)}, {"layers": 4}
    together = pool.run(travel_and_compute, 2, run_of(parallel, model=model))
    apart = pool.run(travel_and_compute, 2, run_of({**parallel, "ep_overlap": False}, model=model))
    for (loss, exchanges, hidden), (right, none, _) in zip(together, apart, strict=True):
        assert loss == right
        assert exchanges > 40 and none == 0
        assert hidden > 0.7 * exchanges  # all but those beside the ends of a stage


def fail_in(config: RunConfig, op: Op) -> tuple[str, float]:
    """What a step raises if the second exchange of a paired forward, or backward, does; and the loss of another."""
    engine, finish, count = engine_of(config), uneven._Exchange.finish, 0
    turns, side = engine.runtime.turns, int(op is Op.BACKWARD)

    def failing(exchange: Any) -> Any:
        nonlocal count
        if all(turns._running) and turns._turn == side:
            count += 1
            if count == 2:
                raise ArithmeticError(f"in {op.name}")
        return finish(exchange)

    with patch.object(uneven._Exchange, "finish", failing), pytest.raises(ArithmeticError) as raised:
        engine.step(0)
    return str(raised.value), engine.step(0).loss


@pytest.mark.parametrize("op", [Op.FORWARD, Op.BACKWARD])
def test_an_exception_in_either_ends_the_step_with_it(pool: Pool, op: Op) -> None:
    for message, loss in pool.run(fail_in, 2, run_of({"dp": 2, "schedule": "dualpipev"}), op):
        assert message == f"in {op.name}" and math.isfinite(loss)


def test_verify_accepts_such_a_layout(pool: Pool) -> None:
    config = run_of({"dp": 2, "schedule": "dualpipev", "zero": 1, "recompute": "full"}, {"shared": 1})
    verdict, _ = run_case(prepare(config, own_precision=False, accumulate=False), pool, steps=2)
    assert not verdict.findings and 0 < verdict.worst_gradient <= 1e-9
