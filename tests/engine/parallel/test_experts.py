"""Experts over ranks: what is sent, what is kept, what is told, and that any layout goes on with any other's state."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.base.errors import UsageError
from shoal.base.section import plain
from shoal.engine.checkpoint import Checkpointer, load
from shoal.engine.collectives import uneven
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.uneven import (
    all_gather_uneven,
    exchange_rows,
    gather_rows,
    part_lengths,
    scatter_rows,
    take_shard,
)
from shoal.engine.models.experts import layer, permutation
from shoal.engine.models.experts.grouped import GroupedExperts
from shoal.engine.models.experts.layer import MoE
from shoal.engine.models.experts.router import SUMS
from shoal.engine.parallel.expert import DistributedExperts
from shoal.launch.worker_pool import Pool
from shoal.spec.compatibility.sizes import check_layout
from shoal.spec.config import RunConfig, build_config
from shoal.spec.layout import Layout
from tests.engine.parallel.counting import engine_of, sent_in_a_step
from tests.testing.verify.runs import MODEL, small_run

EXPERTS = {"count": 4, "per_token": 2, "ffn": 12, "balance_loss": 0.1, "bias_update": 0.01}


def run_of(parallel: dict, experts: dict | None = None, **train) -> RunConfig:
    return small_run(parallel, {"layers": 3, "experts": {**EXPERTS, **(experts or {})}}, **train)


# ---- collectives ---------------------------------------------------------------------------------------------------


def rows_and_back() -> list[float]:
    """Differences from what one process computes with all ranks' rows, forward and backward."""
    mesh = Mesh(Layout(dp=3), dist.get_rank())
    group: Group = mesh.group("dp")
    here, counts = group.rank(), [2, 0, 3]
    everything = [torch.arange(n * 2, dtype=torch.float64).view(n, 2) + 100 * r for r, n in enumerate(counts)]
    mine = everything[here].clone().requires_grad_()
    found = []

    gathered = gather_rows(mine, counts, group)
    found.append(gathered - torch.cat(everything))
    weights = torch.arange(5, dtype=torch.float64).unsqueeze(1) * (here + 1)
    (gradient,) = torch.autograd.grad((gathered * weights).sum(), mine)
    at = slice(sum(counts[:here]), sum(counts[: here + 1]))
    found.append(gradient - 6 * torch.arange(5, dtype=torch.float64)[at].unsqueeze(1))  # 1 + 2 + 3 ranks

    partial = (torch.cat(everything) * (here + 1)).requires_grad_()
    scattered = scatter_rows(partial, counts, group)
    found.append(scattered - 6 * everything[here])
    (gradient,) = torch.autograd.grad((scattered * (here + 1)).sum(), partial)
    owner = torch.tensor([r + 1.0 for r, n in enumerate(counts) for _ in range(n)], dtype=torch.float64)
    found.append(gradient - owner.unsqueeze(1))

    table = [[1, 0, 2], [0, 0, 1], [2, 1, 0]]  # rows from one to the other
    rows = (torch.arange(sum(table[here]), dtype=torch.float64).unsqueeze(1) + 10 * here).requires_grad_()
    arrived = exchange_rows(rows, table[here], [line[here] for line in table], group)
    expected = [
        torch.arange(sum(line[:here]), sum(line[: here + 1]), dtype=torch.float64) + 10 * r
        for r, line in enumerate(table)
    ]
    found.append(arrived.squeeze(1) - torch.cat(expected))
    (gradient,) = torch.autograd.grad((arrived * (here + 1)).sum(), rows)
    targets = torch.tensor([r + 1.0 for r, n in enumerate(table[here]) for _ in range(n)], dtype=torch.float64)
    found.append(gradient.squeeze(1) - targets)

    x = torch.arange(5, dtype=torch.float64).view(1, 5).requires_grad_()
    lengths = part_lengths(5, 3)
    part = take_shard(x, group, 1, lengths)
    together = all_gather_uneven(part, group, 1, lengths)
    found.append(together - x)
    (gradient,) = torch.autograd.grad((together * torch.arange(5.0)).sum(), x)
    found.append(gradient - torch.arange(5.0))
    return [float(difference.abs().max()) if difference.numel() else 0.0 for difference in found]


def test_rows_of_any_number_arrive_and_their_gradients_come_back(pool: Pool) -> None:
    for differences in pool.run(rows_and_back, 3):
        assert max(differences) == 0


# ---- overlap -------------------------------------------------------------------------------------------------------


class Logged:
    """A collective in flight that logs its wait."""

    def __init__(self, work, log: list[str]):
        self.work, self.log = work, log

    def wait(self) -> None:
        self.log.append("wait")
        self.work.wait()


def step_and_log(config: RunConfig, overlaps: bool) -> tuple[float, float, list[str]]:
    """Loss and gradient norm of a step, and the order of exchanges and of the shared experts' passes."""
    engine, log = engine_of(config), []
    start = uneven.start_all_to_all_rows

    def logged(*args):
        log.append("start")
        rows, work = start(*args)
        return rows, Logged(work, log)

    for module in (module for stage in engine.stages for module in stage.module.modules() if isinstance(module, MoE)):
        module.experts.overlaps = overlaps
        module.shared.register_forward_hook(lambda *args: log.append("shared"))
        module.shared.register_full_backward_hook(lambda *args: log.append("shared"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uneven, "start_all_to_all_rows", logged)
        result = engine.step(0)
    return result.loss, result.gradient_norm, log


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_rows_travel_during_the_shared_experts_passes(pool: Pool, recompute: str) -> None:
    """On devices that compute and send at the same time; the result is the same."""
    config = run_of(
        {"dp": 2, "ep": 2, "micro_batch": 2, "recompute": recompute}, {"shared": 1, "every": 3}, global_batch=4,
        precision="fp64",
    )
    exchange, shared = ["start", "wait"], ["shared"]
    orders = {
        True: (["start", "shared", "wait", *exchange], [*exchange, "start", "shared", "wait"]),
        False: (2 * exchange + shared, shared + 2 * exchange),
    }
    results = []
    for overlaps, (forward, backward) in orders.items():
        for loss, norm, log in pool.run(step_and_log, 2, config, overlaps):
            if overlaps or recompute == "none":  # a recomputation ends within the last block
                assert log == forward + (forward if recompute == "full" else []) + backward
            results.append((loss, norm))
    assert len(set(results)) == 1


def run_steps(config: RunConfig, as_on_a_device: bool) -> list[float]:
    """Losses and gradient norms of two steps, with the code of devices if asked."""
    with pytest.MonkeyPatch.context() as patch:
        if as_on_a_device:
            patch.setattr(layer, "permute", lambda chosen, x, most: permutation.DevicePermutation(chosen, *most))
            patch.setattr(GroupedExperts, "on_device", True)
        engine = engine_of(config)
        if as_on_a_device:
            for module in (module for stage in engine.stages for module in stage.module.modules()):
                if isinstance(module, DistributedExperts):
                    module.overlaps = module.ep is not None
        results = [engine.step(step) for step in range(2)]
        return [value for result in results for value in (result.loss, result.gradient_norm)]


@pytest.mark.parametrize(
    ("parallel", "experts"),
    [
        ({"recompute": "full"}, {"gate": "expert-choice", "balance_loss": 0.0, "bias_update": 0.0}),
        ({"dp": 2, "ep": 2, "zero": 3}, {"capacity_factor": 0.6}),
        ({"dp": 2, "tp": 2, "ep": 2, "etp": 2, "sequence_parallel": True}, {}),
        ({"pp": 2, "dp": 2, "ep": 2, "schedule": "zb-h1", "micro_batch": 1}, {}),
    ],
)  # fmt: skip
def test_the_code_of_devices_computes_the_same(pool: Pool, parallel: dict, experts: dict) -> None:
    """Static numbers of rows, grouped products of ends, one read, overlap: with the operators' CPU implementations."""
    config = run_of(parallel, {"shared": 1, "ffn": 16, **experts}, precision="fp32", global_batch=8)
    expected, found = (pool.run(run_steps, config.parallel.world_size, config, way) for way in (False, True))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


# ---- bytes ---------------------------------------------------------------------------------------------------------


def sent_and_routed(config: RunConfig) -> tuple[float, int, int]:
    """Bytes of a step's all-to-alls, rows of this rank for experts that are elsewhere, bytes of a row."""
    engine = engine_of(config)
    mesh, sent = engine.mesh, sent_in_a_step(engine)
    each = engine.shape.experts.count // mesh.size("ep")
    first = mesh.index("ep") * each
    away = 0
    for router in engine.routing.modules:
        loads = router.tally[SUMS:]
        away += int(loads.sum() - loads[first : first + each].sum())
    row = engine.shape.hidden * engine.policy.compute.itemsize
    return sum(size for (axis, kind), size in sent.items() if kind == "all-to-all"), away, row


@pytest.mark.parametrize("parallel", [{"dp": 2, "ep": 2}, {"dp": 4, "ep": 2}, {"tp": 2, "dp": 2, "ep": 4, "etp": 1}])
def test_only_rows_for_other_ranks_travel_four_times(pool: Pool, parallel: dict) -> None:
    """There and back, and their gradients back and there: r h numbers each, none padded."""
    config = run_of({**parallel, "micro_batch": 2})
    results = pool.run(sent_and_routed, config.parallel.world_size, config)
    assert sum(sent for sent, _, _ in results) == 4 * sum(away * row for _, away, row in results)
    assert sum(away for _, away, _ in results) > 0


def bytes_held(config: RunConfig) -> tuple[int, dict[str, tuple[int, ...]]]:
    engine = engine_of(config)
    weights = engine.parameters.weights()
    return engine.parameters.bytes()["parameters"], {
        name: tuple(map(sum, zip(*(p.box.shape for p in pieces), strict=True)))
        for name, pieces in weights.items() if ".experts." in name
    }


def test_experts_take_an_eps_share_of_memory(pool: Pool) -> None:
    wide = {"ffn": 96}
    (whole, _), *_ = pool.run(bytes_held, 4, run_of({"dp": 4}, wide))
    (shared, boxes), *_ = pool.run(bytes_held, 4, run_of({"dp": 4, "ep": 4}, wide))
    experts = 3 * 4 * 3 * 96 * 16 * 4  # layers, experts, matrices, f h, bytes
    assert whole - shared == pytest.approx(experts * 3 / 4, rel=0.01)
    assert boxes["layers.0.mlp.experts.up"] == (1, 96, 16)


# ---- what is told --------------------------------------------------------------------------------------------------


def routed_of(config: RunConfig):
    engine = engine_of(config)
    engine.evaluate(engine.samples)
    engine.step(0)
    return engine.step_metrics(), engine.routing.totals, engine.validated


@pytest.mark.parametrize("gate", ["switch", "expert-choice", "top-k"])
def test_what_routers_did_is_the_same_on_every_layout(pool: Pool, gate: str) -> None:
    """Recomputed layers count once; every replica and part of a sequence counts. Validation on the same samples tells
    the same."""
    experts = {"gate": gate, "per_token": 1, "capacity_factor": 0.75, "bias_update": 0.0}
    if gate == "expert-choice":
        experts["balance_loss"] = 0.0
    train = {"global_batch": 4, "precision": "fp64", "validation_sequences": 4}
    (one, alone, validated), = pool.run(routed_of, 1, run_of({"recompute": "full"}, experts, **train))
    assert 0 < one["dropped"] < 1
    assert (validated["dropped"], validated["expert_load"]) == (one["dropped"], one["expert_load"])
    for name in ("balance_loss", "z_loss"):
        assert validated[name] == pytest.approx(one[name], rel=1e-12)
    assert one["busiest_expert"] >= 1
    tokens = 4 * 8 * 3  # of three layers
    assert float(alone[:, 0].sum()) == pytest.approx(one["dropped"] * tokens)
    if gate != "expert-choice":
        assert float(alone[:, SUMS:].sum() + alone[:, 0].sum()) == tokens
    for parallel in ({"dp": 2, "ep": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 3}):
        config = run_of({**parallel, "micro_batch": 1}, experts, **train)
        for told, totals, passed in pool.run(routed_of, config.parallel.world_size, config):
            assert told["expert_load"] == passed["expert_load"] == one["expert_load"]
            assert passed["dropped"] == one["dropped"]
            torch.testing.assert_close(totals, alone)


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def save(config: RunConfig, folder: Path) -> None:
    engine = engine_of(config)
    engine.step(0)
    checkpoints = Checkpointer(folder, group=dist.group.WORLD, keep=1, asynchronous=False, fresh=True)
    checkpoints.save(1, engine.state(), {"model": {}}, block=True)
    checkpoints.close()


def resumed_loss(config: RunConfig, folder: Path) -> tuple[float, float]:
    engine = engine_of(config)
    (path,) = [p for p in folder.iterdir() if p.is_dir()]
    load(path, engine.state(), group=dist.group.WORLD if dist.get_world_size() > 1 else None, model={})
    engine.restored(1)
    result = engine.step(1)
    return result.loss, result.gradient_norm


def test_a_checkpoint_goes_on_with_any_other_ep(pool: Pool, tmp_path: Path) -> None:
    """Biases too: the next step's loss and gradient norm are the same to 1e-9 in float64."""
    train = {"global_batch": 8, "precision": "fp64"}
    layouts = [{"dp": 4, "ep": 4, "zero": 1}, {"dp": 2, "tp": 2, "ep": 2, "zero": 3}, {"pp": 3}, {"tp": 2, "etp": 1}]
    pool.run(save, 4, run_of({**layouts[0], "micro_batch": 1}, **train), tmp_path)
    found = []
    for parallel in layouts:
        config = run_of({**parallel, "micro_batch": 1}, **train)
        found += pool.run(resumed_loss, config.parallel.world_size, config, tmp_path)
    for loss, norm in found:
        assert math.isclose(loss, found[0][0], rel_tol=1e-9)
        assert math.isclose(norm, found[0][1], rel_tol=1e-9)


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel", "experts", "words"),
    [
        ({"ep": 2}, {}, "parallel: ep 2 x etp 1 = 2 does not divide dp 1 x cp 1 x tp 1 = 1"),
        ({"dp": 3, "ep": 3}, {}, "parallel.ep = 3 does not divide model.experts.count = 4"),
        ({"tp": 2, "etp": 2}, {"ffn": 5}, "parallel.etp = 2 does not divide model.experts.ffn = 5"),
        ({"schedule": "terapipe"}, {}, "gates need complete sequences"),
        ({"pp": 2, "schedule": "pipedream"}, {}, "losses and loads of experts are per step"),
        ({"dp": 2, "sync": "local-sgd"}, {}, "its replicas differ"),
    ],
)
def test_what_cannot_be_is_refused(parallel: dict, experts: dict, words: str) -> None:
    config = run_of(parallel, experts)
    shape = config.model.shape(vocab=257, sequence_length=8)
    with pytest.raises(UsageError) as error:
        check_layout(config.parallel, shape, global_batch=12, sequence_length=8)
    assert words in str(error.value)


def test_ep_needs_experts() -> None:
    shape = build_config({"model": MODEL}).model.shape(vocab=257, sequence_length=8)
    for fields in ({"dp": 2, "ep": 2}, {"tp": 2, "etp": 1}):
        with pytest.raises(UsageError, match="the model has no experts"):
            check_layout(Layout(**fields), shape, global_batch=2, sequence_length=8)


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        ({"per_token": 9}, "model.experts.per_token = 9 is more than model.experts.count = 4"),
        ({"gate": "switch", "per_token": 2, "bias_update": 0.0}, "but the gate switch takes 1"),
        ({"gate": "gshard", "per_token": 2}, "model.experts.bias_update = 0.01 is for the gate top-k"),
        ({"gate": "expert-choice", "bias_update": 0.0}, "experts that choose get equally many"),
        ({"every": 4}, "of 3 layers none has experts"),
    ],
)
def test_experts_that_cannot_be_are_refused(experts: dict, words: str) -> None:
    config = run_of({}, experts)
    with pytest.raises(UsageError) as error:
        config.model.shape(vocab=257, sequence_length=8)
    assert words in str(error.value)
    assert plain(config)["model"]["experts"]["count"] == 4
