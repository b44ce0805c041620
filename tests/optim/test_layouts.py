"""Every update rule on random layouts, against the same rule on one device."""

import random

import pytest

from shoal.comm.pool import Pool
from shoal.optim.build import RULES
from shoal.verify.case import prepare, run_case
from shoal.verify.draw import draw_run_of


@pytest.mark.parametrize("name", sorted(set(RULES) - {"adamw", "sgd"}))  # which every other test of layouts uses
def test_any_layout_updates_as_one_device_does(pool: Pool, name: str) -> None:
    run = draw_run_of(name, random.Random(name).choice)  # shoal verify --rule NAME --random N draws more
    verdict, _ = run_case(prepare(run, own_precision=False, accumulate=False), pool, steps=3)
    assert not verdict.findings, f"{run.parallel.describe()}: {verdict.findings[0].text}"
