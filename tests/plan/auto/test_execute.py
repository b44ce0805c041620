"""Any plan of any module, the cheapest as well as random ones, computes on real ranks what one device computes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.comm.sharding.notation import NamedMesh
from shoal.models.transformer import initialise
from shoal.plan.auto.execute import compare, reference
from shoal.plan.auto.ilp import Solution, solve
from shoal.plan.auto.plan import plan_of
from shoal.plan.auto.trace import graph_of
from tests.plan.auto.modules import MLP, Attention, Odd, builder, transformer

LINE, GRID = NamedMesh("x", (4,)), NamedMesh("xy", (2, 2))


def example(name):
    """A module and its inputs, filled with numbers."""
    torch.manual_seed(0)
    if name in ("llama", "gpt"):
        module = transformer(name)
        initialise(module, 0)
        tokens = torch.randint(0, 32, (4, 8))
        return module, (tokens, tokens.roll(1, 1))
    module = {"mlp": MLP(12, 20, bias=True), "attention": Attention(16, 4), "odd": Odd()}[name].double()
    shape = {"mlp": (8, 12), "attention": (2, 6, 16), "odd": (10, 6)}[name]
    return module, (torch.randn(shape, dtype=torch.float64),)


def any_plan(build, rng):
    """One that random costs make the cheapest: splits that no cluster would ask for are among its choices."""
    problem = build.problem()
    moved = [replace(d, costs=d.costs + rng.random(len(d.costs)) * 1e-3) for d in problem.decisions]
    chosen = solve(replace(problem, decisions=moved)).chosen
    return plan_of(build, problem, Solution(chosen, problem.cost(chosen)))


@pytest.mark.parametrize("name, mesh", [
    ("llama", GRID), ("gpt", LINE), ("mlp", LINE), ("attention", GRID), ("odd", NamedMesh("xy", (3, 2))),
], ids=str)  # fmt: skip
def test_plans_compute_what_one_device_computes(pool, name, mesh):
    module, inputs = example(name)
    graph = graph_of(module, inputs, input_gradients=True)
    rng = np.random.default_rng(len(name) + mesh.ranks)
    kinds = set()
    for _ in range(1 if name in ("llama", "gpt") else 2):
        plan = any_plan(builder(graph, "4xA100", mesh), rng)
        kinds.update(transfer.move.kind for move in plan.found for transfer in move.transfers)
        given, expected = reference(module, inputs, plan.graph)
        assert {f"update {parameter}" for parameter, _ in module.named_parameters()} <= set(expected)
        for errors in pool.run(compare, mesh.ranks, plan, given, expected):
            assert len(errors) == len(expected) + len(list(module.parameters()))
            assert max(errors.values()) < 1e-10
    if name != "odd":
        assert {"all-reduce", "all-gather"} <= kinds


def test_a_wrong_move_is_seen(pool):
    module, inputs = example("mlp")
    plan = any_plan(builder(graph_of(module, inputs), "4xA100", LINE), np.random.default_rng(0))
    given, expected = reference(module, inputs, plan.graph)
    reduced = next(key for key, path in plan.moves.items() if [t.move.kind for t in path] == ["all-reduce"])
    broken = replace(plan, moves=plan.moves | {reduced: ()})
    errors = pool.run(compare, 4, broken, given, expected)
    assert max(max(e.values()) for e in errors) > 1e-6
