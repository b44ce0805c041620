"""What formulas say a context-parallel rank sends is what it sends."""

import pytest

from shoal.engine.parallel.context.token_order import assign_tokens, count_tokens
from shoal.launch.worker_pool import Pool
from shoal.planning.cost.micro_batch import MicroBatch
from shoal.planning.cost.time.traffic import context_parallel, even_share
from shoal.spec.catalog import model_shape
from shoal.spec.config import RunConfig
from shoal.spec.layout import Layout
from tests.engine.parallel.counting import engine_of, sent_in_a_step
from tests.testing.verify.runs import small_run

LAYERS, MICROBATCHES = 2, 2


def sent(config: RunConfig) -> dict[tuple[str, str], float]:
    """Bytes of a step that is not the first, by axis and kind of collective."""
    return dict(sent_in_a_step(engine_of(config)))


@pytest.mark.parametrize(("parallel", "recompute", "precision"), [
    ({"cp": 2}, "none", "bf16"), ({"cp": 2}, "full", "fp32"), ({"cp": 4}, "selective", "fp32"),
    ({"cp": 2, "ulysses": 2}, "selective", "fp32"), ({"cp": 2, "ulysses": 2}, "full", "bf16"),
    ({"cp": 4, "ulysses": 4}, "none", "fp32"), ({"cp": 4, "ulysses": 2}, "selective", "bf16"),
    ({"cp": 2, "ulysses": 2, "tp": 2}, "none", "fp32"),
])
def test_a_layer_sends_what_the_formulas_say(pool: Pool, parallel: dict, recompute: str, precision: str) -> None:
    """Two key/value heads: of 4 that exchange heads, or 2 with tp 2, two get the same."""
    config = small_run(
        {**parallel, "recompute": recompute}, {"layers": LAYERS}, global_batch=2 * MICROBATCHES, precision=precision
    )
    config = config.model_copy(update={"data": config.data.model_copy(update={"sequence_length": 16})})
    layout, itemsize = config.parallel, {"fp32": 4, "bf16": 2}[precision]
    shape = config.model.shape(vocab=257, sequence_length=16)
    run = MicroBatch(shape, layout, 16, itemsize)
    predicted = context_parallel(run, LAYERS, even_share(run))
    round_the_ring, exchange = (
        MICROBATCHES * sum(sent[key] for sent in predicted) for key in (("ring", "send"), ("ulysses", "all-to-all"))
    )
    for found in pool.run(sent, layout.world_size, config):
        ring = found.get(("ring", "send"), 0)
        exchanged = found.get(("ulysses", "all-to-all"), 0)
        assert (ring, exchanged) == (round_the_ring, exchange)
        assert ring + exchanged > 0


@pytest.mark.parametrize("order", ["zig-zag", "striped", "contiguous"])
@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize(("cp", "ulysses"), [(2, 1), (3, 1), (4, 2), (6, 3), (6, 2)])
def test_the_fullest_rank(cp: int, ulysses: int, tp: int, order: str) -> None:
    layout = Layout(cp=cp, ulysses=ulysses, cp_order=order, tp=tp, sequence_parallel=tp > 1)
    for units in range(2 * cp, 5 * cp):
        held = assign_tokens(layout, units * tp)
        assert MicroBatch(model_shape("tiny"), layout, units * tp).s_local == held.fullest
        assert held.fullest == max(count_tokens(held.chunks(rank)) for rank in range(cp))


def test_what_a_ring_sends_does_not_fall_with_its_places_and_what_an_exchange_sends_does() -> None:
    """Liu et al. 2023: a block of keys and values in every step; Jacobs et al. 2023, section 3.2: 4 N h / P."""
    shape = model_shape("gpt2-124m")  # as many key/value heads as heads
    s, h = 3 * 2**14, shape.hidden
    for n in (2, 3, 6, 12):
        runs = [MicroBatch(shape, Layout(cp=n, ulysses=u), s) for u in (1, n)]
        ring, exchange = (context_parallel(run, 1, even_share(run))[0] for run in runs)
        assert ring["ring", "send"] == (n - 1) * 2 * 2 * s // n * h
        assert exchange["ulysses", "all-to-all"] == pytest.approx(4 * 2 * s * h / n * (n - 1) / n)
    few = MicroBatch(shape.model_copy(update={"kv_heads": 3}), Layout(cp=4), s)
    assert few.ring_elements * 4 == MicroBatch(shape, Layout(cp=4), s).ring_elements
    forward, backward = (sent["ring", "send"] for sent in context_parallel(few, 1, even_share(few)))
    assert backward == 3 * forward, "sums of gradients stay in float32"
