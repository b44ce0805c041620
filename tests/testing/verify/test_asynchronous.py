"""Asynchronous pipelines against their emulation on one device, and slices of a sequence against the whole."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.launch.worker_pool import Pool
from shoal.spec.config import RunConfig, build_config
from shoal.testing.verify.case import prepare, run_case

MODEL = {"name": "tiny", "layers": 4, "hidden": 8, "heads": 2, "kv_heads": 1, "ffn": 12, "vocab": 259}
QUICK = settings(
    max_examples=3, derandomize=True, phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)


def run_of(parallel: dict, microbatches: int, model: dict | None = None, *, clip: float = 0.0, **data) -> RunConfig:
    parallel = {"micro_batch": 1, **parallel}
    return build_config({
        "model": {**MODEL, **(model or {})}, "parallel": parallel,
        "data": {"source": "synthetic", "sequence_length": 8, **data},
        "train": {"global_batch": microbatches * parallel["micro_batch"] * parallel.get("dp", 1)},
        "optimizer": {"clip_norm": clip, "warmup_steps": 0},
    })


def differences(pool: Pool, run: RunConfig, steps: int = 2) -> list[str]:
    verdict, _ = run_case(prepare(run, own_precision=False, accumulate=False), pool, steps=steps)
    assert verdict.worst_gradient <= 1e-9
    return [finding.text for finding in verdict.findings]


@st.composite
def asynchronous_runs(draw: st.DrawFn) -> RunConfig:
    pp = draw(st.integers(2, 4))
    dp = draw(st.integers(1, 8 // pp if pp < 4 else 2))
    parallel = {
        "pp": pp, "dp": min(dp, 2), "schedule": draw(st.sampled_from(("pipedream", "pipedream-2bw"))),
        "zero": draw(st.integers(0, 3)), "recompute": draw(st.sampled_from(("none", "full"))),
    }
    if parallel["schedule"] == "pipedream-2bw" and draw(st.booleans()):
        parallel["update_every"] = pp + draw(st.integers(0, 2))
    if pp == 2 and draw(st.booleans()):
        parallel |= {"tp": 2, "sequence_parallel": draw(st.booleans())}
    model = {"tied": draw(st.booleans()), "name": draw(st.sampled_from(("tiny", "tiny-gpt")))}
    return run_of(parallel, draw(st.integers(1, 3 * pp)), model, document_mask=draw(st.booleans()))


@QUICK
@given(run=asynchronous_runs())
def test_an_asynchronous_pipeline_computes_what_its_program_says(pool: Pool, run: RunConfig) -> None:
    """With the weights of each (stage, micro-batch) as in the program's actions, one sample after the other."""
    assert differences(pool, run) == []


@QUICK
@given(
    pp=st.integers(1, 3), slices=st.sampled_from((1, 3, 8, (5, 2, 1), (1, 7))), microbatches=st.integers(1, 3),
    zero=st.integers(0, 3), recompute=st.sampled_from(("none", "selective", "full")), masked=st.booleans(),
    tied=st.booleans(), family=st.sampled_from(("tiny", "tiny-gpt")),
)
def test_slices_through_a_pipeline_are_the_whole_sequences(
    pool: Pool, pp: int, slices, microbatches: int, zero: int, recompute: str, masked: bool, tied: bool, family: str
) -> None:
    parallel = {
        "pp": pp, "dp": 2, "zero": zero, "schedule": "terapipe", "sequence_slices": slices, "recompute": recompute
    }
    run = run_of(parallel, microbatches, {"tied": tied, "name": family}, clip=1.0, document_mask=masked)
    assert differences(pool, run, steps=1) == []


def test_slices_with_tensor_and_sequence_parallelism(pool: Pool) -> None:
    parallel = {
        "pp": 2, "tp": 2, "sequence_parallel": True, "schedule": "terapipe", "sequence_slices": (4, 2, 2), "zero": 1
    }
    assert differences(pool, run_of(parallel, 3, {"kv_heads": 2}, clip=1.0)) == []


@pytest.mark.parametrize("zero", [0, 1])
def test_bf16_without_shards_computes_with_the_weights_that_it_updates(pool: Pool, zero: int) -> None:
    run = run_of({"dp": 2, "zero": zero}, 2, clip=1.0)
    run = run.model_copy(update={"train": run.train.model_copy(update={"precision": "bf16"})})
    verdict, _ = run_case(prepare(run, own_precision=True), pool, steps=3)
    assert not verdict.findings, verdict.findings[0].text


@pytest.mark.parametrize(
    ("parallel", "clip", "message"),
    [
        ({"pp": 2, "schedule": "pipedream"}, 1.0, "clip_norm = 1 with parallel.schedule = 'pipedream'"),
        ({"pp": 2, "schedule": "pipedream-2bw", "update_every": 1}, 0, "update_every = 1 is less than pp 2"),
        ({"pp": 2, "update_every": 2}, 0, "update_every = 2 with parallel.schedule = '1f1b': it does not read"),
        ({"pp": 2, "sequence_slices": 2}, 0, "sequence_slices = 2 with parallel.schedule = '1f1b'"),
        ({"pp": 2, "schedule": "terapipe", "sequence_slices": 9}, 0, "8 tokens make at most 8 slices"),
        ({"pp": 2, "schedule": "terapipe", "sequence_slices": (4, 3)}, 0, "4 \\+ 3 = 7 must be data.seq"),
        (
            {"tp": 2, "sequence_parallel": True, "schedule": "terapipe", "sequence_slices": (5, 3)}, 0,
            "each a multiple of tp 2",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_launch(parallel: dict, clip: float, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prepare(run_of(parallel, 4, clip=clip), own_precision=False)
