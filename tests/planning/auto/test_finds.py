"""What the integer program finds by itself: Megatron's splits, data parallelism, ZeRO, and mixtures of them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from shoal.engine.sharding.graph import BACKWARD, FORWARD
from shoal.engine.sharding.named_axes import NamedMesh
from shoal.engine.sharding.plan import GIVEN
from shoal.planning.auto.baselines import restrict_to_baselines
from shoal.planning.auto.capture.forward import export_forward
from shoal.planning.auto.capture.trace import capture_graph, differentiate
from shoal.planning.auto.intra.ilp import solve
from shoal.planning.auto.plan import build_plan
from tests.planning.auto.modules import MLP, Attention, builder, shard, transformer

LINE = NamedMesh("x", (8,))


def meta(module, *shape):
    """The graph of a layer among others, at a size at which it pays to split it."""
    with torch.device("meta"):
        forward = export_forward(module, (torch.empty(shape, device="meta"),))
    sources = {node: ("boundary", name) if kind == "input" else (kind, name)
               for node, (kind, name) in forward.sources.items()}  # fmt: skip
    return differentiate(replace(forward, sources=sources))


def sums(plan, phase):
    """What is communicated in a phase, as (kind, axes)."""
    return [(str(t.kind), t.axes) for move in plan.reshardings if move.phase == phase for t in move.moves
            if t.algorithm]  # fmt: skip


def among_others(build):
    """The plan of a layer whose input and output every device has whole, as between Megatron's regions."""
    problem = build.problem()
    ends = {name for name, op in build.ops.items() if op.kind in ("boundary", "gradient") or name.startswith(GIVEN)}

    def whole(choice):
        return all(not split.out.used for name, split in choice.items() if name in ends)

    problem = problem.restricted(whole)
    return build_plan(build, problem, solve(problem))


@pytest.mark.parametrize("nodes", [1, 2])
def test_megatrons_mlp(nodes):
    with torch.device("meta"):
        module = MLP(4096, 16384)
    plan = among_others(builder(meta(module, 1, 512, 4096), "8xA100" if nodes == 1 else "2x4xA100", LINE))
    assert plan.proven
    assert str(plan.sharding("up.weight")) == "[Ax, B]", "column: split by output"
    assert str(plan.sharding("down.weight")) == "[A, Bx]", "row: split by input"
    assert sums(plan, FORWARD) == sums(plan, BACKWARD) == [("all-reduce", "x")]
    assert sums(plan, "step") == []


@pytest.mark.parametrize("batch", [1, 3])
def test_megatrons_attention(batch):
    with torch.device("meta"):
        module = Attention(4096, 32)
    plan = among_others(builder(meta(module, batch, 512, 4096), "8xA100", LINE))
    for name in ("query", "key", "value"):
        assert str(plan.sharding(f"{name}.weight")) == "[Ax, B]", "column: heads"
    assert str(plan.sharding("mix.weight")) == "[A, Bx]", "row"
    assert sums(plan, FORWARD) == sums(plan, BACKWARD) == [("all-reduce", "x")]


def test_megatrons_layer_of_shoals_own_model():
    with torch.device("meta"):
        module = transformer("llama", hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, max_sequence=512)
        tokens = torch.zeros(1, 512, dtype=torch.int64)
        plan = shard(builder(capture_graph(module, (tokens, tokens)), "8xA100", LINE))
    for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
        assert str(plan.sharding(f"layers.0.{name}.weight")) == "[Ax, B]"
    for name in ("attention.out", "mlp.down"):
        assert str(plan.sharding(f"layers.0.{name}.weight")) == "[A, Bx]"
    assert not plan.sharding("layers.0.mlp_norm.weight").used


class FeedForwards(nn.Module):
    """Two feed-forward blocks, called as those of shoal's models are: a wide one and a narrow one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": MLP(2048, ffn)}) for ffn in (32768, 512))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["mlp"](x)
        return x


def test_on_an_uneven_grid_something_better_than_every_split_by_hand():
    grid = NamedMesh("xy", (2, 4))  # nodes over slow Ethernet, devices of a node
    with torch.device("meta"):
        build = builder(capture_graph(FeedForwards(), (torch.empty(8, 256, 2048),)), "2x4xA100-ETH100", grid)
    problem = build.problem()
    found = solve(problem)
    by_hand = {split: solve(limited).cost for split, (limited, _) in restrict_to_baselines(build, problem).items()}
    assert {"data parallel", "FSDP (ZeRO-3)", "Megatron over xy", "Megatron over y, FSDP over x"} <= set(by_hand)
    assert found.cost < 0.8 * min(by_hand.values()), by_hand
    weights = build_plan(build, problem, found).weight_shardings()
    assert weights["layers.0.mlp.up.weight"] != weights["layers.1.mlp.up.weight"], "each as suits its width"
