"""A dry rank does what the rank does: FLOPs and collectives to the last, memory within 2 %; formulas agree with it."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import shoal
from shoal.cli.main import main
from shoal.engine.collectives.mesh import DryMesh, Mesh
from shoal.engine.precision.policy import POLICIES
from shoal.launch.worker_pool import Pool
from shoal.pipeline.from_layout import build_layout_program, choose_slices
from shoal.planning.cost.counts import RankCounts
from shoal.planning.cost.memory.state import state_bytes
from shoal.planning.cost.micro_batch import MicroBatch
from shoal.planning.cost.parameters import rank_parts
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS
from shoal.testing.verify.case import prepare
from shoal.training.dry_run.dry_run import Counted, count, dry_run, make_samples
from shoal.training.dry_run.tracker import Tracker
from shoal.training.step.engine import Engine
from shoal.training.step.model_state import attention_kernel
from tests.testing.verify.runs import runs, small_run


def real(config: RunConfig, steps: int, ranks: tuple[int, ...]) -> Counted | None:
    """What this rank of a world that is there does, if it is one of those that are counted."""
    case = prepare(config, own_precision=True, accumulate=False)
    mesh = Mesh(config.parallel, dist.get_rank(), transport="backend")
    samples = make_samples(case.config, case.shape)
    if mesh.rank not in ranks:
        engine = Engine(case.config, case.shape, mesh, samples)
        for step in range(steps):
            engine.step(step)
        return None
    with Tracker() as tracker:
        return count(Engine(case.config, case.shape, mesh, samples), tracker, steps)


def dry(config: RunConfig, rank: int, steps: int = 2) -> Counted:
    case = prepare(config, own_precision=True, accumulate=False)
    return dry_run(case.config, case.shape, rank, steps=steps, on_cpu=True)


@pytest.mark.parametrize(("parallel", "model", "differing"), [
    ({"dp": 2, "tp": 2, "zero": 3}, {}, (3,)),
    ({"pp": 2, "tp": 2, "sequence_parallel": True, "recompute": "full"}, {}, (0, 3)),
    ({"tp": 4, "tp_x": 2, "sequence_parallel": True}, {"layers": 1}, (3,)),
    ({"dp": 2, "pp": 2, "zero": 2, "schedule": "zb-h1", "recompute": "selective"}, {"depths": {"capacity": 0.5}},
     (0, 3)),
])  # fmt: skip
def test_a_dry_rank_does_what_a_rank_does(pool: Pool, parallel: dict, model: dict, differing: tuple) -> None:
    config = small_run(parallel, {"hidden": 64, "ffn": 96, **model})
    ranks = pool.run(real, 4, config, 4, differing)
    for rank in differing:
        here, there = dry(config, rank), ranks[rank]
        assert (here.where, here.parameters, here.held) == (there.where, there.parameters, there.held)
        ours, theirs = here.steps[-1], there.steps[-1]
        assert (ours.flops, ours.sent, ours.calls) == (theirs.flops, theirs.sent, theirs.calls)
        # Threads of gloo free a tensor with a delay, long on a busy machine: compare with the least of three steps.
        for moment, *others in zip(ours.moments, *(step.moments for step in there.steps[1:]), strict=True):
            assert all(moment.action == other.action for other in others)
            assert moment.peak == pytest.approx(min(other.peak for other in others), rel=0.02)
            assert moment.alive == pytest.approx(min(other.alive for other in others), rel=0.02)


def counted_alike(config: RunConfig, data: st.DataObject) -> RunConfig:
    """A drawn run as a dry run can count it: without documents under cp, where the data decides what a ring computes,
    without offloading, which formulas do not describe, and of as many tokens as experts and ranks can share."""
    layout, shape = config.parallel, config.model
    precision = data.draw(st.sampled_from(("fp32", "bf16")))
    changed = {
        "train": config.train.model_copy(update={"precision": precision}),
        "parallel": layout.model_copy(update={"offload": "none"}),
        "data": config.data,
    }
    if shape.experts.count:
        length = 2 * 2 * layout.cp * layout.tp * shape.experts.count
        changed["data"] = config.data.model_copy(update={"sequence_length": length})
        if shape.depths.capacity:
            changed["model"] = shape.model_copy(update={"depths": shape.depths.model_copy(update={"capacity": 0.5})})
    if layout.cp > 1:
        changed["data"] = changed["data"].model_copy(update={"document_mask": False})
    return config.model_copy(update=changed)


def test_documents_are_lengths_on_accelerators_and_masks_on_the_cpu() -> None:
    """In bf16, a document adds a few numbers to the peak on accelerators; on the CPU, a mask. FLOPs stay equal."""
    config = small_run({}, {"heads": 4, "kv_heads": 2, "head_dim": 16}, precision="bf16", attention="sdpa")
    longer = config.data.model_copy(update={"sequence_length": 512})
    masked, plain = (
        config.model_copy(update={"data": longer.model_copy(update={"document_mask": documents})})
        for documents in (True, False)
    )
    shape = config.model.shape(vocab=257, sequence_length=512)
    for on_cpu, least, most in ((False, 1, 10_000), (True, 2 * 512 * 512, 10**8)):
        one, other = (dry_run(each, shape, 0, steps=1, on_cpu=on_cpu).steps[0] for each in (masked, plain))
        assert least <= one.peak - other.peak <= most
        assert sum(one.flops.values()) == sum(other.flops.values())


@pytest.mark.parametrize(("parallel", "chunked"), [({}, True), ({"cp": 2}, False)])
def test_windows_are_computed_alone_on_accelerators(parallel: dict, chunked: bool) -> None:
    """In bf16, by a kernel that takes them; formulas count the same."""
    model = {"heads": 4, "kv_heads": 2, "head_dim": 16, "window": 32, "pattern": ("local", "global")}
    model |= {"chunked": chunked}
    config = small_run(parallel, model, precision="bf16", attention="sdpa")
    config = config.model_copy(update={"data": config.data.model_copy(update={"sequence_length": 512})})
    shape = config.model.shape(vocab=257, sequence_length=512)
    run = MicroBatch(shape, config.parallel, 512, 2, by_lengths=True)
    program = build_layout_program(config.parallel, config.parallel.microbatches(config.train.global_batch))
    formulas = RankCounts(run, program, DryMesh(config.parallel, 0), FORMATS["bf16"])
    counted = dry_run(config, shape, 0, steps=1).steps[0].flops
    assert sum(counted.values()) == formulas.flops()
    on_cpu = dry_run(config, shape, 0, steps=1, on_cpu=True).steps[0].flops
    assert sum(on_cpu.values()) > sum(counted.values())


def test_estimates_of_curvature_are_part_of_a_step(pool: Pool) -> None:
    """Their passes come before the step's own, and hold more than these do."""
    config = small_run({"dp": 2, "zero": 1}, {"hidden": 64, "ffn": 96, "layers": 1})
    rule = {"name": "sophia-h", "hessian_every": 1}
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update=rule)})
    here, there = dry(config, 0).steps[-1], pool.run(real, 2, config, 3, (0,))[0].steps[1:]
    assert here.peak > max(moment.peak for moment in here.moments)
    assert here.peak == pytest.approx(min(step.peak for step in there), rel=0.02)  # as above


@settings(max_examples=2, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(runs(), st.data())
def test_formulas_say_what_any_rank_of_any_layout_does(config: RunConfig, data: st.DataObject) -> None:
    """FLOPs, bytes sent by axis and kind, and bytes held; with experts, and layers that some tokens pass through."""
    case = prepare(counted_alike(config, data), own_precision=True, accumulate=False)
    config, shape, layout = case.config, case.shape, case.config.parallel
    rank = data.draw(st.integers(0, layout.world_size - 1))
    counted, mesh = dry(config, rank, steps=1), DryMesh(layout, rank)
    formulas = formulas_of(config, shape, mesh)
    assert sum(counted.steps[0].flops.values()) == formulas.flops()
    sent = {key: size for key, size in counted.steps[0].sent.items() if size}
    assert formulas.sent() == pytest.approx(sent, rel=1e-12)
    parts = rank_parts(shape, formulas.program, mesh.index("pp"))
    said = state_bytes(
        shape, layout, POLICIES[config.train.precision], config.optimizer.name, parts,
        tp_index=mesh.index("tp"), shard_index=mesh.index("shard"),
        expert_index=(mesh.index("edp_shard"), mesh.index("ep"), mesh.index("etp")),
    )
    held = counted.held
    assert (held["parameters"], held["gradients"], held["optimizer"]) == (
        said.parameters, said.gradients, said.optimizer
    )


def formulas_of(config: RunConfig, shape: ModelShape, mesh: DryMesh) -> RankCounts:
    layout, s, policy = config.parallel, config.data.sequence_length, FORMATS[config.train.precision]
    microbatches = layout.microbatches(config.train.global_batch)
    slices = choose_slices(layout, shape, microbatches=microbatches, sequence_length=s)
    kernel = attention_kernel(config.train.attention, torch.device("cpu"), POLICIES[config.train.precision].compute)
    run = MicroBatch(shape, layout, s, policy.compute.itemsize, kernel=kernel)
    program = build_layout_program(layout, microbatches, len(slices))
    return RankCounts(run, program, mesh, policy, slices, by_parts=layout.overlaps_products(background=False))


@pytest.mark.parametrize(("model", "parallel", "steps"), [
    ({}, {"dp": 4, "zero": 3, "zero_shard": 2, "prefetch": 2, "tp": 2, "sequence_parallel": True, "recompute": "full"},
     1),
    ({"tied": True, "layers": 2}, {"pp": 2, "tp": 4, "schedule": "dualpipe", "tp_overlap": True, "dp": 2, "zero": 2},
     2),
    ({"name": "tiny-gpt", "tied": True}, {"cp": 4, "ulysses": 2, "recompute": "full", "zero": 3, "pp": 2}, 2),
    ({"mtp_depth": 2, "layers": 2, "experts": {"count": 4, "ffn": 8}},
     {"pp": 2, "tp": 2, "sequence_parallel": True, "etp": 1}, 1),
    ({"mtp_depth": 1, "tied": True, "layers": 1}, {"zero": 3, "dp": 2, "tp": 2, "cp": 2, "recompute": "full"}, 1),
    ({"name": "tiny-gpt", "layers": 2}, {"tp": 4, "tp_x": 2, "recompute": "full", "pp": 2}, 2),
])  # fmt: skip
def test_bytes_sent_of_the_first_and_of_a_later_step(model: dict, parallel: dict, steps: int) -> None:
    """With key/value heads that several ranks hold, and all that is shared."""
    config = small_run(parallel, model, precision="bf16")
    case = prepare(config, own_precision=True, accumulate=False)
    rank = config.parallel.world_size - 1
    counted = dry(config, rank, steps)
    sent = {key: size for key, size in counted.steps[-1].sent.items() if size}
    formulas = formulas_of(case.config, case.shape, DryMesh(config.parallel, rank))
    assert formulas.sent() == pytest.approx(sent, rel=1e-12)
    assert formulas.flops() == sum(counted.steps[-1].flops.values())


EXPERTS = {"count": 4, "per_token": 2, "ffn": 24}


@pytest.mark.parametrize(("parallel", "experts", "family"), [
    ({"dp": 2, "tp": 2, "ep": 2, "recompute": "full"}, {"every": 2, "gate": "noisy-top-k"}, "tiny-gpt"),
    ({"dp": 2, "tp": 2, "ep": 4, "etp": 1, "sequence_parallel": True, "zero": 3, "recompute": "full"},
     {"shared": 1, "biases": True}, "tiny"),
    ({"cp": 2, "tp": 2, "sequence_parallel": True, "dp": 2, "ep": 4, "cp_order": "striped", "recompute": "full"},
     {"shared": 1, "depths": 0.5, "per_token": 1, "scales_input": True, "biases": True}, "tiny"),
])  # fmt: skip
def test_experts_that_all_get_as_many_tokens(parallel: dict, experts: dict, family: str) -> None:
    """FLOPs and bytes sent, of a dry rank whose routers spread tokens evenly; also of those that pass through a layer
    where ranks share their sequences."""
    model = {"name": family, "layers": 2, "experts": {**EXPERTS, **experts}}
    if capacity := model["experts"].pop("depths", 0):
        model["depths"] = {"capacity": capacity, "predictor": 3}
    config = small_run(parallel, model, precision="fp32")
    length = 8 if parallel.get("cp", 1) == 1 else 64
    config = config.model_copy(update={"data": config.data.model_copy(update={"sequence_length": length})})
    case = prepare(config, own_precision=True, accumulate=False)
    rank = config.parallel.world_size - 1
    counted = dry(config, rank, steps=1)
    formulas = formulas_of(case.config, case.shape, DryMesh(config.parallel, rank))
    assert sum(counted.steps[0].flops.values()) == formulas.flops()
    sent = {key: size for key, size in counted.steps[0].sent.items() if size}
    assert formulas.sent() == pytest.approx(sent, rel=1e-12)


def test_a_rank_of_a_world_of_100_000() -> None:
    layout = {"dp": 12500, "zero": 3, "zero_shard": 125, "tp": 8, "micro_batch": 1}
    config = small_run(layout, {"heads": 8, "kv_heads": 8, "ffn": 16}, global_batch=12500)
    counted = dry(config, 77_777, steps=1)
    assert counted.where == "rank 77777 (dp_replicate 77, dp_shard 97, tp 1)"
    shards = [number for (axis, kind, _), number in counted.steps[0].calls.items()
              if (axis, kind) == ("replicate", "all-reduce")]
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


def test_without_a_batch_few_micro_batches_are_counted_and_progress_is_shown() -> None:
    """The default of estimates, 4 M tokens, is thousands of micro-batches of a small model: minutes without a word."""
    counted = shoal.dry_run(Layout(pp=2), model="tiny", cluster="2xH100", sequence_length=16, steps=1)
    assert counted.estimate.run.microbatches == 4
    asked = shoal.dry_run(Layout(), model="tiny", cluster="h100-sxm", sequence_length=16, steps=1, global_batch=3)
    assert asked.estimate.run.microbatches == 3
    shown: list[tuple[float, str]] = []
    config = small_run({"pp": 2}, {})
    dry_run(config, config.model.shape(vocab=257, sequence_length=config.data.sequence_length), 0, steps=2,
            show=lambda share, text: shown.append((share, text)))  # fmt: skip
    assert shown == sorted(shown) and shown[-1] == (1.0, "step 2 of 2")


def test_the_command_counts_measures_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.toml"
    run.write_text(
        '[model]\nname = "tiny"\nlayers = 2\nvocab = 300\n[parallel]\ntp = 2\n'
        '[data]\nsource = "synthetic"\nsequence_length = 16\n[train]\nglobal_batch = 4\nprecision = "fp32"\n'
    )
    page = tmp_path / "memory.html"
    command = ["estimate", str(run), "--cluster", "2xH100", "--dry-run", "--measure", "--steps", "2"]
    assert main([*command, "--rank", "1", "--out", str(page)]) == 0
    text = capsys.readouterr().out
    assert "rank 1 (tp 1) of 2" in text
    flops, formula = re.search(r"FLOPs +([\d,]+) \(([\d,]+)\)", text).groups()
    assert flops == formula
    sent = re.findall(r"(\S+ \S?B)  \((.*)\)", text)
    assert len(sent) >= 3 and all(counted == said for counted, said in sent)
    assert abs(float(re.search(r"([+-][\d.]+) % was counted dry", text)[1])) < 2
    assert re.search(r"peak of memory .*\(\S+ \S?B with the kernels of h100-sxm\)", text)
    assert "most, measured" in page.read_text()


@pytest.mark.parametrize(("more", "said"), [
    (["--rank", "2"], "ranks are 0 to 1"),
    (["--cluster", "2x8xH100", "--measure"], "16 ranks; at most 8"),
    (["--model", "olmoe-1b-7b", "--parallel.cp", "2", "--sequence-length", "4100"], "an equal number of"),
])
def test_what_cannot_be_counted_is_refused(more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--cluster", "2xH100", "--model", "tiny", "--dry-run", *more]) == 2
    assert said in capsys.readouterr().err
