"""Histograms of a step are those of one device, on any layout, and reach the report's page."""

import math

import pytest
import torch
from torch import nn

from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.engine.models.transformer import Transformer
from shoal.engine.precision.histogram import BINS, PER_OCTAVE, find_bin
from shoal.pipeline.from_layout import check_run
from shoal.spec.catalog import model_shape
from shoal.spec.config import RunConfig, build_config
from shoal.training.records.histogram_recorder import Histograms
from shoal.training.records.histograms import KINDS, read_histograms
from shoal.training.step.optimizer_step import NonFinite
from tests.engine.parallel.counting import engine_of
from tests.testing.verify.runs import small_run
from tests.trainings.runs import small_config, train_in

LAYOUTS = [
    {"dp": 2, "zero": 3, "tp": 2, "recompute": "full"},
    {"pp": 2, "tp": 2, "sequence_parallel": True, "schedule": "zb-h1"},
    {"tp": 4, "tp_x": 2},
    {"tp": 4, "sequence_parallel": True, "tp_overlap": True},  # two ranks for each head of keys, tokens of their own
    {"cp": 2, "tp": 2, "dp": 2, "zero": 2, "zero_shard": 1},
]
EXPERTS = {"experts": {"count": 4, "per_token": 2, "ffn": 8, "first": 1}}


def recorded(config: RunConfig, folder):
    engine = engine_of(config)
    histograms = Histograms(engine, 1, folder)
    with histograms.recording(0):
        engine.step(0)


def histograms_of(pool, parallel, folder, model=None):
    folder.mkdir()
    run = small_run(parallel, {"tied": True, "layers": 2, **(model or {})}, precision="fp64-fp16", global_batch=8)
    pool.run(recorded, run.parallel.world_size, run, folder)
    step, found = read_histograms(folder)
    assert step == 1
    return {(h.kind, h.name): h.counts for h in found}


def test_any_layout_counts_what_one_device_counts(pool, tmp_path):
    one = histograms_of(pool, {}, tmp_path / "one")
    assert {kind for kind, _ in one} == set(KINDS)
    with torch.device("meta"):
        model = Transformer(small_run({}).model.shape(vocab=259, sequence_length=8))
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for kind in KINDS[2:]:
        assert {name for k, name in one if k == kind} == linear
    assert sum(one["weights", "embed.token.weight"]) == sum(one["gradients", "embed.token.weight"]) == 259 * 16
    assert sum(one["activations", "layers.1.mlp.down"]) == 8 * 8 * 12
    assert sum(one["output gradients", "layers.1.mlp.down"]) == 8 * 8 * 16
    for i, parallel in enumerate(LAYOUTS):
        compare(one, histograms_of(pool, parallel, tmp_path / str(i)), parallel)


def test_so_do_ranks_with_experts(pool, tmp_path):
    """Of these, weights and gradients."""
    one = histograms_of(pool, {}, tmp_path / "one", EXPERTS)
    assert sum(one["weights", "layers.1.mlp.experts.up"]) == sum(one["gradients", "layers.1.mlp.experts.up"]) == 512
    assert not any("experts" in name or "router" in name for kind, name in one if kind in KINDS[2:])
    parallel = {"dp": 4, "zero": 2, "ep": 2}
    compare(one, histograms_of(pool, parallel, tmp_path / "ep", EXPERTS), parallel)


def test_so_do_ranks_that_compute_latents(pool, tmp_path):
    model = {"heads": 8, "kv_heads": 8, "ffn": 16, "latent": {"key_value_rank": 6, "rotary_dim": 4, "query_rank": 5}}
    one = histograms_of(pool, {}, tmp_path / "one", model)
    assert sum(one["output gradients", "layers.0.attention.kv_down"]) == 8 * 8 * 10
    for i, (ranks, sequence_parallel) in enumerate(((8, False), (2, True))):  # of 8 ranks the last holds no token id
        parallel = {"tp": ranks, "sequence_parallel": sequence_parallel}
        compare(one, histograms_of(pool, parallel, tmp_path / str(i), model), parallel)


def compare(one, other, parallel):
    assert other.keys() == one.keys()
    for key, counts in one.items():
        assert sum(other[key]) == sum(counts), (parallel, key)
        # Some gradients are 0 in exact arithmetic, and here rounding alone, far below all others.
        seen = slice(find_bin(2.0**-45), None)
        moved = sum(abs(a - b) for a, b in zip(counts[seen], other[key][seen], strict=True))
        # 1e-16 takes a number over a border now and then
        assert moved <= 2 + 0.002 * sum(counts), (parallel, key)


def spoilt(config: RunConfig, folder) -> bool:
    """Whether a recorded step whose activations are not finite on the last rank was not made."""
    engine = engine_of(config)
    if engine.mesh.rank == config.parallel.world_size - 1:
        norm = engine.stages[-1].module.norm
        norm.register_forward_hook(lambda module, args, output: output * math.inf)
    histograms = Histograms(engine, 1, folder)
    try:
        with histograms.recording(0):
            engine.step(0)
    except NonFinite:
        return engine.observe is None
    return False


def test_the_step_that_is_not_finite_is_recorded(pool, tmp_path):
    config = small_run({"pp": 2, "dp": 2}, precision="fp32")
    assert all(pool.run(spoilt, 4, config, tmp_path))
    step, found = read_histograms(tmp_path)
    beyond = {h.name for h in found if h.kind == "activations" and sum(h.counts[-PER_OCTAVE:])}
    assert step == 1 and beyond == {"head"}
    assert all(any(sum(h.counts[-PER_OCTAVE:]) for h in found if h.kind == kind) for kind in ("gradients", KINDS[3]))


def test_a_run_records_and_the_page_shows_them(pool, corpus, tmp_path, capsys):
    config = small_config(corpus, train={"steps": 5, "validate_every": 0}, metrics={"histograms": 3},
                          checkpoint={"every": 0})
    folder = train_in(pool, config, tmp_path / "run")
    assert sorted(p.name for p in (folder / "histograms").iterdir()) == ["step-00000001.json", "step-00000004.json"]
    step, found = read_histograms(folder)
    assert step == 4 and all(len(h.counts) == BINS and sum(h.counts) for h in found)
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "Values of the tensors, step 4" in page
    assert all(f"<h3>{kind}</h3>" in page for kind in KINDS) and "layers.1.attention.q" in page
    for damage in ("{", "[]", '{"step": 4}', '{"step": 4, "tensors": [{"first": 0}]}'):
        (folder / "histograms" / "step-00000004.json").write_text(damage)
        assert main(["report", str(folder)]) == 2
        assert "step-00000004.json is no" in capsys.readouterr().err


@pytest.mark.parametrize(("sections", "said"), [
    ({"train": {"compile": True}}, "train.compile = true"),
    ({"parallel": {"dp": 2, "sync": "diloco"}}, "its own gradients"),
    ({"parallel": {"pp": 2, "schedule": "pipedream"}, "optimizer": {"clip_norm": 0}}, "several gradients"),
])
def test_what_cannot_be_seen_is_refused(sections, said):
    config = build_config({"metrics": {"histograms": 1}, **sections})
    with pytest.raises(UsageError, match=said):
        check_run(config, model_shape("tiny"))


@pytest.mark.parametrize("rule", ["sophia-g", "sophia-h"])
def test_passes_that_estimate_the_hessian_are_none_of_the_step(rule, pool, tmp_path):
    made = []
    for name in ("adamw", rule):
        folder, run = tmp_path / name, small_run({}, precision="fp64", global_batch=8)
        folder.mkdir()
        optimizer = run.optimizer.model_copy(update={"name": name})
        pool.run(recorded, 1, run.model_copy(update={"optimizer": optimizer}), folder)
        made.append({(h.kind, h.name): h.counts for h in read_histograms(folder)[1]})
    assert made[0] == made[1]
