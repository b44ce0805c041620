"""The norm of the gradients: taken of each bucket as it arrives, and never of gradients that were changed since."""

from unittest import mock

import pytest

from shoal.engine.parallel.zero import zero_engine
from shoal.engine.parallel.zero.gradients import Gradients
from shoal.launch.worker_pool import Pool
from shoal.spec.config import RunConfig
from tests.engine.parallel.counting import engine_of
from tests.testing.verify.runs import small_run

LAYOUTS = [
    {"dp": 2}, {"dp": 2, "overlap": False}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 2}, {"dp": 2, "zero": 3},
    {"dp": 4, "zero": 3, "zero_shard": 2}, {"dp": 2, "zero": 2, "pp": 2}, {"dp": 2, "zero": 1, "offload": "optimizer"},
    {"tp": 2}, {"dp": 2, "zero": 1, "tp": 2, "sequence_parallel": True},
]


def run_of(parallel: dict, microbatches: int = 2) -> RunConfig:
    return small_run(
        {"micro_batch": 1, "bucket_mb": 0.001, **parallel}, {"layers": 4},
        global_batch=microbatches * parallel.get("dp", 1),
    )


def squares(config: RunConfig) -> tuple[float, float, float, float]:
    """A rank's squared norm of gradients as they arrived, as they are, once doubled, and multiplied by 3 at once."""
    engine = engine_of(config)
    parameters = engine.parameters
    engine.step(0, dry=True)
    arrived, anew = float(parameters.square_norm()), float(parameters.square_norm())
    for _, _, gradient in parameters.shards():
        gradient.mul_(2)
    doubled = float(parameters.square_norm())
    engine.step(0, dry=True)
    parameters.scale(3)
    return arrived, anew, doubled, float(parameters.square_norm())


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_the_norm_is_that_of_the_gradients_as_they_are(pool: Pool, parallel: dict) -> None:
    config = run_of(parallel)
    for arrived, anew, doubled, scaled in pool.run(squares, config.parallel.world_size, config):
        assert arrived > 0
        assert arrived == anew
        assert doubled == pytest.approx(4 * arrived, rel=1e-5)
        assert scaled == pytest.approx(9 * arrived, rel=1e-5)


class Noting:
    """A collective on its way, which notes when it is waited for."""

    def __init__(self, work: zero_engine.Pending, events: list[str]):
        self.work, self.events = work, events

    def wait(self) -> None:
        self.work.wait()
        self.events.append("here")


def order(config: RunConfig, collective: str) -> list[str]:
    """When a rank waits for its buckets, and when it takes their norms."""
    engine, events = engine_of(config), []
    engine.step(0)
    start, on_reduced = getattr(zero_engine, collective), Gradients.on_reduced

    def noting(gradients: Gradients) -> None:
        on_reduced(gradients)
        events.append("norm")

    with (
        mock.patch.object(zero_engine, collective, lambda *arguments: Noting(start(*arguments), events)),
        mock.patch.object(Gradients, "on_reduced", noting),
    ):
        engine.step(1)
    return events


@pytest.mark.parametrize("parallel, collective", [
    ({"dp": 2}, "start_all_reduce"), ({"dp": 2, "zero": 1}, "reduce_scatter_flat"),
    ({"dp": 2, "zero": 3}, "reduce_scatter_flat"),
], ids=str)
def test_a_bucket_gives_its_norm_before_the_next_is_waited_for(pool: Pool, parallel: dict, collective: str) -> None:
    for events in pool.run(order, 2, run_of(parallel, 1), collective):
        buckets = len(events) // 2
        assert buckets > 3
        assert events == ["here", "norm"] * buckets
