"""Bytes per rank of each ZeRO stage, on the tensors themselves: the formulas of Rajbhandari et al. 2020, figure 1."""

import pytest
import torch.distributed as dist

from shoal.engine.parallel.zero.bucket import Bucket
from shoal.launch.worker_pool import Pool
from shoal.spec.config import RunConfig
from tests.engine.parallel.counting import engine_of
from tests.testing.verify.runs import small_run

DP = 4
BYTES = {  # of one element: weights computed with, weights updated (where they are others), gradient, both moments
    "fp32": (4, 0, 4, 8),
    "bf16": (2, 4, 4, 8),
}


def held(config: RunConfig) -> tuple[dict[str, int], set[int], set[int]]:
    """Bytes after a step; the memory that it computes with on the device, and that which the optimizer reads and
    writes."""
    engine = engine_of(config)
    engine.step(0)
    padding = sum(bucket.full.numel() - bucket.numel for bucket in engine.parameters.buckets)
    elements = sum(bucket.numel for bucket in engine.parameters.buckets)
    slots = [slot.placement for bucket in engine.parameters.buckets for slot in bucket.slots]
    device = [t for b in engine.parameters.buckets for t in (b.full, b.shard) if t is not None]
    device += [gradients.shard for gradients in engine.parameters.gradients]
    updated = [t for _, weights, gradient in engine.parameters.shards() for t in (weights, gradient)]
    states = engine.optimizer.states().values()
    updated += [piece.tensor for kind in states for pieces in kind.values() for piece in pieces]
    found = {
        **engine.parameters.bytes(),
        "optimizer": engine.optimizer.bytes(),
        "elements": elements,
        "padding": padding,
        "rows without id": sum(slot.numel - slot.box.numel for slot in slots),
        "buckets": len(engine.parameters.buckets),
    }
    return found, *({t.untyped_storage()._cdata for t in tensors} for tensors in (device, updated))


@pytest.mark.parametrize("precision", BYTES)
@pytest.mark.parametrize(("zero", "shards"), [(0, 1), *((zero, shards) for zero in (1, 2, 3) for shards in (4, 2))])
def test_bytes_fall_as_the_formulas_say(pool: Pool, zero: int, shards: int, precision: str) -> None:
    parallel = {"dp": DP, "zero": zero} | ({"zero_shard": shards} if zero else {})
    config = small_run(parallel, {"hidden": 32, "ffn": 48}, precision=precision)
    compute, storage, gradient, moments = BYTES[precision]
    parts = [1 if zero < stage else shards for stage in (3, 2, 1)]  # parameters, gradients, optimizer
    for found, *_ in pool.run(held, DP, config):
        size = found["elements"] + found["padding"]
        assert found["padding"] < 64 * DP * found["buckets"]
        # Master weights are the optimizer's, in the paper's words: they are sharded from stage 1 on.
        whole = 0 if zero == 3 else compute * size
        master = (storage or (compute if zero == 3 else 0)) * size // parts[2]
        assert found["parameters"] == whole + master
        assert found["gradients"] == gradient * size // parts[1]
        # The optimizer has no padding to update, but where the shards end is not where the padding is.
        assert found["optimizer"] <= moments * size // parts[2]
        assert found["optimizer"] >= moments * (size // parts[2] - found["padding"] - found["rows without id"])


@pytest.mark.parametrize("precision", BYTES)
@pytest.mark.parametrize(
    ("zero", "offload"), [*((zero, "optimizer") for zero in range(4)), (3, "parameters")], ids=str
)
def test_what_is_offloaded_leaves_the_device(pool: Pool, zero: int, offload: str, precision: str) -> None:
    """Master weights, their gradients, the moments; in ZeRO-3 the device keeps the shard that it gathers, or none."""
    config = small_run({"dp": 2, "zero": zero, "offload": offload}, {"hidden": 32, "ffn": 48}, precision=precision)
    compute, storage, gradient, _ = BYTES[precision]
    for found, device, updated in pool.run(held, 2, config):
        size = found["elements"] + found["padding"]
        whole = compute * size // (2 if zero == 3 else 1)
        assert found["parameters"] == (0 if offload == "parameters" else whole)
        assert found["gradients"] == gradient * size // (2 if zero >= 2 else 1)
        assert found["host"] == ((storage or compute) + gradient) * size // (2 if zero else 1)
        assert not device & updated


def gathered_units(config: RunConfig) -> tuple[int, list[int], int]:
    """The most bytes of whole parameters alive during a step, each unit's bytes, and those alive after it."""
    engine = engine_of(config)
    buckets = engine.parameters.buckets
    seen = [0]
    gather = Bucket.gather

    def watching(bucket: Bucket) -> None:
        gather(bucket)
        seen.append(sum(b.full.untyped_storage().size() for b in buckets))

    Bucket.gather = watching
    try:
        engine.step(0)
    finally:
        Bucket.gather = gather
    sizes = [b.full.numel() * b.full.element_size() for b in buckets]
    dist.barrier()
    return max(seen), sizes, sum(b.full.untyped_storage().size() for b in buckets)


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_zero_3_has_one_unit_whole_and_those_that_are_gathered_ahead(pool: Pool, recompute: str, ahead: int) -> None:
    config = small_run({"dp": 2, "zero": 3, "recompute": recompute, "prefetch": ahead}, {"layers": 5})
    for peak, sizes, after in pool.run(gathered_units, 2, config):
        assert peak == max(sum(sizes[i : i + ahead + 1]) for i in range(len(sizes)))
        assert after == 0


def test_zero_3_has_all_units_whole_between_forward_and_backward_if_they_stay(pool: Pool) -> None:
    config = small_run({"dp": 2, "zero": 3, "reshard_after_forward": False}, {"layers": 5})
    for peak, sizes, after in pool.run(gathered_units, 2, config):
        assert peak == sum(sizes)
        assert after == 0


def whole_gradients(config: RunConfig) -> int:
    """The most whole gradient buffers alive after any micro-batch's reduction started."""
    engine = engine_of(config)
    parameters = engine.stages[0].parameters
    most = 0
    wait = parameters._wait_reductions

    def watching(keep: int = 0) -> None:
        nonlocal most
        wait(keep)
        most = max(most, sum(g.full is not None for g in parameters.gradients) + len(parameters._scattering))

    parameters._wait_reductions = watching
    engine.step(0)
    return most


def test_zero_2_has_at_most_two_whole_gradient_buckets(pool: Pool) -> None:
    config = small_run({"dp": 2, "zero": 2, "bucket_mb": 0.001}, {"layers": 5})
    assert max(pool.run(whole_gradients, 2, config)) <= 2
