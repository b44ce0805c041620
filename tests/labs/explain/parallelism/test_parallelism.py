"""What is where on a rank: the tables agree with the engine's counts and with the papers."""

import re
import xml.etree.ElementTree as ET

import pytest

from shoal.cli.main import main
from shoal.engine.parallel.tensor import TENSOR_PARALLEL
from shoal.labs.explain.parallelism import buckets, tensor, zero
from shoal.labs.explain.parallelism.memory import korthikanti
from shoal.pipeline.schedules import SCHEDULES
from shoal.planning.cost.parameters import StagePart, list_units
from shoal.spec.catalog import model_shape
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS
from tests.labs.explain.explained import explained


@pytest.mark.parametrize("subject", ["zero --dp 4", "buckets", "tensor", "memory", "pipeline"])
def test_pictures(subject, tmp_path, capsys):
    out = explained(capsys, f"{subject} --out {tmp_path / 'picture.svg'}")
    assert "picture.svg" in out
    assert len([e for e in ET.parse(tmp_path / "picture.svg").iter() if e.text and e.text.strip()]) > 5


@pytest.mark.parametrize("subject", ["zero", "tensor", "scaling"])
def test_no_word_is_broken_on_80_columns(subject, monkeypatch, capsys):
    words = []
    for columns in ("200", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["explain", subject]) == 0
        words.append(set(capsys.readouterr().out.split()))
    assert words[0] == words[1]


# ---- ZeRO -----------------------------------------------------------------------------------------------------------


def test_the_papers_stages(capsys):
    out = explained(capsys, "zero --parameters 7.5e9 --dp 64")
    for stage, formula, size, sent in (
        (0, "16 P", "120 GB", "1.00"), (1, "4 P + 12 P/N", "31.4 GB", "1.00"),
        (2, "2 P + 14 P/N", "16.6 GB", "1.00"), (3, "16 P/N", "1.88 GB", "1.50"),
    ):  # fmt: skip
        assert re.search(rf"^{stage} .* {re.escape(formula)} +{size} .* x {sent} ", out, re.M), stage


def test_stages_in_shoal(capsys):
    """18 P without sharding; each stage shards one part more."""
    shape = model_shape("llama-3.2-1b")
    kept = [zero.count_bytes(stage, shape, 8, FORMATS["bf16"]) for stage in zero.STAGES]
    assert kept[0].total == pytest.approx(18 * shape.parameters(), rel=1e-3)
    assert kept[3].total == pytest.approx(16 * shape.parameters() / 8, rel=1e-3)
    for before, after, part in zip(kept[:-1], kept[1:], ("optimizer", "gradients", "parameters"), strict=True):
        assert getattr(after, part) < getattr(before, part) / 2
    out = explained(capsys, "zero --model llama-3.2-1b")
    assert re.search(r"^0 .* 22\.2 GB *\n(.*\n)*0 .* all-reduce *$", out, re.M)


def test_one_rank_sends_nothing(capsys):
    assert "0 B" in explained(capsys, "zero --dp 1")


# ---- buckets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama-3.2-1b", "gpt2-124m", "mixtral-8x7b", "tiny"])
@pytest.mark.parametrize("stage", [0, 3])
def test_every_parameter_lies_in_one_bucket(model, stage):
    shape, layout = model_shape(model), Layout(dp=4, zero=stage)
    found = buckets.list_buckets(shape, layout, 4)
    names = [name for held in found for name in held.names]
    expected = [held.name for unit in list_units(shape, layout, StagePart(range(shape.layers))) for held in unit]
    assert sorted(names) == sorted(expected)
    assert sum(held.bytes for held in found) == pytest.approx(4 * shape.parameters(), rel=1e-2)
    assert all(held.shard * (4 if stage else 1) == held.bytes for held in found)


def test_buckets_have_at_least_their_size(capsys):
    shape = model_shape("gpt2-124m")
    found = buckets.list_buckets(shape, Layout(dp=2, zero=0, bucket_mb=50.0), 4)
    assert all(held.bytes >= 50 * 2**20 for held in found[:-1])
    out = explained(capsys, "buckets --model gpt2-124m --zero 0")
    assert re.search(r"^1 to 12 +28\.4 MB +28\.4 MB +layers\.\* \(16\)", out, re.M) and "14 buckets of at least" in out


# ---- tensor ---------------------------------------------------------------------------------------------------------


def test_splits_of_a_layer(capsys):
    out = explained(capsys, "tensor --tp 8")
    assert re.search(r"attention\.q\.weight +4,096 x 4,096 +columns: outputs +512 x 4,096", out)
    assert re.search(r"mlp\.down\.weight +4,096 x 14,336 +rows: inputs +4,096 x 1,792", out)
    assert re.search(r"f, into a block +identity +all-reduce", out)
    assert re.search(r"^ *8 +18\.1 GB +235 MB +235 MB", out, re.M), "4 s h (t - 1)/t numbers in 16 bits"
    out = explained(capsys, "tensor --tp 8 --sequence-parallel")
    assert re.search(r"g, out of a block +reduce-scatter +all-gather", out)
    assert re.search(r"f, into a block +all-gather +all-gather, reduce-scatter", out)
    assert re.search(r"^ *8 +18\.1 GB +235 MB +352 MB", out, re.M), "half as much again for blocks' inputs"


def test_every_split_layer_has_a_name():
    with_weights = {style.__name__ for style in TENSOR_PARALLEL.values()} - {"GatheredLatents", "VocabularyLoss"}
    assert with_weights == {*tensor.SPLITS}


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_the_formula_of_a_gpt_layer(capsys):
    shape = model_shape("gpt3-175b")
    size, at = 2048 * shape.hidden, Layout(tp=8)
    assert korthikanti(shape, 2048, at, "none") == size * (10 + (24 + 80) / 8)
    both = Layout(tp=8, sequence_parallel=True)
    assert korthikanti(shape, 2048, both, "none") == size * 114 / 8
    assert korthikanti(shape, 2048, both, "selective") == size * 34 / 8
    assert korthikanti(shape, 2048, Layout(micro_batch=2), "full") == 2 * 2 * size
    out = explained(capsys, "memory --model gpt3-6.7b --sequence-length 2048")
    assert re.search(r"^none +956 MB ", out, re.M), "30.6 GB in 32 layers"


def test_memory_of_the_fullest_rank(capsys):
    out = explained(capsys, "memory --model llama-3-8b --tp 8 --zero 0")
    parts = [float(m[1]) for m in re.finditer(r"^\w+ +[\d.]+ .B +([\d.]+) %", out.split("of the device   ")[0], re.M)]
    assert sum(parts[:-1]) == pytest.approx(parts[-1], abs=0.5) and "fits" in out
    assert "does not fit" in explained(capsys, "memory --model llama-3-70b --zero 0")


# ---- pipeline -------------------------------------------------------------------------------------------------------


def test_every_schedule_has_a_row(capsys):
    out = explained(capsys, "pipeline --pp 4 --microbatches 8")
    for name in SCHEDULES:
        assert re.search(rf"^{name}\b", out, re.M), name
    assert re.search(r"^1f1b +33 +27\.3 % +4 +1 +48 +Narayanan et al\. 2021", out, re.M)
    assert re.search(r"^gpipe +33 +27\.3 % +8 +1 ", out, re.M)
    assert out.count("rank 0 ") == 1, "one timeline"


def test_a_schedule_that_sizes_refuse_has_a_reason(capsys):
    out = explained(capsys, "pipeline --pp 3 --microbatches 4")
    assert re.search(r"^dualpipe: ", out, re.M) and re.search(r"^1f1b ", out, re.M)
    assert main(["explain", "pipeline", "--pp", "3", "--schedule", "dualpipe"]) == 2
