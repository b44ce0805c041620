"""The memory that formulas say a rank needs at the worst time of a step is what a dry run of the real engine finds."""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shoal.catalog.clusters import cluster
from shoal.comm.dry import DryMesh
from shoal.config import build
from shoal.plan.estimate import Estimate
from shoal.plan.run import Run
from shoal.simulate.dry_run import dry_run


def off(
    parallel: dict[str, Any], model: dict[str, Any], *, s: int, microbatches: int, rank: int, **train: Any
) -> float:
    """By how much the estimate of a rank's peak is more than what was counted."""
    batch = parallel.get("micro_batch", 1) * parallel.get("dp", 1) * microbatches
    sizes = {"hidden": 512, "heads": 8, "head_dim": 64, "kv_heads": 4, "vocab": 8192}
    config = build({
        "model": {"name": "tiny", "layers": 4 * parallel.get("pp", 1), **sizes, **model}, "parallel": parallel,
        "data": {"source": "synthetic", "sequence_length": s}, "train": {"global_batch": batch, **train},
    })  # fmt: skip
    layout, shape = config.parallel, config.model.shape(vocab=1, sequence_length=s)
    machine = cluster(f"{layout.world_size}xH100" if layout.world_size > 1 else "h100-sxm")
    run = Run(shape, layout, machine, s, batch, config.train.precision)
    said = Estimate(run).memory[DryMesh(layout, rank).index("pp")].allocated
    return said / dry_run(config, shape, rank, steps=1).steps[0].peak - 1


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Of up to 128 ranks, with schedules that do a backward at once, and no bucket of several layers with ZeRO-2."""
    pp, tp, dp = (draw(st.sampled_from(degrees)) for degrees in ((1, 2, 4), (1, 2, 4), (1, 2, 8)))
    found = {
        "pp": pp, "tp": tp, "dp": dp, "zero": draw(st.sampled_from((0, 1, 2, 3))),
        "micro_batch": draw(st.sampled_from((1, 2))), "recompute": draw(st.sampled_from(("none", "selective", "full"))),
        "sequence_parallel": tp > 1 and draw(st.booleans()), "overlap": draw(st.booleans()),
    }  # fmt: skip
    found["bucket_mb"] = 1.0 if found["zero"] == 2 else draw(st.sampled_from((25.0, 1.0)))
    if pp > 1:
        found["schedule"] = draw(st.sampled_from(("1f1b", "gpipe", "interleaved-1f1b")))
    if found["zero"] == 3:
        found |= {"prefetch": draw(st.sampled_from((0, 1, 2))), "reshard_after_forward": draw(st.booleans())}
    return found


@settings(
    max_examples=5, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(layouts(), st.data())
def test_a_peak_is_what_a_dry_run_counts(parallel: dict[str, Any], data: st.DataObject) -> None:
    model = {
        "name": data.draw(st.sampled_from(("tiny", "tiny-gpt"))), "tied": data.draw(st.booleans()),
        "vocab": data.draw(st.sampled_from((1000, 8192, 50257))), "ffn": data.draw(st.sampled_from((1024, 2048))),
    }  # fmt: skip
    ranks = parallel["pp"] * parallel["tp"] * parallel["dp"]
    found = off(
        parallel, model, s=data.draw(st.sampled_from((256, 1024))), rank=data.draw(st.integers(0, ranks - 1)),
        microbatches=parallel["pp"] * data.draw(st.sampled_from((1, 2))),
        precision=data.draw(st.sampled_from(("fp32", "bf16"))),
    )  # fmt: skip
    assert abs(found) < 0.02


@pytest.mark.parametrize(("parallel", "model"), [
    ({}, {}),
    ({"zero": 3, "dp": 4}, {"tied": True, "vocab": 50257}),  # the embedding stays from the head to the end
    ({"zero": 2, "dp": 4}, {}),  # one bucket is reduced while the next micro-batch fills another
    ({"tp": 4, "sequence_parallel": True, "pp": 2, "recompute": "full"}, {"name": "tiny-gpt"}),
])
def test_a_peak_of_each_kind(parallel: dict[str, Any], model: dict[str, Any]) -> None:
    assert abs(off(parallel, model, s=512, microbatches=2, rank=0, precision="bf16")) < 0.01
