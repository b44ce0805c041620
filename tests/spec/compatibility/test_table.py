"""The table of what goes with what: each row refuses just what it says, and nothing is decided elsewhere."""

import random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.pipeline.from_layout import check_run, splits_backward
from shoal.pipeline.program import build_program
from shoal.pipeline.schedules import EVERY
from shoal.spec import schedules, sync_methods
from shoal.spec.catalog import model_shape
from shoal.spec.compatibility.features import BARE, CheckedRun
from shoal.spec.compatibility.table import CONFLICTS, check_compatibility, find_conflict, is_excluded
from shoal.spec.config import RunConfig
from shoal.spec.config.sections import RelaxedConfig, TrainConfig
from shoal.spec.layout import Layout, Sync
from shoal.testing.verify.draw import draw_run
from shoal.training.check import check

TINY = model_shape("tiny")


def test_no_pair_is_decided_twice() -> None:
    pairs = [frozenset((conflict.first, conflict.second)) for conflict in CONFLICTS]
    assert len(pairs) == len(set(pairs)) and all(len(pair) == 2 for pair in pairs)


def test_reasons_and_remedies_are_parts_of_one_message() -> None:
    for conflict in CONFLICTS:
        assert conflict.reason[0].islower() and not conflict.reason.endswith(".")
        assert conflict.remedy[0].isupper() and not conflict.remedy.endswith(".")


@given(st.randoms(use_true_random=False))
def test_a_run_that_is_drawn_breaks_no_row_and_excludes_nothing_that_it_uses(source: random.Random) -> None:
    config = draw_run(source.choice)
    run = CheckedRun(config, check(config))
    assert find_conflict(run) is None
    for feature in {feature for conflict in CONFLICTS for feature in (conflict.first, conflict.second)}:
        assert not (feature.used(run) and is_excluded(feature, run))


def test_the_default_run_and_a_bare_layout_use_nothing_that_excludes_anything() -> None:
    check_compatibility(CheckedRun(RunConfig(), TINY))
    check_compatibility(CheckedRun(BARE, TINY))


def test_both_settings_the_reason_and_the_remedy_are_named() -> None:
    config = BARE.model_copy(update={"parallel": Layout(dp=2, cp=2, sync="diloco")})
    with pytest.raises(UsageError) as refused:
        check_compatibility(CheckedRun(config, TINY))
    assert str(refused.value) == (
        "parallel.sync = 'diloco' with parallel.cp = 2: its exchanges and checkpoints need ranks with full "
        "sequences.\n  Use parallel.cp 1."
    )


def test_compiling_is_refused_by_what_the_program_does() -> None:
    """A dual pipe of few micro-batches splits no backward; its name alone would not tell."""
    found = set()
    for microbatches in range(1, 20):
        if EVERY["dualpipe"].refuses(4, microbatches, 2):
            continue
        split = splits_backward(build_program(EVERY["dualpipe"], 4, microbatches, virtual_stages=2))
        sections = {"parallel": Layout(pp=4, schedule="dualpipe"), "train": TrainConfig(compile=True)}
        run = CheckedRun(BARE.model_copy(update=sections), TINY, splits_backward=split)
        assert (find_conflict(run) is not None) == split
        found.add(split)
    assert True in found


def test_kinds_of_schedules_are_those_that_are_built() -> None:
    for name, schedule in EVERY.items():
        virtual = schedule.virtual or 2
        updates = build_program(schedule, 2, 4, virtual_stages=virtual).updates
        assert (updates > 1) == (name in schedules.ASYNCHRONOUS), name
        split = {
            splits_backward(build_program(schedule, ranks, microbatches, virtual_stages=virtual))
            for ranks in (1, 2, 4) for microbatches in (2, 4, 8, 10)
            if not schedule.refuses(ranks, microbatches, virtual)
        }
        assert (True in split) == (name in schedules.SPLIT_BACKWARD), name


def test_kinds_of_methods_are_those_of_the_layout() -> None:
    known = {"all-reduce", *sync_methods.COMPRESSED, *sync_methods.LOCAL, *sync_methods.UNSYNCHRONISED}
    assert known == set(get_args(Sync))
    assert set(sync_methods.READ_BY) == set(RelaxedConfig.model_fields)


def test_what_plans_ask_is_what_training_asks() -> None:
    """Sections that a plan does not have use no feature."""
    check_run(BARE.model_copy(update={"parallel": Layout(dp=2, pp=2, zero=1)}), TINY)
