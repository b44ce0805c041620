"""A dry rank does what the rank does: FLOPs and collectives to the last, memory within 2 %; formulas agree with it."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.comm.dry import DryMesh
from shoal.comm.mesh import Mesh
from shoal.comm.pool import Pool
from shoal.config import RunConfig
from shoal.cost.activations import Pass
from shoal.cost.state import state_bytes
from shoal.cost.work import step_flops
from shoal.layout import Layout
from shoal.pipeline.choose import program_of, slices_of
from shoal.plan.parts import parts_of
from shoal.precision.policy import POLICIES
from shoal.simulate.dry_run import Counted, count, dry_run, samples_of
from shoal.simulate.tracker import Tracker
from shoal.train.engine import Engine
from shoal.verify.case import prepare
from tests.verify.runs import runs, small_run


def real(config: RunConfig, steps: int) -> Counted:
    """What this rank of a world that is there does."""
    case = prepare(config, own_precision=True, accumulate=False)
    mesh = Mesh(config.parallel, dist.get_rank(), transport="backend")
    with Tracker() as tracker:
        return count(Engine(case.config, case.shape, mesh, samples_of(case.config, case.shape)), tracker, steps)


def dry(config: RunConfig, rank: int, steps: int = 2) -> Counted:
    case = prepare(config, own_precision=True, accumulate=False)
    return dry_run(case.config, case.shape, rank, steps=steps, as_here=True)


@pytest.mark.parametrize("parallel", [
    {"dp": 2, "tp": 2, "zero": 3},
    {"pp": 2, "tp": 2, "sequence_parallel": True, "recompute": "full"},
    {"dp": 2, "pp": 2, "zero": 2, "schedule": "zb-h1", "recompute": "selective"},
])
def test_a_dry_rank_does_what_a_rank_does(pool: Pool, parallel: dict) -> None:
    config = small_run(parallel, {"hidden": 64, "ffn": 96})
    for rank, there in enumerate(pool.run(real, 4, config, 2)):
        here = dry(config, rank)
        assert (here.where, here.parameters, here.held) == (there.where, there.parameters, there.held)
        for ours, theirs in zip(here.steps, there.steps, strict=True):
            assert (ours.flops, ours.sent, ours.calls) == (theirs.flops, theirs.sent, theirs.calls)
            assert [moment.action for moment in ours.moments] == [moment.action for moment in theirs.moments]
            for moment, other in zip(ours.moments, theirs.moments, strict=True):
                assert moment.peak == pytest.approx(other.peak, rel=0.02)
                assert moment.alive == pytest.approx(other.alive, rel=0.02)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(runs(), st.data())
def test_formulas_say_what_any_rank_of_any_layout_does(config: RunConfig, data: st.DataObject) -> None:
    config = config.model_copy(
        update={
            "train": config.train.model_copy(update={"precision": data.draw(st.sampled_from(("fp32", "bf16")))}),
            "parallel": config.parallel.model_copy(update={"offload": "none"}),  # which formulas do not describe
        }
    )
    case = prepare(config, own_precision=True, accumulate=False)
    config, shape, layout = case.config, case.shape, config.parallel
    rank = data.draw(st.integers(0, layout.world_size - 1))
    counted, mesh = dry(config, rank, steps=1), DryMesh(layout, rank)
    microbatches, s = layout.microbatches(config.train.global_batch), config.data.sequence_length
    program = program_of(layout, microbatches)
    parts = parts_of(shape, program, mesh.index("pp"))
    passes = [len(program.microbatches_of(stage)) for stage in program.stages_of(mesh.index("pp"))]
    run = Pass(shape, layout, s, kernel=config.train.attention)
    slices = slices_of(layout, shape, microbatches=microbatches, sequence_length=s)
    assert sum(counted.steps[0].flops.values()) == step_flops(run, parts, passes, slices)
    said = state_bytes(
        shape, layout, POLICIES[config.train.precision], config.optimizer.name, parts,
        tp_index=mesh.index("tp"), shard_index=mesh.index("dp_shard"),
    )
    held = counted.held
    assert (held["parameters"], held["gradients"], held["optimizer"]) == (
        said.parameters, said.gradients, said.optimizer
    )


def test_a_rank_of_a_world_of_100_000() -> None:
    layout = {"dp": 12500, "zero": 3, "zero_shard": 125, "tp": 8, "micro_batch": 1}
    config = small_run(layout, {"heads": 8, "kv_heads": 8, "ffn": 16}, global_batch=12500)
    counted = dry(config, 77_777, steps=1)
    assert counted.where == "rank 77777 (dp_replicate 77, dp_shard 97, tp 1)"
    shards = [number for (axis, kind, _), number in counted.steps[0].calls.items()
              if (axis, kind) == ("dp_replicate", "all-reduce")]
    assert sum(shards) == config.model.layers + 2  # a unit's shard each


def test_the_tracker_counts_what_is_alive() -> None:
    with Tracker() as tracker:
        x = torch.zeros(1000)
        y = x[10:].view(-1)  # the same storage
        assert tracker.alive == 4000
        z = y + 1
        assert tracker.alive == 4000 + 990 * 4
        z.untyped_storage().resize_(0)
        assert tracker.alive == 4000
        del x, z
        assert tracker.alive == 4000
        del y
        assert tracker.alive == 0
        assert tracker.peak == 4000 + 990 * 4


def test_a_dry_mesh_is_the_mesh() -> None:
    mesh = DryMesh(Layout(dp=12500, tp=8), 77)
    assert mesh.group("dp").size() == 12500
    assert mesh.group("tp").rank() == 5
    assert mesh.group("pp") is None
