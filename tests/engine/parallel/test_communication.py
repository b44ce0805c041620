"""How many collectives a step makes, and when: counted, not believed."""

from collections import Counter

import pytest

from shoal.launch.worker_pool import Pool
from shoal.spec.config import RunConfig
from tests.engine.parallel.counting import engine_of, watched
from tests.testing.verify.runs import small_run

LAYERS, MICROBATCHES = 3, 3


def run_of(parallel: dict, **model) -> RunConfig:
    config = small_run({"micro_batch": 1, **parallel}, {"layers": LAYERS, **model})
    train = config.train.model_copy(update={"global_batch": MICROBATCHES * config.parallel.dp})
    return config.model_copy(update={"train": train})


def count(config: RunConfig) -> tuple[Counter, int]:
    """The collectives of a step that is not the first, and the number of buckets."""
    engine = engine_of(config)
    engine.step(0)
    counts = Counter()
    with watched(lambda name: counts.update([name])):
        engine.step(1)
    return counts, len(engine.parameters.buckets)


def test_tensor_parallel_all_reduces(pool: Pool) -> None:
    """Two a layer and direction; the embedding's in forward, the head's in backward; and one for the gradient norm."""
    for counts, _ in pool.run(count, 2, run_of({"tp": 2})):
        assert counts["start_all_reduce"] == MICROBATCHES * (4 * LAYERS + 2) + 1


def test_sequence_parallelism_needs_no_all_reduce_in_the_layers(pool: Pool) -> None:
    """But one a step for the gradients of the norms, and one for the gradient norm."""
    for counts, _ in pool.run(count, 2, run_of({"tp": 2, "sequence_parallel": True})):
        assert counts["start_all_reduce"] == 2


@pytest.mark.parametrize("bucket_mb", [25.0, 0.004])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_replicas_reduce_each_bucket_once_a_step_if_they_can_accumulate(
    pool: Pool, zero: int, bucket_mb: float
) -> None:
    for counts, buckets in pool.run(count, 2, run_of({"dp": 2, "zero": zero, "bucket_mb": bucket_mb})):
        assert (buckets > 1) == (bucket_mb < 1)
        scatters = {0: 0, 1: buckets, 2: MICROBATCHES * buckets}[zero]
        assert counts["reduce_scatter_flat"] == scatters
        assert counts["all_gather_flat"] == (buckets if zero else 0)
        assert counts["start_all_reduce"] == 2 + (buckets if zero == 0 else 0)  # token count, gradient norm


def test_hybrid_shards_are_summed_over_replicas_once_a_step(pool: Pool) -> None:
    for counts, buckets in pool.run(count, 4, run_of({"dp": 4, "zero": 2, "zero_shard": 2, "bucket_mb": 0.004})):
        assert counts["reduce_scatter_flat"] == MICROBATCHES * buckets
        assert counts["start_all_reduce"] == 2 + buckets


def test_zero_3_gathers_each_unit_for_forward_and_for_backward(pool: Pool) -> None:
    """But the last, which backward needs first, only once."""
    for counts, buckets in pool.run(count, 2, run_of({"dp": 2, "zero": 3})):
        assert buckets == LAYERS + 2
        assert counts["all_gather_flat"] == MICROBATCHES * (2 * buckets - 1)
        assert counts["reduce_scatter_flat"] == MICROBATCHES * buckets


def order(config: RunConfig) -> list[str]:
    """Collectives and the end of each backward, in order."""
    engine = engine_of(config)
    events: list[str] = []
    first = dict(engine.stages[0].module.named_parameters())["embed.token.weight"]
    first.register_post_accumulate_grad_hook(lambda _: events.append("backward ends"))
    with watched(events.append):
        engine.step(0)
    return events


@pytest.mark.parametrize(("zero", "collective"), [(0, "start_all_reduce"), (1, "reduce_scatter_flat")])
def test_reductions_start_while_backward_goes_on(pool: Pool, zero: int, collective: str) -> None:
    for events in pool.run(order, 2, run_of({"dp": 2, "zero": zero, "bucket_mb": 0.004})):
        ends = [i for i, event in enumerate(events) if event == "backward ends"]
        assert len(ends) == MICROBATCHES
        intermediate = events[ends[0] : ends[-2]]
        assert collective not in intermediate  # accumulated, not reduced
        assert events[ends[-2] : ends[-1]].count(collective) >= LAYERS  # all but the embedding's
