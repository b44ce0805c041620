"""The memory that formulas say a rank needs at the worst time of a step is what a dry run of the real engine finds."""

import random
from typing import Any

import pytest

from shoal.engine.collectives.mesh import DryMesh
from shoal.pipeline.schedules import SCHEDULES
from shoal.planning.estimate import Estimate
from shoal.planning.run import EstimatedRun
from shoal.spec.catalog.clusters import cluster
from shoal.spec.config import build_config
from shoal.testing.verify.draw import Choose
from shoal.training.dry_run.dry_run import dry_run


def off(
    parallel: dict[str, Any], model: dict[str, Any], *, s: int, microbatches: int, rank: int, **train: Any
) -> float:
    """By how much the estimate of a rank's peak is more than what was counted."""
    batch = parallel.get("micro_batch", 1) * parallel.get("dp", 1) * microbatches
    sizes = {"hidden": 512, "heads": 8, "head_dim": 64, "kv_heads": 4, "vocab": 8192}
    config = build_config({
        "model": {"name": "tiny", "layers": 2 * parallel.get("pp", 1), **sizes, **model}, "parallel": parallel,
        "data": {"source": "synthetic", "sequence_length": s}, "train": {"global_batch": batch, **train},
    })  # fmt: skip
    layout, shape = config.parallel, config.model.shape(vocab=1, sequence_length=s)
    machine = cluster(f"{layout.world_size}xH100" if layout.world_size > 1 else "h100-sxm")
    run = EstimatedRun(shape, layout, machine, s, batch, config.train.precision)
    said = Estimate(run).memory[DryMesh(layout, rank).index("pp")].allocated
    return said / dry_run(config, shape, rank, steps=1).steps[0].peak - 1


def draw(choose: Choose) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A layout of up to 256 ranks with any schedule, a model, and the rest of what `off` takes."""
    pp, tp, cp, dp = (choose(degrees) for degrees in ((1, 2, 4), (1, 2, 4), (1, 1, 2), (1, 2, 8)))
    parallel = {
        "pp": pp, "tp": tp, "cp": cp, "dp": dp, "micro_batch": choose((1, 2)),
        "recompute": choose(("none", "selective", "full")), "sequence_parallel": tp > 1 and choose((False, True)),
        "overlap": choose((False, True)), "bucket_mb": choose((25.0, 1.0)),
    }  # fmt: skip
    microbatches = 2 * pp
    if pp > 1:
        parallel["schedule"] = choose([
            name for name, schedule in SCHEDULES.items()
            if name not in ("terapipe", "zb-auto") and not schedule.refuses(pp, microbatches, schedule.virtual or 2)
        ])
    parallel["zero"] = choose((0, 1, 2, 3))
    if parallel["zero"] == 3:
        parallel |= {"prefetch": choose((0, 1, 2)), "reshard_after_forward": choose((True, False))}
    model: dict[str, Any] = {
        "name": choose(("tiny", "tiny-gpt")), "tied": choose((False, True)), "vocab": choose((1000, 8192, 50257)),
        "ffn": choose((1024, 2048)),
    }  # fmt: skip
    if choose((False, True)):
        gate = choose(("top-k", "switch", "gshard", "noisy-top-k", "expert-choice"))
        model["experts"] = {
            "count": 8, "per_token": 1 if gate == "switch" else 2, "ffn": choose((512, 1024)), "every": choose((1, 2)),
            "shared": choose((0, 1, 2)), "gate": gate, "capacity_factor": choose((0.0, 1.25)),
        }  # fmt: skip
        parallel["etp"] = choose([etp for etp in (1, 2, 4) if dp * cp * tp % etp == 0])
        parallel["ep"] = choose([ep for ep in (1, 2, 4, 8) if dp * cp * tp % (ep * parallel["etp"]) == 0])
    rank = choose(range(pp * tp * cp * dp))
    rest = {"s": choose((256, 1024)), "precision": choose(("fp32", "bf16")), "microbatches": microbatches, "rank": rank}
    return parallel, model, rest


@pytest.mark.parametrize(("parallel", "model"), [
    ({}, {}),
    ({"zero": 3, "dp": 4}, {"tied": True, "vocab": 50257}),  # the embedding stays from the head to the end
    ({"zero": 2, "dp": 4}, {}),  # one bucket is reduced while the next micro-batch fills another
    ({"tp": 4, "sequence_parallel": True, "pp": 2, "recompute": "full"}, {"name": "tiny-gpt", "layers": 4}),
    # Experts' gradients are whole before those of a layer's other matrices; and rows come back from them in a forward.
    ({"zero": 2, "dp": 4, "ep": 2}, {"experts": {"count": 8, "per_token": 2, "ffn": 1024, "every": 2}}),
    ({"tp": 4, "ep": 1, "etp": 4, "pp": 2},
     {"layers": 4, "experts": {"count": 8, "per_token": 2, "ffn": 256, "shared": 1}}),
    # Beside a narrow block attention's backward needs most, whose blocks' gradients go round the ring.
    ({"cp": 4, "recompute": "full"}, {"ffn": 64, "vocab": 1000, "layers": 2}),
    ({"cp": 4, "ulysses": 2, "pp": 2, "schedule": "zb-h1", "recompute": "selective"}, {"ffn": 64, "layers": 4}),
])
def test_a_peak_of_each_kind(parallel: dict[str, Any], model: dict[str, Any]) -> None:
    assert abs(off(parallel, model, s=512, microbatches=2, rank=0, precision="bf16")) < 0.01


@pytest.mark.parametrize("parallel", [
    {}, {"dp": 8, "zero": 3}, {"dp": 4, "tp": 2, "zero": 3, "sequence_parallel": True},
])  # fmt: skip
def test_a_peak_with_products_in_8_bits(parallel: dict[str, Any]) -> None:
    """At the output matrix, whose gradient is added by its product: it is in 16 bits, unlike the layers' products."""
    assert abs(off(parallel, {"vocab": 50257}, s=512, microbatches=2, rank=0, precision="fp8")) < 0.01


@pytest.mark.parametrize("seed", [307, 389, 455, 488, 547, 642, 690])
def test_a_peak_that_was_off(seed: int) -> None:
    """Stages of a V that follow each other on a rank; buckets of shared experts, which fill first; a bias behind a sum;
    and what is on its way from the backward before as a tied matrix is reduced."""
    parallel, model, rest = draw(random.Random(seed).choice)
    if parallel.get("schedule") == "naive":  # its micro-batches do not meet: two are as many
        rest["microbatches"] = 2
    assert abs(off(parallel, model, **rest)) < 0.01


@pytest.mark.parametrize(("parallel", "model", "rank"), [
    # Parameters wait for a backward that other passes come before: of the other stage, and the second half of one.
    ({"zero": 3, "dp": 4, "pp": 2, "schedule": "v-half", "reshard_after_forward": False}, {"vocab": 50257}, 0),
    ({"zero": 3, "dp": 2, "pp": 2, "schedule": "v-min", "reshard_after_forward": False}, {"vocab": 1000}, 2),
    # A tied matrix is reduced by itself, while the gradient of the logits is still there.
    ({"zero": 2, "tp": 2, "pp": 2, "dp": 2}, {"tied": True, "vocab": 50257}, 4),
    # In the loss the last unit's parameters are not gathered again yet, nor those ahead of it.
    ({"zero": 3, "dp": 2, "pp": 2, "schedule": "zb-h2", "prefetch": 2}, {"layers": 4}, 2),
    # The most is alive in a forward, behind which first halves of backwards leave more than they find.
    ({"tp": 4, "etp": 4, "pp": 2, "schedule": "v-min", "sequence_parallel": True, "recompute": "full"},
     {"vocab": 1000, "layers": 4, "experts": {"count": 4, "per_token": 1, "gate": "switch", "ffn": 512, "shared": 2}},
     4),
    # In second halves the gradient that came is used up, and at the end of first ones all is there for them.
    ({"tp": 4, "pp": 2, "schedule": "v-min"}, {"vocab": 1000, "layers": 4}, 4),
    # The second layer begins with the gradients of the first, which began with none.
    ({"zero": 2, "tp": 2, "pp": 2, "dp": 2, "schedule": "gpipe"}, {"layers": 10, "vocab": 50257}, 0),
])
def test_a_peak_as_passes_take_turns(parallel: dict[str, Any], model: dict[str, Any], rank: int) -> None:
    assert abs(off(parallel, model, s=512, microbatches=4, rank=rank, precision="fp32")) < 0.01
