"""Stages of a model, each on its own part of the ranks with its own sharding, compute what one device computes."""

import torch

from shoal.catalog.clusters import cluster
from shoal.models.transformer import initialise
from shoal.plan.auto.execute import reference, worst_of
from shoal.plan.auto.forward import forward_of
from shoal.plan.auto.layers import Layers
from shoal.plan.auto.pipelined import Pipelined, compare_stages
from shoal.plan.auto.problem import GIVEN, UPDATE
from shoal.plan.auto.stages import Stage
from shoal.plan.auto.trace import graph_of
from tests.plan.auto.modules import BF16, transformer


def test_stages_on_parts_of_the_ranks_compute_what_one_device_computes(pool):
    module = transformer("llama", layers=2)
    initialise(module, 0)
    torch.manual_seed(0)
    tokens = torch.randint(0, 32, (4, 8))
    inputs = (tokens, tokens.roll(1, 1))
    forward = forward_of(module, inputs)
    layers = Layers(forward, 3)
    assert len(layers.ends) == 3
    joint = Pipelined(layers, cluster("4xA100"), "bf16", 2, BF16, 4, 80e9)
    stages = joint.planned((Stage(0, 1, (1, 1), 0.0), Stage(1, 2, (1, 2), 0.0), Stage(2, 3, (1, 1), 0.0)))
    graph = graph_of(module, inputs)
    given, expected = reference(module, inputs, graph)
    outputs = {node.name: expected[GIVEN + op] for node, op in zip(forward.outputs, graph.outputs, strict=True)}
    gradients = {name: x for name, x in expected.items() if name.startswith(UPDATE)}
    results = pool.run(compare_stages, 4, stages, given, outputs, gradients)
    seen = set().union(*results)
    assert seen == set(outputs) | set(gradients), "every parameter is in a stage"
    assert worst_of(results)[0] < 1e-10
