"""Stages of a model, each on its own part of the ranks with its own sharding, compute what one device computes."""

import pytest
import torch
from torch import nn

from shoal.engine.models.transformer import initialise
from shoal.labs.autoshard.execute import compare, find_worst, reference
from shoal.planning.auto.capture.forward import export_forward
from shoal.planning.auto.capture.layers import Layers
from shoal.planning.auto.capture.trace import differentiate
from shoal.planning.auto.plan import build_plan
from shoal.planning.auto.search import LAYERS_PER_STAGE, StageSearch, plan_stages
from shoal.planning.auto.stages import AssignedStage
from tests.planning.auto.modules import MLP, target, transformer


def compared(pool, ranks, module, inputs, forward, stages):
    """The largest difference of any output, gradient and new weight of some stages."""
    given, expected = reference(module, inputs, forward, differentiate(forward))
    results = pool.run(compare, ranks, stages, given, expected)
    assert set().union(*results) >= set(expected), "every output and every parameter is in a stage"
    return find_worst(results)[0]


def test_stages_on_parts_of_the_ranks_compute_what_one_device_computes(pool):
    module = transformer("llama", layers=2)
    initialise(module, 0)
    torch.manual_seed(0)
    tokens = torch.randint(0, 32, (4, 8))
    inputs = (tokens, tokens.roll(1, 1))
    forward = export_forward(module, inputs)
    layers = Layers(forward, 3)
    assert len(layers.ends) == 3
    stages = StageSearch(layers, target("4xA100", 4)).place(
        (AssignedStage(0, 1, (1, 1), 0.0), AssignedStage(1, 2, (1, 2), 0.0), AssignedStage(2, 3, (1, 1), 0.0))
    )
    assert compared(pool, 4, module, inputs, forward, stages) < 1e-10


def cut_once(pool, module: nn.Module, at: int) -> tuple[Layers, float]:
    """As many layers as there can be, and the largest difference of two stages, of which the second begins there."""
    torch.manual_seed(0)
    module, inputs = module.double(), (torch.randn(4, 8, dtype=torch.float64),)
    forward = export_forward(module, inputs)
    layers = Layers(forward, 99)
    count = len(layers.ends)
    cut = (AssignedStage(0, at % count, (1, 1), 0.0), AssignedStage(at % count, count, (1, 1), 0.0))
    stages = StageSearch(layers, target("2xA100", 4)).place(cut)
    return layers, compared(pool, 2, module, inputs, forward, stages)


class Gated(nn.Module):
    """A chunk, whose parts are read at several places, of an input whose name is a builtin's."""

    def __init__(self):
        super().__init__()
        self.both, self.mix = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, input):
        gate, up = self.both(input).chunk(2, -1)
        return self.mix(torch.sigmoid(gate) * up).square()


def test_no_cut_is_made_inside_an_operator_with_several_outputs(pool):
    layers, difference = cut_once(pool, Gated(), at=-1)
    assert 1 < len(layers.ends) < len(layers.nodes)
    assert set(differentiate(layers.part(0, 1)).gradients) == {"both.weight", "both.bias"}, "the input has none"
    assert difference < 1e-10


class Cut(nn.Module):
    """Of whose first matrix the second reads without a gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x).detach()) + x.sum()


def test_nothing_flows_back_over_a_cut_that_is_read_without_gradients(pool):
    assert cut_once(pool, Cut(), at=1)[1] < 1e-10


def linears(frozen: range) -> tuple[nn.Module, tuple]:
    """Four matrices, of which some take no gradient."""
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4))).double()
        for number in frozen:
            module[number].requires_grad_(False)
        return module, (torch.empty(1024, 256, dtype=torch.float64),)


@pytest.mark.parametrize("frozen", [range(0), range(2), range(2, 4)], ids=str)
def test_layers_cost_what_their_own_plan_takes(frozen):
    """Whatever was asked before: of the model's input there is no gradient, nor of frozen weights."""
    found = StageSearch(Layers(export_forward(*linears(frozen)), 4), target("2xA100", 4))
    for first, last in ((2, 4), (0, 2), (1, 2), (0, 1), (3, 4), (2, 3)):
        cost = found.cost(first, last, (1, 1), 1) - found.receive_seconds(first, (1, 1))
        plan = build_plan(*found.best(first, last, (1, 1), 1))
        assert cost == pytest.approx(plan.seconds, rel=1e-9)


def test_a_stage_keeps_what_it_was_sent():
    found = StageSearch(Layers(export_forward(*linears(range(0))), 4), target("4xA100", 4))
    tensor = 1024 * 256 * 2  # bytes in bf16
    saved = [build_plan(*found.best(first, last, (1, 1), 1)).saved for first, last in ((0, 1), (1, 2), (1, 3))]
    assert saved == [0, tensor, 2 * tensor], "the module's own input is there for all micro-batches"


def test_no_more_stages_are_looked_for_than_there_are_devices() -> None:
    """And the layers are no finer, each of which takes seconds."""
    forward = export_forward(nn.Sequential(*(MLP(8, 16) for _ in range(4))), (torch.zeros(4, 8),))
    assert len(Layers(forward, 10**6).ends) > 2 * LAYERS_PER_STAGE, "there could be more"
    assert plan_stages(forward, target("2xA100", 4), 10**6).layers == 2 * LAYERS_PER_STAGE
