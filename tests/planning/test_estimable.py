"""What is planned or estimated is what `shoal train` takes, and nothing is priced as if it were something else."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.engine.optim.from_torch import TORCH
from shoal.planning.estimate import Estimate
from shoal.planning.full_training import train_fully
from shoal.planning.run import EstimatedRun
from shoal.planning.search.planner import LayoutPlanner
from shoal.planning.search.search import search
from shoal.planning.search.space import LayoutSpace, fits, meshes
from shoal.report.planning.estimate_lines import estimate_facts
from shoal.report.planning.tables import run_toml
from shoal.spec.catalog import model_shape, tables
from shoal.spec.catalog.clusters import cluster
from shoal.spec.config import build_config, load_config
from shoal.spec.layout import Layout
from shoal.spec.optimizers import ELEMENTWISE
from shoal.training.check import check

OWN = """
[models.mine]
family = "llama"
layers = 2
hidden = 64
heads = 4
kv_heads = 2
ffn = 128
vocab = 300
max_sequence = 128
tied = true
rope_theta = 77.0
source = "mine"
[models.mine.experts]
count = 4
per_token = 2
ffn = 32
"""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--model olmoe-1b-7b --precision fp8", "train.precision = 'fp8' with a model of experts"),
        ("--model llama-3.2-1b --optimizer sophia-h", "optimizer.name = 'sophia-h' with train.precision = 'bf16'"),
        ("--model olmoe-1b-7b --optimizer sophia-g", "optimizer.name = 'sophia-g' with a model of experts"),
        ("--model llama-3.2-1b --precision bf16-all --optimizer muon", "with optimizer.name = 'muon'"),
        ("--model llama-3.2-1b --precision fp8 --cluster 8xV100", "no fp8 peak"),
    ],
)
def test_what_no_layout_makes_a_run_is_refused(words: str, says: str, capsys: pytest.CaptureFixture) -> None:
    """By the estimate too, but for what it has no option for."""
    for command in ("plan", "estimate"):
        assert main([command, *words.split()]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(("precision", "optimizer", "model"), [
    ("fp8", "adamw", "llama-3.2-1b"), ("mxfp8", "adamw", "llama-3.2-1b"), ("bf16-all", "sgd", "tiny"),
])  # fmt: skip
def test_every_mesh_that_is_searched_is_one_that_train_takes(precision: str, optimizer: str, model: str) -> None:
    shape, sizes = model_shape(model), {"data": {"sequence_length": 8192}}
    run = EstimatedRun(shape, Layout(), cluster("16xB200"), 8192, 16, precision, optimizer)
    train = {"global_batch": 16, "precision": precision}
    found = list(meshes(run, LayoutSpace()))
    for degrees in found:
        parallel = {name: value for name, value in degrees.items() if value is not None}
        check(build_config({"model": {"name": model, "vocab": shape.vocab}, "parallel": parallel, **sizes, "train":
        train,
                     "optimizer": {"name": optimizer}}), ranks=16)  # fmt: skip
    if precision == "fp8":
        assert {d["tp"] for d in found} == {1, 2, 4, 8} and {d["cp"] for d in found} == {1}
        assert not fits(run, Layout(tp=16)) and fits(replace(run, precision="bf16"), Layout(tp=16))


def test_a_model_of_ones_own_is_written_out(tmp_path: Path) -> None:
    own, out = tmp_path / "own.toml", tmp_path / "run.toml"
    own.write_text(OWN)
    words = "--model mine --cluster 2xH100 --sequence-length 128 --global-batch 8 --fix recompute=none,micro-batch=1"
    try:
        assert main(["plan", *words.split(), "--catalog", str(own), "--toml", str(out)]) == 0
        shape = model_shape("mine")
        tables.forget()
        config = load_config(out)
        made = config.model.shape(vocab=257, sequence_length=128)
        assert made == shape and shape.rope_theta == 77.0
        check(config, ranks=2)
    finally:
        tables.forget()


def test_a_model_of_the_catalog_is_named() -> None:
    planner = LayoutPlanner("llama-3.2-1b", "2xH100", global_batch=8)
    section = tomllib.loads(run_toml(planner.model, planner.run, Layout(dp=2)))["model"]
    assert section == {"name": "llama-3.2-1b", "vocab": 128256}


def test_products_in_8_bits_take_their_own_time() -> None:
    """Their own peak, and what large ones attain of it: the layers' alone, not attention's or the head's."""
    wide = EstimatedRun(model_shape("llama-3-70b"), Layout(tp=8, micro_batch=4), cluster("8xH100"), 8192, 4)
    plain, eight = Estimate(wide), Estimate(replace(wide, precision="fp8"))
    assert eight.peak == pytest.approx(2 * plain.peak, rel=1e-3)
    ratio = plain.layer().products / eight.layer().products
    constants = plain.calibration.tables
    attained = float(constants["product_fp8"][2]) * eight.peak / (float(constants["product"][2]) * plain.peak)
    assert ratio == pytest.approx(attained, rel=0.02) and ratio > 1.5
    assert eight.layer().attention == plain.layer().attention and eight.layer().head == plain.layer().head
    assert eight.step_seconds < plain.step_seconds and eight.mfu < plain.mfu
    blocks = Estimate(replace(wide, precision="mxfp8"))
    assert (blocks.layer().products, blocks.peak) == (plain.layer().products, plain.peak), "multiplied in bf16"
    assert [value for name, value in estimate_facts(blocks, train_fully(blocks.run, 1.0)) if name == "products"] == [
        "in 16 bits: h100-sxm does not multiply mxfp8, and emulating it takes longer than this"]
    assert blocks.stages[0].adding > 2 * plain.stages[0].adding, "no product in 8 bits adds its gradient to the sum"
    for kind in ("8xB200", "8xGB300"):
        newer = [Estimate(replace(wide, cluster=cluster(kind), precision=name)) for name in ("fp8", "mxfp8")]
        assert newer[0].peak == newer[1].peak == 2 * newer[0].run.cluster.accelerator.dense_flops("bf16"), "of blocks"
        four = Estimate(replace(wide, cluster=cluster(kind), precision="nvfp4"))
        assert four.peak >= 2 * newer[0].peak, "of 4 bits"
        assert four.fullest.activations < newer[1].fullest.activations


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("estimate --parallel.dp 8 --parallel.sync diloco", "parallel.sync = diloco: what replicas exchange"),
        ("estimate --parallel.pp 8 --parallel.schedule terapipe", "parallel.schedule = terapipe: what a slice"),
        ("simulate --schedule terapipe --pp 4 --microbatches 4 --cluster 4xH100", "schedule = terapipe: what a slice"),
    ],
)
def test_what_has_no_formula_is_refused(words: str, says: str, capsys: pytest.CaptureFixture) -> None:
    assert main(words.split()) == 2
    assert says in capsys.readouterr().err


def test_rules_of_every_element_are_torchs_and_two_more() -> None:
    assert set(ELEMENTWISE) == {*TORCH, "radam", "sage"}


def test_a_plan_in_8_bits_is_a_run() -> None:
    run = EstimatedRun(model_shape("llama-3.2-1b"), Layout(), cluster("8xH100"), 2048, 8, "fp8")
    best = search(run, LayoutSpace(("1f1b",), uneven=False), diverse=False).best[0]
    try:
        check(build_config(tomllib.loads(run_toml("llama-3.2-1b", run, best.layout))), ranks=8)
    except UsageError as error:
        pytest.fail(str(error))
