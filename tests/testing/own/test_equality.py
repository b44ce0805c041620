"""Layouts of modules that shoal does not know compute what plain PyTorch computes on one device."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.base.errors import UsageError
from shoal.engine.own.definition import OwnModel
from shoal.spec.config import RunConfig
from shoal.testing.verify.own_model import compare_own_model
from shoal.training.check import check
from tests.testing.own import plain, zoo  # before ranks are forked, which load them by their files

PLAIN, ZOO = Path(plain.__file__), Path(zoo.__file__)


def config_of(name: str, layout: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    file = PLAIN if hasattr(plain, name) else ZOO
    return RunConfig.model_validate({
        "model": {"name": name, "module": f"{file}:{name}"},
        "parallel": {"micro_batch": 2} | layout, "train": {"global_batch": 8},
    } | sections)  # fmt: skip


@pytest.mark.parametrize(("name", "layout", "sections"), [
    ("llama", {"dp": 2, "zero": 3}, {}),
    ("gpt2", {"dp": 2, "zero": 3, "reshard_after_forward": False}, {}),  # with dropout
    ("bert", {"dp": 2, "zero": 2}, {"optimizer": {"name": "muon"}}),
    ("t5", {"dp": 2, "zero": 3, "prefetch": 0}, {"optimizer": {"name": "adafactor"}}),
    ("vit", {"dp": 2}, {"optimizer": {"name": "sgd", "clip_norm": 0.1}}),
    ("unet", {"dp": 4, "zero": 2, "zero_shard": 2, "offload": "optimizer"}, {"optimizer": {"name": "adafactor"}}),
    ("lstm", {"dp": 4, "zero": 3, "zero_shard": 2}, {}),
    ("wide_qwen3_moe", {"tp": 2, "zero": 1}, {}),
    ("llama", {"tp": 2, "zero": 2}, {}),  # with one head of keys and values
    ("grouped", {"tp": 4}, {"optimizer": {"name": "muon"}}),
    ("split", {"tp": 4}, {"optimizer": {"name": "muon"}}),
    ("split_bert", {"tp": 2, "zero": 1}, {"optimizer": {"name": "muon"}}),
    ("split_bert", {"tp": 2, "pp": 2, "sequence_parallel": True, "recompute": "full"}, {}),
    ("wide_qwen3_moe", {"dp": 2, "tp": 2, "ep": 4, "etp": 1, "zero": 3, "sequence_parallel": True}, {}),
    ("wide_qwen3_moe", {"pp": 2, "dp": 2, "ep": 2}, {"optimizer": {"name": "muon"}}),
    ("routed", {"dp": 4, "ep": 2, "zero": 2}, {}),
    ("dit", {"dp": 2, "tp": 2, "sequence_parallel": True, "zero": 3, "recompute": "full"}, {}),
    ("nadam", {"dp": 2, "zero": 2}, {}),
    ("tower", {"pp": 2, "dp": 2, "zero": 2, "schedule": "interleaved-1f1b", "virtual_stages": 2}, {}),
    ("factors", {"dp": 2}, {}),
    ("gpt2", {"dp": 2, "zero": 3, "recompute": "full"}, {}),
    ("tower", {"pp": 2, "recompute": "full", "schedule": "zb-v"}, {}),  # with batch norms and dropout
    ("gpt2", {"pp": 2, "schedule": "zb-h1"}, {}),
    ("late_tower", {"pp": 4, "schedule": "pipedream"}, {"optimizer": {"clip_norm": 0}}),
    ("llama", {"pp": 2, "dp": 2, "zero": 3, "schedule": "pipedream-2bw", "micro_batch": 1},
     {"optimizer": {"clip_norm": 0}}),
    ("t5", {"pp": 4, "recompute": "full"}, {}),  # 3 stages share the embedding
    ("deep_unet", {"pp": 2, "schedule": "zb-v", "dp": 2, "zero": 3}, {}),
])  # fmt: skip
def test_gradients_weights_and_buffers_are_those_of_one_device(name, layout, sections, pool):
    config = config_of(name, layout, **sections)
    check(config)
    verdict = compare_own_model(pool, config, steps=2)
    assert not verdict.findings, verdict.findings[0].text
    assert 0 < verdict.worst_gradient < 1e-9


@st.composite
def drawn_configs(draw: st.DrawFn) -> RunConfig:
    """A module on up to four ranks, with any kind of data parallelism beside its table or its pipeline."""

    def choose(*options: Any) -> Any:
        return draw(st.sampled_from(options))

    name = choose("bert", "dit", "grouped", "lstm", "odd", "routed", "split", "tower", "unet", "vit", "wide_llama",
                  "wide_qwen3_moe")
    tp = choose(1, 2) if name in ("dit", "grouped", "split", "wide_llama", "wide_qwen3_moe") else 1
    tp = 4 if name == "grouped" and tp == 2 else tp  # more ranks than heads of keys and values
    pp = choose(1, 2) if name in ("tower", "wide_llama") else 1
    dp = choose(*(dp for dp in (1, 2, 4) if dp * tp * pp in (2, 4)))
    layout = {
        "dp": dp, "tp": tp, "pp": pp, "zero": choose(0, 1, 2, 3), "overlap": choose(False, True),
        "bucket_mb": choose(25.0, 0.01), "micro_batch": choose(*(n for n in (2, 4) if 8 % (n * dp) == 0)),
    }  # fmt: skip
    if tp > 1 and name in ("dit", "wide_llama", "wide_qwen3_moe"):
        layout["sequence_parallel"] = choose(False, True)
    if name in ("routed", "wide_qwen3_moe"):
        layout |= {"ep": choose(*(ep for ep in (1, 2, 4) if dp * tp % ep == 0)), "etp": 1}
    if dp == 4 and layout["zero"] > 1:
        layout["zero_shard"] = choose(None, 2)
    if layout["zero"] == 3:
        layout |= {"prefetch": choose(0, 1, 2), "reshard_after_forward": choose(False, True)}
    if pp > 1:
        layout["schedule"] = choose("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
    optimizer = {"name": choose("adamw", "sgd", "momentum", "muon"), "clip_norm": choose(0.0, 0.1)}
    return config_of(name, layout, optimizer=optimizer)


@settings(max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate])
@given(config=drawn_configs())
def test_drawn_layouts_compute_what_one_device_does(pool, config):
    try:
        check(config)
    except UsageError:
        assume(False)
    verdict = compare_own_model(pool, config, steps=2)
    assert not verdict.findings, verdict.findings[0].text


def by_rank(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A loss that every rank weighs as it likes."""
    loss, terms = plain.words(model, batch)
    return loss * (1 + dist.get_rank() if dist.is_initialized() else 1), terms


wrong = OwnModel(plain.Recurrent, by_rank, plain.Tokens)


def test_a_loss_that_depends_on_the_rank_is_found(pool):
    config = config_of("wrong", {"dp": 2})
    named = config.model.model_copy(update={"module": f"{__file__}:wrong"})
    verdict = compare_own_model(pool, config.model_copy(update={"model": named}), steps=1)
    assert [finding.text[: finding.text.find(" ", 10)] for finding in verdict.findings[:2]] == [
        "step 0, loss:", "step 0, gradient"]


def table_without(*names: str) -> OwnModel:
    table = plain.split.tensor_parallel or {}
    return replace(plain.split, tensor_parallel={name: table[name] for name in table if name not in names})


class Halves(nn.Module):
    """A layer of two parts, whose second needs a sum over the ranks that its table forgets."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.head = nn.Embedding(64, 8), nn.Linear(8, 16), nn.Linear(8, 64)
        self.down = nn.Parameter(torch.randn(8, 16) / 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(F.linear(self.up(self.embedding(ids)), self.down))


no_norm = table_without("norm")
no_sum = OwnModel(Halves, plain.words, plain.Tokens, tensor_parallel={"up": "colwise", "down": "rowwise"})


@pytest.mark.parametrize(("name", "says"), [
    ("no_norm", r"step 0, gradient of norm.weight: .* Each rank of tp .* 'replicated_with_grad_allreduce'"),
    ("no_sum", r"step 0, loss: .* A sum over the ranks of tp may be missing in tensor_parallel"),
])  # fmt: skip
def test_a_wrong_table_is_found_and_said_in_one_sentence(name, says, pool):
    config = config_of(name, {"tp": 2})
    named = config.model.model_copy(update={"module": f"{__file__}:{name}"})
    verdict = compare_own_model(pool, config.model_copy(update={"model": named}), steps=1)
    assert re.search(says, verdict.findings[0].text), verdict.findings[0].text


@pytest.mark.parametrize(("section", "field", "value", "says"), [
    ("parallel", "pp", 2, "parallel.pp = 2 with model.module, whose layers shoal does not know"),
    ("parallel", "tp", 2, "parallel.tp with model.module, which has no plan of its own"),
    ("parallel", "ep", 2, "parallel.ep with model.module, which has no plan of its own"),
    ("parallel", "etp", 2, "parallel.etp = 2 with model.module, whose experts are not split"),
    ("parallel", "recompute", "full", "parallel.recompute = 'full' with model.module"),
    ("train", "precision", "fp8", "train.precision = 'fp8' with model.module"),
    ("train", "compile", True, "train.compile = True with model.module"),
    ("optimizer", "name", "sophia-g", "optimizer.name = 'sophia-g' with model.module"),
    ("data", "validation", {"x": "y.txt"}, "data.validation with model.module, whose OwnModel has its own samples"),
    ("model", "layers", 3, "model.module gives the full model"),
    ("model", "module", f"{PLAIN}:nothing", "has no 'nothing'"),
    ("model", "module", f"{PLAIN}:Tokens", "is type, not a shoal.OwnModel"),
    ("model", "module", "nowhere.py:own", "there is no Python file"),
    ("model", "module", "nowhere.pkl", "nowhere.pkl cannot be read: No such file or directory"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_a_rank_starts(section, field, value, says):
    config = config_of("lstm", {})
    changed = getattr(config, section).model_copy(update={field: value})
    with pytest.raises(UsageError, match=says):
        check(config.model_copy(update={section: changed}))


@pytest.mark.parametrize(("name", "layout", "sections", "says"), [
    ("factors", {"dp": 2, "zero": 1}, {}, "its optimizer updates a part of a parameter in another way"),
    ("counting", {}, {}, "the steps of its optimizer change updates of its groups, which checkpoints do not store"),
    ("nadam", {}, {"optimizer": {"name": "muon"}}, "optimizer.name = 'muon' with an OwnModel that has make_optimizer"),
    ("nadam", {}, {"train": {"precision": "bf16-all"}}, "train.precision = 'bf16-all' with make_optimizer"),
])  # fmt: skip
def test_what_an_optimizer_of_ones_own_cannot_do_is_refused(name, layout, sections, says):
    with pytest.raises(UsageError, match=says):
        check(config_of(name, layout, **sections))


def test_an_unknown_block_is_refused():
    with pytest.raises(UsageError, match=r"there is no block 'layers.9' in its model"):
        OwnModel(plain.Recurrent, plain.words, plain.Tokens, blocks=("layers.9",)).build_empty()
