"""Faults are planted, and the verifier says what is wrong and where."""

from pathlib import Path

import pytest

from shoal.launch.worker_pool import Pool
from shoal.spec.schedules import ASYNCHRONOUS
from shoal.testing.verify.case import prepare, run_case
from shoal.testing.verify.compare import Mismatch
from shoal.testing.verify.faults import FAULTS
from tests.testing.verify.runs import small_run

# What the first difference must be: its phase, and its module or parameter.
EXPECTED = {
    "row-sum": ("forward", "layers.0.attention"),
    "entry-gradient": ("backward", "norm"),  # what the head sends back
    "input-order": ("gradient", "head.weight"),
    "ring-sum": ("forward", "layers.0.attention"),
    "chunk-sum": ("forward", "layers.0.attention"),
    "grid-sum": ("forward", "layers.0.attention"),
    "grid-norm": ("forward", "layers.0.attention_norm"),
    "vocabulary-padding": ("forward", "loss"),
    "norm-gradients": ("gradient", "norm.weight"),
    "key-value-copies": ("gradient", "layers.1.attention.k.weight"),
    "tied-ends": ("gradient", "embed.token.weight"),
    "copies-apart": ("gradient", "head.weight"),
    "weights-dropped": ("gradient", "head.weight"),
    "unstashed": ("backward", "layers.1.mlp_norm"),
    "dropped-layer": ("structure", "layers.2.attention_norm.weight"),
    "wrong-targets": ("forward", "loss"),
    "accumulation-scale": ("backward", "loss"),
    "local-tokens": ("loss", ""),
    "chunk-positions": ("forward", "layers.0.attention"),
    "chunk-order": ("forward", "layers.0.attention"),
    "key-gradients-stay": ("backward", "layers.1.attention_norm"),
    "same-samples": ("samples", ""),
    "next-samples": ("samples", ""),
    "wrong-group": ("gradient", "head.weight"),
    "mean-over-replicas": ("gradient", "head.weight"),
    "zero1-stale": ("in use", "embed.token.weight"),
    "zero2-forgets": ("gradient", "head.weight"),
    "norm-counts-copies": ("gradient norm", ""),
    "clip-per-rank": ("gradient", "head.weight"),
    "expert-gradients": ("gradient", "layers.1.mlp.experts.gate"),
    "expert-norm": ("gradient norm", ""),
    "capacity-per-rank": ("forward", "layers.0.mlp"),
    "rows-astray": ("forward", "layers.0.mlp"),
    "neighbours-choice": ("forward", "layers.0.mlp"),
    "chosen-order": ("forward", "layers.1"),
    "places-of-chosen": ("forward", "layers.1"),
}
EXPERTS = {"count": 4, "per_token": 2, "ffn": 12, "capacity_factor": 0.75, "balance_loss": 1.0}


def first_difference(pool: Pool, name: str, inject: str) -> Mismatch | None:
    model = {"tied": True} if name == "tied-ends" else {}
    if FAULTS[name].model:
        model[FAULTS[name].model] = {"experts": EXPERTS, "depths": {"capacity": 0.5}}[FAULTS[name].model]
    run = small_run(FAULTS[name].needs, model)
    if run.parallel.schedule in ASYNCHRONOUS:
        run = run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"clip_norm": 0.0})})
    verdict, _ = run_case(prepare(run, own_precision=False), pool, steps=1, inject=inject)
    return verdict.findings[0] if verdict.findings else None


def test_every_fault_has_an_expectation() -> None:
    assert set(EXPECTED) == set(FAULTS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_where_it_is(pool: Pool, name: str) -> None:
    found = first_difference(pool, name, inject=name)
    assert found is not None
    assert (found.phase, found.place) == EXPECTED[name], found.text
    if found.step >= 0:
        assert found.ranks
        assert found.step == 0
    if name == "wrong-targets":  # only the ranks that differ are named: the last stage alone scores targets
        assert found.ranks == ("rank 1 (pp 1)",)


def test_other_tokens_for_an_expert_are_seen_where_their_number_is_the_same(pool: Pool) -> None:
    """In a model of one layer the fault changes no count."""
    run = small_run({"dp": 2, "ep": 2}, {"layers": 1, "experts": EXPERTS})
    verdict, _ = run_case(prepare(run, own_precision=False), pool, steps=1, inject="neighbours-choice")
    routed = {(found.place, found.rule) for found in verdict.findings if found.phase == "routing"}
    assert routed == {("layers.0.mlp.router", "plain-sgd"), ("layers.0.mlp.router", "adamw")}


def test_a_rank_that_fails_is_a_difference_too(pool: Pool) -> None:
    """A learning rate of 1e300: the first step ruins the weights, and every rank raises in the next."""
    run = small_run({"dp": 2, "zero": 1}, global_batch=8)
    run = run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"learning_rate": 1e300})})
    verdict, _ = run_case(prepare(run, own_precision=False), pool, steps=3)
    assert verdict.findings[0].phase == "failure"
    assert "NonFinite" in verdict.findings[0].text


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_gone_after_its_context(name: str) -> None:
    fault = FAULTS[name]
    right = fault.owner.__dict__[fault.name]
    with fault.inject():
        assert fault.owner.__dict__[fault.name] is not right
    assert fault.owner.__dict__[fault.name] is right


def test_a_fault_is_found_where_it_is_in_slices_of_sequences_too(pool: Pool) -> None:
    run = small_run({"pp": 2, "tp": 2, "schedule": "terapipe", "sequence_slices": 2}, {"layers": 2})
    verdict, _ = run_case(prepare(run, own_precision=False), pool, steps=1, inject="row-sum")
    found = verdict.findings[0]
    assert (found.phase, found.place) == EXPECTED["row-sum"], found.text


def test_a_schedule_of_one_micro_batch_is_verified_with_one(pool: Pool, tmp_path: Path) -> None:
    file = tmp_path / "one.csv"
    file.write_text("0F0,0B0\n1F0,1B0\n")
    run = small_run({"pp": 2, "micro_batch": 1, "schedule": f"file:{file}"}, global_batch=1)
    case = prepare(run, own_precision=False)
    assert any("faults of accumulation are not detected" in note for note in case.notes)
    verdict, _ = run_case(case, pool, steps=1)
    assert not verdict.findings
