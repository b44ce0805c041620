"""Modules to plan for: a layer of shoal's models, and what a user might write."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from shoal.engine.models.transformer import Transformer
from shoal.engine.sharding.named_axes import NamedMesh
from shoal.engine.sharding.plan import ShardingPlan
from shoal.labs.autoshard.execute import reference, single_stage
from shoal.planning.auto.capture.forward import Forward, export_forward
from shoal.planning.auto.intra.ilp import Solution, solve
from shoal.planning.auto.intra.problem import Builder
from shoal.planning.auto.plan import build_plan
from shoal.planning.auto.search import Target
from shoal.spec.catalog import model_shape
from shoal.spec.catalog.clusters import cluster
from shoal.spec.number_formats import FORMATS


class MLP(nn.Module):
    """Two layers, nothing else."""

    def __init__(self, hidden: int, ffn: int, bias: bool = False):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, ffn, bias=bias), nn.Linear(ffn, hidden, bias=bias)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """A user's own: one matrix for queries, one for keys, one for values, softmax written out."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.mix = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = (
            part(x).view(b, s, self.heads, h // self.heads).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores = (q @ k.transpose(2, 3) / (h // self.heads) ** 0.5).softmax(-1)
        return self.mix((scores @ v).transpose(1, 2).reshape(b, s, h))


class LoRA(nn.Module):
    """A frozen layer with a trained one of rank 2 beside it (Hu et al. 2021), and an output that is of inputs alone."""

    def __init__(self, hidden: int, ffn: int):
        super().__init__()
        self.frozen = nn.Linear(hidden, ffn).requires_grad_(False)
        self.down, self.up = nn.Linear(hidden, 2, bias=False), nn.Linear(2, ffn, bias=False)

    def forward(self, x):
        return torch.tanh(self.frozen(x) + self.up(self.down(x))), x.mean(0)


class Odd(nn.Module):
    """What no transformer has: shapes that few meshes divide, a sort, a slice, sums, several outputs, a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 15), nn.Linear(15, 6, bias=False)
        self.scale = nn.Parameter(torch.rand(6, dtype=torch.float64))
        self.norm = nn.LayerNorm(6)
        self.register_buffer("shift", torch.arange(6.0, dtype=torch.float64))

    def forward(self, x):
        y = self.second(torch.relu(self.first(self.norm(x))))
        z = torch.sort(y + x, dim=-1).values * self.scale - self.shift
        return z[:, 1:4].sum(-1), torch.cat([y, z], 1).amax(1).tanh()


def transformer(family: str, layers: int = 1, **change) -> Transformer:
    """A small model of shoal's own, in float64."""
    shape = model_shape("tiny" if family == "llama" else "tiny-gpt")
    small = {"layers": layers, "hidden": 16, "heads": 4, "kv_heads": 2 if family == "llama" else 4, "head_dim": 4,
             "ffn": 24, "vocab": 32, "max_sequence": 8}  # fmt: skip
    return Transformer(shape.model_copy(update=small | change)).double()


def target(name: str, microbatches: int = 1) -> Target:
    """A cluster of the catalog, in bf16, with room for all."""
    return Target(cluster(name), FORMATS["bf16"], microbatches, 80e9)


def builder(graph, name: str, mesh: NamedMesh) -> Builder:
    """Priced on a cluster of the catalog, in bf16."""
    return target(name).builder(graph, mesh)


def shard(build: Builder) -> ShardingPlan:
    """The cheapest plan of a graph on a mesh."""
    problem = build.problem()
    return build_plan(build, problem, solve(problem))


def random_plans(build: Builder, rng: np.random.Generator, count: int = 1) -> list[ShardingPlan]:
    """Plans that random costs make the cheapest of a random third of all choices: no cluster would ask for them."""
    problem, plans = build.problem(), []
    for _ in range(count):
        kept = {id(d.choices[i]) for d in problem.decisions
                for i in (0, *rng.permutation(len(d.choices))[: len(d.choices) // 3])}  # fmt: skip
        some = problem.restricted(lambda choice, kept=kept: id(choice) in kept)
        moved = [replace(d, costs=d.costs + rng.random(len(d.costs)) * 1e-3) for d in some.decisions]
        chosen = solve(replace(some, decisions=moved)).chosen
        plans.append(build_plan(build, some, Solution(chosen, some.cost(chosen))))
    return plans


def beside_one_device(
    plan: ShardingPlan, module: nn.Module, inputs: tuple, forward: Forward | None = None
) -> tuple[list, dict, dict]:
    """The arguments of `compare` for a plan of a full module."""
    forward = forward or export_forward(module, inputs)
    return [single_stage(plan, forward)], *reference(module, inputs, forward, plan.graph)
