"""Tables of tensor parallelism: what is refused, and the parts of packed parameters."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shoal
from shoal.base.boxes import Box
from shoal.base.errors import UsageError
from shoal.engine.own.definition import OwnModel
from shoal.engine.own.samples import OwnDataset
from shoal.engine.own.tensor.draws import find_parts, split_draws
from shoal.engine.own.tensor.layers import SplitRanks
from shoal.engine.own.tensor.table import PackedPlacement, apply_table
from shoal.engine.own.trial import try_out
from shoal.training.check import check
from tests.testing.own import plain, zoo
from tests.testing.own.test_equality import config_of


@given(st.data())
def test_parts_of_a_packed_parameter_cover_it_once(data):
    leading, share, columns, tp = (data.draw(st.integers(1, 4)) for _ in range(4))
    full = torch.arange(leading * 2 * share * tp * columns).view(leading, 2 * share * tp, columns)
    seen = torch.zeros_like(full)
    for rank in range(tp):
        box = Box((0, rank * share, 0), (leading, share, columns))
        local = full.view(leading, 2, tp, share, columns)[:, :, rank].flatten()
        placement = PackedPlacement("w", tuple(full.shape), box, (leading, 2 * share, columns))
        cuts = sorted({0, local.numel(), *data.draw(st.lists(st.integers(0, local.numel()), max_size=3))})
        for start, stop in pairwise(cuts):
            for offset, part in placement.boxes(start, stop):
                seen[part.slices] += 1
                values = local[start + offset : start + offset + part.numel]
                assert torch.equal(values.view(part.shape), full[part.slices])
    assert (seen == 1).all()


@pytest.mark.parametrize(("table", "says"), [
    ({"upp": "colwise"}, "'upp', which no layer or parameter of its model fits"),
    ({"": "colwise"}, "'', which no layer or parameter of its model fits"),  # the model is no layer of itself
    ({"up": "columns"}, "has 'columns' for 'up'.\n  Styles are colwise"),
    ({"norm": "colwise"}, "splits 'norm', a LayerNorm"),
    ({"up": "packed_colwise"}, "'packed_colwise' for 'up', which is a module.\n  Name its parameters: up.weight"),
    ({"up.weight": "embedding_rowwise"}, "'embedding_rowwise' for the parameter up.weight"),
    ({"embedding": "rowwise"}, "splits 'embedding', a Embedding"),
    ({"embedding.weight": "rowwise"}, "head.weight and embedding.weight are one parameter"),
    ({"mixed": "colwise"}, "parallel.tp = 2 splits 13 rows of mixed.weight"),
    ({"up": "colwise_kv"}, "has 'colwise_kv' for 'up'"),
    ({"up": "colwise_kv:3"}, "parallel.tp = 2 splits 3 heads of keys or values of up"),
])  # fmt: skip
def test_a_table_that_cannot_be_is_refused(table, says):
    with pytest.raises(UsageError, match=says):
        apply_table(plain.Split(), table, SplitRanks(None, 0, 2))


def test_a_layer_that_is_not_trained_is_refused():
    module = nn.Sequential(nn.Linear(4, 4)).requires_grad_(False)
    with pytest.raises(UsageError, match=r"splits 0.weight, which is not trained"):
        apply_table(module, {"0": "colwise_gather_output"}, SplitRanks(None, 0, 2))


class Layers(nn.Module):
    """A list of layers whose split parts are in them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([plain.Grouped(), plain.Grouped()])


@pytest.mark.parametrize(("module", "table", "says"), [
    (plain.Split, {"up": "colwise", "down": "rowwise"}, "which has no list of layers with a 'rowwise' one"),
    (Layers, {"layers.*.q": "colwise", "layers.*.out": "rowwise"}, "layers.0 holds layers that .* splits, beside"),
    (Layers, {"layers.*": "sequence_parallel", "layers.*.q": "sequence_parallel"}, "'layers.0.q', which is a part of"),
])  # fmt: skip
def test_what_sequence_parallelism_cannot_split_is_refused(module, table, says):
    with pytest.raises(UsageError, match=says):
        apply_table(module(), table, SplitRanks(None, 0, 2, sequence=True))


@pytest.mark.parametrize(("table", "ep", "says"), [
    (None, 2, "parallel.ep with model.module, which has no plan of its own.\n  Give expert_parallel"),
    ({"experts": "moe_tp_experts"}, 2, "expert_parallel has 'moe_tp_experts' for 'experts'.\n  Styles are ep_disp"),
    ({"experts": "ep_dispatch_experts"}, 2, "for 'experts' and names none of its parameters"),
    ({"experts.up": "grouped_gemm"}, 2, "'grouped_gemm' for 'experts.up'.\n  A module of experts is 'ep_dispatch_exp"),
    (plain.routed.expert_parallel, 3, "parallel.ep = 3 splits 4 experts of experts.up"),
])  # fmt: skip
def test_a_table_of_experts_that_cannot_be_is_refused(table, ep, says):
    with pytest.raises(UsageError, match=says):
        apply_table(plain.Routed(), None, SplitRanks(None, 0, 1, expert_ranks=ep), experts=table)


class Dropped(nn.Module):
    """With dropout of a split dim, in another order of memory, and of a full one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.drop(self.up(x)).transpose(0, 1), 0.3).transpose(0, 1)
        return self.drop(self.down(y))


def test_ranks_draw_their_part_of_what_one_device_draws():
    table, layout = {"up": "colwise", "down": "rowwise"}, shoal.Layout(tp=2)
    own = OwnModel(Dropped, lambda model, x: (model(x).sum(), len(x)), torch.ones(4, 3, 4), tensor_parallel=table)
    batch = OwnDataset(own, "train", 0).batch(range(2))
    assert find_parts(own, layout, batch) == {"": [(2, 2), (2, 2), (0, 1)]}
    x, outputs = torch.randn(2, 3, 4), []
    full = own.build(0)
    for rank in range(2):
        ranks, module = SplitRanks(None, rank, 2), own.build(0)
        apply_table(module, table, ranks)
        for name, p in module.named_parameters():
            p.data = full.get_parameter(name).data.chunk(2, 1 if name == "down.weight" else 0)[rank]
        module.down.bias = full.down.bias if rank == 0 else None
        split_draws(module, ranks, find_parts(own, layout, batch))
        torch.manual_seed(1)
        outputs.append(module(x))
    torch.manual_seed(1)
    torch.testing.assert_close(outputs[0] + outputs[1], full(x))


def test_tokens_that_the_ranks_do_not_divide_are_refused():
    config = config_of("wide_llama", {"tp": 2, "sequence_parallel": True})
    shorter = replace(zoo.wide_llama, collate=lambda samples: {key: torch.stack([each[key] for each in samples])[:, 1:]
                                                               for key in samples[0]})  # fmt: skip
    with pytest.raises(UsageError, match=r"splits \[2, 11, 32\] along its tokens, .* over parallel.tp = 2"):
        try_out(shorter, 0, 2, SplitRanks.alone(config.parallel))


def test_rules_for_other_models_in_a_plan_are_left_out():
    model = zoo.wide_llama.build(0)
    assert any("lm_head" in name for name in model.tp_plan)
    model._tp_plan = {**model._tp_plan, "nowhere": "unknown"}
    placements = apply_table(model, None, SplitRanks(None, 1, 2))
    assert placements["model.layers.1.mlp.down_proj.weight"].box == Box((0, 24), (32, 24))
    assert "tp=2" in repr(model.model.layers[0].mlp.gate_proj)


def test_the_shape_that_a_resume_compares_does_not_depend_on_the_ranks():
    assert check(config_of("split", {"tp": 4})) == check(config_of("split", {"dp": 2}))


@pytest.mark.parametrize(("own", "says"), [
    (replace(plain.split, tensor_parallel={"up": "colwise"}), r"tp = 2 fails.*: RuntimeError: .*plain.py:\d+\)"),
    (zoo.wide_llama, r"tp = 4 fails in .*: RuntimeError: shape .* is invalid .*also that of keys and values"),
])  # fmt: skip
def test_parts_that_do_not_fit_together_are_found_before_a_rank_starts(own: OwnModel, says):
    try_out(own, 0, 2)
    with pytest.raises(UsageError, match=f"(?s)its loss.. with layers split over parallel.{says}"):
        try_out(own, 0, 2, SplitRanks(None, 0, 4 if "4" in says else 2))


def test_a_head_of_keys_is_held_by_neighbours_and_their_gradients_are_summed():
    placements = [apply_table(plain.Grouped(), plain.grouped.tensor_parallel, SplitRanks(None, r, 4)) for r in range(4)]
    found = [each["k.weight"] for each in placements]
    assert [each.box for each in found] == [Box((row, 0), (3, 12)) for row in (0, 0, 3, 3)]
    assert {(each.sum_over, each.copies) for each in found} == {(("tp/2",), 2)}
    assert [each.primary for each in found] == [True, False, True, False]
    attention = zoo.qwen3_moe.build(0)
    apply_table(attention, None, SplitRanks(None, 1, 2))
    assert attention.model.layers[0].self_attn.num_key_value_groups == 1  # of the rank's one head of queries
