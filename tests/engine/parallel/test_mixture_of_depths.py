"""Layers that only some tokens pass through, over ranks: any layout computes the same, and what travels."""

from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.base.errors import UsageError
from shoal.base.section import plain
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.models.mixture_of_depths import ChosenPlaces
from shoal.engine.parallel.context.causal_blocks import token_positions
from shoal.engine.parallel.context.token_order import assign_tokens
from shoal.engine.parallel.mixture_of_depths import SharedPlaces, positions_by_rank
from shoal.launch.worker_pool import Pool
from shoal.planning.estimate import Estimate, EstimatedRun
from shoal.planning.search.search import search
from shoal.spec.catalog import model_shape
from shoal.spec.catalog.clusters import cluster
from shoal.spec.catalog.experts import Depths
from shoal.spec.config import RunConfig
from shoal.spec.layout import Layout
from shoal.testing.verify.case import prepare, run_case
from shoal.training.check import check
from shoal.training.records.metrics import StepMetrics
from tests.engine.parallel.counting import engine_of
from tests.testing.verify.runs import small_run


def run_of(parallel: dict[str, Any], length: int = 8, experts: dict | None = None, **depths) -> RunConfig:
    model = {"layers": 4, "depths": {"capacity": 0.5, "predictor": 3, **depths}}
    if experts:
        model["experts"] = experts
    run = small_run(parallel, model)
    return run.model_copy(update={"data": run.data.model_copy(update={"sequence_length": length,
                                                                      "document_mask": True})})


LAYOUTS = {
    "sequence parallel": ({"tp": 2, "sequence_parallel": True, "tp_overlap": True}, {}),
    "tensor parallel": ({"tp": 2, "dp": 2, "zero": 3}, {"weight": "sigmoid"}),
    "ring": ({"cp": 2, "zero": 1, "recompute": "full"}, {"capacity": 0.7, "length": 11}),
    "all": ({"cp": 2, "tp": 2, "sequence_parallel": True, "pp": 2, "schedule": "zb-h1"}, {"length": 16, "every": 1}),
    "experts": ({"cp": 2, "dp": 2, "ep": 4, "ulysses": 2}, {
        "length": 12, "experts": {"count": 4, "per_token": 2, "ffn": 12, "capacity_factor": 0.75, "balance_loss": 1.0},
    }),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_computes_what_one_device_does(pool: Pool, name: str) -> None:
    parallel, depths = LAYOUTS[name]
    verdict, _ = run_case(prepare(run_of(parallel, **depths), own_precision=False), pool, steps=1)
    assert not verdict.findings, verdict.findings[0].text


# ---- where tokens are ----------------------------------------------------------------------------------------------


def rows_there_and_back(layout: Layout, taken: torch.Tensor, s: int, k: int) -> tuple[list[float], int, float]:
    """Differences from what one process has, rows that this rank computes and does not hold, and bytes that it sent."""
    mesh = Mesh(layout, dist.get_rank())
    parts, cpu = layout.sequence_shards, torch.device("cpu")
    whole, chosen = assign_tokens(layout, s), assign_tokens(layout, k)
    context = token_positions(chosen.chunks(mesh.index("cp")), cpu)
    group = mesh.group("sequence")
    places = SharedPlaces(
        group, group.rank(), positions_by_rank(whole, parts, cpu), positions_by_rank(chosen, parts, cpu), context
    )
    x = torch.arange(taken.shape[0] * s * 3, dtype=torch.float64).view(-1, s, 3)
    tokens, slots = places.tokens[group.rank()], places.chosen[group.rank()]
    mine = x[:, tokens].clone().requires_grad_()
    route = places.route(taken, len(tokens))
    there = route.dispatch(mine.flatten(0, 1).index_select(0, route.chosen))
    here = taken[:, slots]  # whose tokens are computed here
    found = [there - x.gather(1, here.unsqueeze(-1).expand(-1, -1, 3))]
    home = route.combine(there)
    found.append(home - mine.flatten(0, 1).index_select(0, route.chosen))
    alone = ChosenPlaces().route(taken, s)
    weights = torch.arange(len(x) * s, dtype=torch.float64).view(-1, s)[:, tokens].flatten()
    (gradient,) = torch.autograd.grad((home * weights[route.chosen].unsqueeze(1)).sum(), mine)
    expected = torch.zeros_like(mine).flatten(0, 1)
    expected[route.chosen] = weights[route.chosen].unsqueeze(1).expand(-1, 3)
    found += [gradient.flatten(0, 1) - expected, places.gather(places.own(x[..., 0])) - x[..., 0]]
    assert alone.chosen.numel() == taken.numel()
    away = int((~torch.isin(here, tokens)).sum())
    return [float(d.detach().abs().max()) for d in found], away, mesh.sent()["sequence", "all-to-all"]


@pytest.mark.parametrize("parallel, s, k", [
    ({"tp": 2, "sequence_parallel": True}, 8, 4),
    ({"cp": 3, "cp_order": "striped"}, 13, 7),
    ({"cp": 2, "tp": 2, "sequence_parallel": True}, 16, 8),
    ({"cp": 4, "ulysses": 2}, 19, 9),
])
def test_chosen_tokens_arrive_in_order_and_come_home(pool: Pool, parallel: dict, s: int, k: int) -> None:
    """And only those travel that another rank computes: there and back, and in backward once more."""
    generator = torch.Generator().manual_seed(s)
    taken = torch.stack([torch.randperm(s, generator=generator)[:k].sort().values for _ in range(3)])
    layout = Layout(**parallel)
    results = pool.run(rows_there_and_back, layout.world_size, layout, taken, s, k)
    for differences, _, _ in results:
        assert max(differences) == 0
    away = sum(away for _, away, _ in results)
    assert away > 0
    assert sum(sent for *_, sent in results) == 4 * away * 3 * 8


# ---- what is told --------------------------------------------------------------------------------------------------


def foreseen_of(config: RunConfig):
    engine = engine_of(config)
    engine.step(0)
    return engine.step_metrics()


def test_what_is_foreseen_is_the_same_on_every_layout(pool: Pool) -> None:
    (one,) = pool.run(foreseen_of, 1, run_of({"micro_batch": 4, "recompute": "full"}))
    assert 0 < one["depth_accuracy"] < 1
    assert set(one) <= {field.name for field in fields(StepMetrics)}
    found = 0.5 * one["depth_recall"]
    assert one["depth_accuracy"] == pytest.approx(1 - (0.5 - found) - (one["depth_expected"] - found))
    for parallel in ({"dp": 2, "tp": 2}, {"cp": 2}, {"pp": 2, "micro_batch": 4}):
        config = run_of({"micro_batch": 2, **parallel})
        config = config.model_copy(update={"train": config.train.model_copy(update={"global_batch": 8})})
        for told in pool.run(foreseen_of, config.parallel.world_size, config):
            assert told["depth_accuracy"] == one["depth_accuracy"]
            assert told["depth_loss"] == pytest.approx(one["depth_loss"], rel=1e-5)


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes, what", [
    ({"parallel": {"tp": 2, "sequence_parallel": True}, "depths": {"capacity": 0.6}}, "of 8 tokens, .* multiple of tp"),
    ({"parallel": {"cp": 2}, "depths": {"capacity": 0.3}}, "too few for cp 2"),
    ({"parallel": {"pp": 2, "schedule": "terapipe"}}, "'terapipe' with model.depths"),
    ({"parallel": {"pp": 2, "schedule": "pipedream"}}, "'pipedream' with model.depths"),
    ({"parallel": {"dp": 2, "sync": "diloco"}}, "'diloco' with model.depths"),
    ({"train": {"compile": True}}, "train.compile = true with model.depths"),
    ({"train": {"precision": "fp8"}}, "with model.depths"),
    ({"optimizer": {"name": "sophia-g"}}, "sophia-g' with model.depths"),
])
def test_what_does_not_go_together_is_refused(changes: dict, what: str) -> None:
    config = plain(run_of(changes.pop("parallel", {}), **changes.pop("depths", {})))
    for section, values in changes.items():
        config[section] |= values
    with pytest.raises(UsageError, match=what):
        check(RunConfig.model_validate(config))


@pytest.mark.parametrize("parallel", [{}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}], ids=["one", "sp", "cp"])
def test_fewer_tokens_take_less_time_and_memory(parallel: dict[str, Any]) -> None:
    """Estimated: of 4 layers 2 take half of the tokens, a sixteenth, or all."""
    whole, layout = model_shape("llama-3-8b"), Layout(**parallel)
    machine = cluster(f"{layout.world_size}xH100" if layout.world_size > 1 else "h100-sxm")

    def estimate(**depths: float) -> Estimate:
        some = Depths(**depths) if depths else None
        return Estimate(EstimatedRun(whole.model_copy(update={"layers": 4, "depths": some}), layout, machine, 8192, 8))

    every, half, few = estimate(), estimate(capacity=0.5), estimate(capacity=1 / 16)
    assert few.step_seconds < half.step_seconds < every.step_seconds
    assert few.fullest.activations < half.fullest.activations < every.fullest.activations
    matrices = [found.stages[0].matrices for found in (every, half, few)]
    head = every.stages[0].matrices - 4 * every.layer().products
    assert (matrices[2] - head) / (matrices[0] - head) == pytest.approx((2 + 2 / 16) / 4, rel=0.1)
    assert all(0 < found.mfu < 1 for found in (every, half, few))
    with pytest.raises(UsageError, match="estimated, but not searched"):
        search(half.run)
