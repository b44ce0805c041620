"""Every update rule on a layout that shards its states and splits its matrices, against the same rule on one device."""

import random

import pytest

from shoal.engine.optim.build import RULES
from shoal.engine.optim.from_torch import TORCH
from shoal.launch.worker_pool import Pool
from shoal.spec.config import RunConfig
from shoal.testing.verify.case import prepare, run_case
from shoal.testing.verify.draw import draw_run_with


def drawn(name: str) -> RunConfig:
    """The first draw on four ranks that has ZeRO and tensor parallelism, in two layers and two micro-batches; and
    experts, for rules of matrices."""
    choose = random.Random(name).choice
    while True:
        run = draw_run_with(name, choose, max_ranks=4)
        both = run.parallel.zero and run.parallel.shards > 1 and run.parallel.tp > 1
        small = run.model.layers == 2 and run.parallel.microbatches(run.train.global_batch) == 2
        if both and small and (name not in ("muon", "adafactor") or run.model.experts.count):
            return run


@pytest.mark.parametrize("name", sorted(set(RULES) - set(TORCH)))  # other tests of layouts use torch's rules
def test_any_layout_updates_as_one_device_does(pool: Pool, name: str) -> None:
    run = drawn(name)  # shoal verify --rule NAME --random N draws any layout
    verdict, _ = run_case(prepare(run, own_precision=False, accumulate=False), pool, steps=2)
    assert not verdict.findings, f"{run.parallel.describe()}: {verdict.findings[0].text}"
