"""Training in float16: all ranks of every axis skip the same steps, and a resumed run goes on to the bit."""

import json
import re
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from shoal.engine.checkpoint.manifest import read_manifest
from shoal.spec.config import RunConfig
from shoal.training.step.optimizer_step import NonFinite
from tests.engine.parallel.counting import engine_of
from tests.testing.verify.runs import small_run
from tests.trainings.runs import checkpoints, copy_until, records, same_bits, small_config, train_in

LAYOUTS = [
    {},
    {"dp": 2, "zero": 1, "tp": 2},
    {"pp": 2, "dp": 2, "zero": 3},
    {"pp": 2, "tp": 2, "sequence_parallel": True, "schedule": "zb-h1"},
]


def steps(config: RunConfig, overflow: int | None = None):
    """(scale, skipped, whether the weights changed) of each step. From step ``overflow`` on, an infinity is planted in
    the gradients of one rank before they are summed: first in those of rank 0, in the next step of rank 1, ..."""
    engine = engine_of(config)
    dims = 3 if engine.shape.experts else 1
    found = []
    for step in range(6):
        if overflow is not None and step == overflow + dist.get_rank():
            parameters = engine.stages[0].parameters

            def plant(parameter, total):
                if parameter.dim() >= dims:
                    total.view(-1)[0] = torch.inf

            parameters.watch = plant
        before = [piece.tensor.clone() for pieces in engine.parameters.weights().values() for piece in pieces]
        result = engine.step(step)
        for stage in engine.stages:
            stage.parameters.watch = None
        after = [piece.tensor for pieces in engine.parameters.weights().values() for piece in pieces]
        changed = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        found.append((result.loss_scale, result.skipped, changed, engine.optimizer.count))
    return found


def scaled(parallel, model=None, **loss_scale) -> RunConfig:
    config = small_run(parallel, model, precision="fp16")
    return config.model_copy(update={"loss_scale": config.loss_scale.model_copy(update=loss_scale)})


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_every_rank_backs_off_and_grows_alike(pool, parallel):
    """2^24 overflows, by so much that the rounding of a layout plays no part."""
    config = scaled(parallel, initial=2.0**34, backoff=2.0**-24, interval=2)
    ranks = pool.run(steps, config.parallel.world_size, config)
    expected = [(2.0**34, True), (2.0**10, False), (2.0**10, False), (2.0**11, False), (2.0**11, False),
                (2.0**12, False)]  # fmt: skip
    for rank in ranks:
        assert [step[:2] for step in rank] == expected
        assert [step[2] for step in rank] == [not skipped for _, skipped in expected]
        assert [step[3] for step in rank] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("parallel", [*LAYOUTS[1:], {"cp": 2}, {"dp": 2, "ep": 2}], ids=str)
def test_what_one_rank_finds_all_skip(pool, parallel):
    """An infinity in experts that no other rank has is found by all too."""
    config = scaled(parallel, {"experts": EXPERTS} if "ep" in parallel else {}, initial=2.0**10)
    n = config.parallel.world_size
    for found in pool.run(steps, n, config, 1):
        assert [skipped for _, skipped, *_ in found] == [False, *[True] * n, *[False] * (5 - n)]
        assert [scale for scale, *_ in found] == [2.0 ** (10 - min(max(0, step - 1), n)) for step in range(6)]
        assert [changed for *_, changed, _ in found] == [True, *[False] * n, *[True] * (5 - n)]


EXPERTS = {"count": 4, "per_token": 2, "ffn": 12, "capacity_factor": 0.75, "bias_update": 0.25}


def counted(config: RunConfig):
    engine = engine_of(config)
    skipped = engine.step(0).skipped
    moved = any(router.bias.any() for router in engine.routing.modules)
    return skipped, moved, engine.routing.totals, engine.depths.totals


def test_a_skipped_step_is_counted_and_moves_no_bias(pool):
    """What was routed in it is what is routed where nothing overflows."""
    model = {"experts": EXPERTS, "depths": {"capacity": 0.5}}
    made, left_out = (
        pool.run(counted, 2, small_run({"dp": 2}, model, precision="fp16").model_copy(update={"loss_scale": scale}))
        for scale in (scaled({}, initial=2.0**10).loss_scale, scaled({}, initial=2.0**34).loss_scale)
    )
    for (one, one_moved, *here), (other, other_moved, *there) in zip(made, left_out, strict=True):
        assert (one, one_moved, other, other_moved) == (False, True, True, False)
        for ours, theirs in zip(here, there, strict=True):
            assert ours.any(dim=1).all()
            assert torch.equal(ours, theirs)


def test_the_smallest_scale_ends_the_run(pool):
    said = pool.run(_last_words, 1, scaled({}, initial=2.0**34, smallest=2.0**33))[0]
    assert re.search(r"step 1: .* gradient norm (inf|nan) with the smallest loss scale, 8.58993e\+09", said)


def _last_words(config: RunConfig) -> str:
    engine = engine_of(config)
    assert engine.step(0).skipped
    with pytest.raises(NonFinite) as raised:
        engine.step(1)
    return str(raised.value)


def test_a_resumed_run_goes_on_to_the_bit(pool, corpus, tmp_path):
    """Stopped between an overflow and the next growth; steps are skipped before and after."""
    config = small_config(
        corpus, {"dp": 2, "zero": 1, "tp": 2, "micro_batch": 2}, model={"layers": 1},
        train={"precision": "fp16", "steps": 12, "validate_every": 0},
        loss_scale={"initial": 2.0**22, "interval": 3}, checkpoint={"every": 2},
    )
    whole = train_in(pool, config, tmp_path / "whole")
    run = records(whole)
    skipped = [record.skipped_steps for record in run]
    assert [record.gradient_norm is None for record in run] == [b > a for a, b in pairwise([0, *skipped])]
    assert skipped[0] > 0 and len({record.loss_scale for record in run}) > 3
    middle = next(step for step in sorted(checkpoints(whole))
                  if read_manifest(checkpoints(whole)[step]).extra["loss_scale"]["good"] % 3)
    assert any(b.loss_scale > a.loss_scale for a, b in pairwise(run[middle:])), "none grows after it"
    part = copy_until(whole, tmp_path / "part", middle)
    train_in(pool, config, part, resume=True)
    assert same_bits(checkpoints(whole)[12], checkpoints(part)[12])
    state = [read_manifest(checkpoints(folder)[12]).extra["loss_scale"] for folder in (whole, part)]
    assert state[0] == state[1] and state[0]["skipped"] == skipped[-1]
    keys = ("step", "loss", "gradient_norm", "loss_scale", "skipped_steps")
    both = [[[getattr(r, key) for key in keys] for r in records(folder)] for folder in (whole, part)]
    assert both[0] == both[1]
    assert all(json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines())
    assert "Infinity" not in (whole / "metrics.jsonl").read_text()
