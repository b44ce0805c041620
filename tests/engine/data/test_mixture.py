"""Mixtures: exact shares, each source in its own order, the same on any layout, from any index."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.engine.data import mixture
from shoal.engine.data.batches import describe_repeats, open_dataset
from shoal.engine.data.mixture import Blend
from shoal.engine.data.order import OverlappingShards
from shoal.engine.models.loss import IGNORE, CrossEntropy
from shoal.spec.config import DataConfig, build_config


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(mixture, "BLOCK", 20)


weights = st.lists(st.floats(1, 4), min_size=1, max_size=5)


changes = st.dictionaries(st.integers(1, 140), st.sampled_from([0.0, 2.0]), max_size=3)


@settings(deadline=None, max_examples=20)
@given(weights=weights, limits=st.lists(st.integers(1, 90), max_size=4), later=st.lists(changes, max_size=4),
       seed=st.integers(0, 2**40), data=st.data())
def test_sources_follow_their_own_order_up_to_their_end(weights, limits, later, seed, data):
    names = [f"s{i}" for i in range(len(weights))]
    ends = dict.fromkeys(names) | dict(zip(names[1:], limits, strict=False))  # the first has none
    schedules = dict(zip(names[1:], later, strict=False))
    blend = Blend(dict(zip(names, weights, strict=True)), ends, seed, schedules)
    sources, samples = blend(range(150))
    for number, name in enumerate(names):
        mine = samples[sources == number]
        assert mine.tolist() == list(range(len(mine)))
        assert ends[name] is None or len(mine) <= ends[name]
        stops = sorted(schedules.get(name, {}).items())
        for (start, weight), (end, _) in pairwise([*stops, (150, 0)]):
            assert weight or number not in sources[start:end]
    index = data.draw(st.integers(0, 149))
    drawn = np.bincount(sources[:index], minlength=len(names))
    assert blend.drawn(index) == dict(zip(names, drawn.tolist(), strict=True))
    again = Blend(dict(zip(names, weights, strict=True)), ends, seed, schedules)  # resumed: reads from any index
    assert [part[0] for part in again([index])] == [sources[index], samples[index]]


@settings(deadline=None, max_examples=15)
@given(weights=weights, seed=st.integers(0, 2**40))
def test_shares_are_exact_in_each_block(weights, seed):
    named = {str(i): weight for i, weight in enumerate(weights)}
    blend = Blend(named, dict.fromkeys(named), seed)
    counts = [np.bincount(blend(range(start, start + 20))[0], minlength=len(weights)) for start in (0, 20, 2000)]
    exact = np.array(weights) / sum(weights) * 20
    for count in counts:
        assert (abs(count - exact) < 1).all() and (count == counts[0]).all()


def test_weights_change_at_their_token(config):
    """A source may begin late, and one may end; validation reads every source by its largest weight."""
    web, code = (config.mixture[name] for name in ("web", "code"))
    changed = {"web": web.model_copy(update={"schedule": ((320, 0.0),)}),
               "code": code.model_copy(update={"weight": 0.0, "schedule": ((310.0, 1.0),)})}
    run = config.model_copy(update={"mixture": changed})
    assert open_dataset(run, seed=3, split="train").blend(range(40))[0].tolist() == [0] * 20 + [1] * 20
    sources = open_dataset(run, seed=3, split="validation").blend(range(20))[0]
    assert np.bincount(sources).tolist() == [13, 7]


def test_a_source_that_ends_gives_its_place_to_the_others():
    blend = Blend({"a": 8, "b": 1, "c": 1}, {"a": 40, "b": None, "c": None}, 0)
    sources, _ = blend(range(400))
    last = np.flatnonzero(sources == 0)[-1]
    assert (sources == 0).sum() == 40 and last < 60
    start = blend._segments[1].start
    after = sources[start : start + 200]
    assert (after == 1).sum() == (after == 2).sum() == 100
    orders = {tuple(Blend({"a": 1, "b": 1}, {"a": None, "b": None}, seed)(range(20))[0]) for seed in range(5)}
    assert len(orders) == 5


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> DataConfig:
    folder = tmp_path_factory.mktemp("corpora")
    for name, word in (("web", "w"), ("code", "c"), ("few", "f")):
        (folder / name).mkdir()
        for i in range(12 if name == "few" else 60):
            (folder / name / f"{i:03}.txt").write_text(f"{word}{i} " * (i % 7 + 3))
    sources = {
        "web": {"paths": [str(folder / "web")], "weight": 2},
        "code": {"paths": [str(folder / "code")]},
        "few": {"paths": [str(folder / "few")], "epochs": 2},
    }
    data = {"mixture": sources, "cache": str(folder / "cache"), "sequence_length": 16, "document_mask": True,
            "validation_fraction": 0.2}
    return build_config({"data": data}).data


@settings(deadline=None, max_examples=8)
@given(step=st.integers(0, 300), dp=st.sampled_from([1, 2, 3, 4, 6]), micro_batch=st.sampled_from([1, 2]))
def test_every_layout_reads_the_same_global_batches(config, step, dp, micro_batch):
    dataset = open_dataset(config, seed=3, split="train")
    expected = dataset.batch(range(step * 24, step * 24 + 24))
    rows = {}
    for replica in range(dp):  # as `EngineState.sample_indices` deals them
        for microbatch in range(24 // (dp * micro_batch)):
            first = step * 24 + (microbatch * dp + replica) * micro_batch
            batch = dataset.batch(range(first, first + micro_batch))
            for row, index in enumerate(batch.samples.tolist()):
                rows[index] = batch.tokens[row], batch.targets[row], batch.documents[row], batch.sources[row]
    for place, index in enumerate(expected.samples.tolist()):
        for part, whole in zip(rows[index], (expected.tokens, expected.targets, expected.documents, expected.sources),
                               strict=True):
            assert torch.equal(part, whole[place])


def test_a_sequence_is_that_of_its_source(config):
    dataset = open_dataset(config, seed=3, split="train")
    apart = {name: open_dataset(source, seed=3, split="train") for name, source in config.sources().items()}
    batch = dataset.batch(range(200))
    sources, samples = dataset.blend(range(200))
    assert batch.sources.tolist() == sources.tolist() and set(sources) == {0, 1, 2}
    for row, (source, sample) in enumerate(zip(sources, samples, strict=True)):
        one = [*apart.values()][source].batch([sample])
        for part in ("tokens", "targets", "documents"):
            assert torch.equal(getattr(one, part)[0], getattr(batch, part)[row])
        assert f"{'wcf'[source]}" in bytes(i for i in batch.tokens[row] if i < 256).decode()
    assert dataset.blend.drawn(10**6)["few"] == 2 * apart["few"].samples
    assert dataset.samples == sum(each.samples for each in apart.values())
    assert batch.to(torch.device("meta")).sources.device.type == "meta"
    positions = OverlappingShards(2, 1, dataset.samples, 0.5)(np.arange(8))
    assert dataset.batch(positions.tolist()).tokens.shape == (8, 16)


def test_text_that_is_read_many_times_is_named(config):
    dataset = open_dataset(config, seed=3, split="train")
    sizes = dict(zip(dataset.blend.names, (each.samples for each in dataset.datasets), strict=True))
    total = 20 * max(sizes.values())
    drawn = dataset.blend.drawn(total)
    said = [*describe_repeats(dataset, total)]
    assert said == [f"the run reads {name} {drawn[name] / size:,.1f} times" for name, size in sizes.items()
                    if drawn[name] > 4 * size] and said
    [(_, one), *_] = config.sources().items()
    alone = open_dataset(one, seed=3, split="train")
    assert [*describe_repeats(alone, 4 * alone.samples)] == []
    assert [*describe_repeats(alone, 5 * alone.samples)] == ["the run reads its text 5.0 times"]


def test_weights_and_epochs_are_part_of_the_fingerprint(config):
    prints = {open_dataset(config, seed=0, split="train").fingerprint}
    for update in ({"weight": 3.0}, {"epochs": 1.0}, {"schedule": ((99.0, 1.0),)}):
        changed = config.mixture | {"web": config.mixture["web"].model_copy(update=update)}
        prints.add(open_dataset(config.model_copy(update={"mixture": changed}), seed=0, split="train").fingerprint)
    assert len(prints) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_of_sequences_add_up(dtype):
    logits = torch.randn(4, 7, 11).to(dtype)
    targets = torch.randint(0, 11, (4, 7))
    targets[1, 2:] = IGNORE
    loss = CrossEntropy()
    alone = loss(logits.clone(), targets)
    assert loss.rows is None
    loss.keep_rows = True
    total = loss(logits.clone(), targets)
    assert torch.equal(total, alone) and torch.allclose(loss.rows.sum(), total.double())
    for row in range(4):
        own = CrossEntropy()(logits[row : row + 1].clone(), targets[row : row + 1])
        assert torch.allclose(loss.rows[row], own.double())


@pytest.mark.parametrize(("values", "message"), [
    ({"mixture": {"a": {"paths": ["x"], "weight": -1.0}}}, "data.mixture.a.weight = -1.0"),
    ({"mixture": {"a": {"paths": ["x"], "schedule": [[0, 1]]}}}, "data.mixture.a.schedule = 0"),
    ({"mixture": {"a/b": {"paths": ["x"]}}}, "data.mixture"),
    ({"mixture": {"a": {"path": ["x"]}}}, "no key 'data.mixture.a.path'; did you mean 'paths'"),
])
def test_a_bad_mixture_is_refused(values, message):
    with pytest.raises(UsageError, match=message):
        build_config({"data": values})


@pytest.mark.parametrize(("words", "message"), [
    (["--data.mixture", "a", "README.md", "--data.paths", "x"],
     "data.paths = ('x',) with a data.mixture, which does not read it.\n"
     "  Give it to a source of the mixture (data.mixture.a), or leave data.paths out."),
    (["--data.mixture", "a", "none/"], "data.paths: 'none/': no such file"),
    (["--data.mixture", "a", "none/:0.5"], "data.paths: 'none/': no such file"),
    (["--data.mixture", "a", "README.md:0"], "data.mixture.a.weight = 0"),
    (["--data.mixture", "a=README.md:1"], "or only NAME PATH or NAME PATH:WEIGHT for each"),
])
def test_a_mixture_on_the_command_line(words, message, capsys):
    assert main(["data", "inspect", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_path_may_end_with_its_weight():
    sources = {"web": "a/b:0.7", "code": "s3://c/d.txt:2", "books": "e:f"}
    found = build_config({"data": {"mixture": sources}})
    assert {name: (*source.paths, source.weight) for name, source in found.data.mixture.items()} == {
        "web": ("a/b", 0.7), "code": ("s3://c/d.txt", 2.0), "books": ("e:f", 1.0)
    }


def test_a_table_of_the_file_stays_when_the_command_line_sets_others(config, tmp_path, capsys):
    folder = config.cache.parent
    (tmp_path / "run.toml").write_text(
        f'[data.mixture.web]\npaths = ["{folder}/web"]\nweight = 3\n[data.mixture.code]\npaths = ["{folder}/code"]\n'
    )
    words = ["--data.cache", str(config.cache), "--data.sequence-length", "16", "--data.validation-fraction", "0.2"]
    assert main(["data", "inspect", str(tmp_path / "run.toml"), *words, "--data.no-document-mask"]) == 0
    shown = capsys.readouterr().out
    assert "\nweb train " in shown and "\ncode validation " in shown


def test_a_weight_too_small_for_a_block_is_named():
    with pytest.raises(UsageError, match="from sequence 3 on no source is left"):
        Blend({"a": 1}, {"a": 3}, 0)
    with pytest.raises(UsageError, match=r"data\.mixture\.b\.weight = 0, without a later one"):
        Blend({"a": 1, "b": 0}, {"a": None, "b": None}, 0)
    with pytest.raises(UsageError, match="from sequence 7 on no source is left"):
        Blend({"a": 1}, {"a": None}, 0, {"a": {7: 0.0}})
    with pytest.raises(UsageError, match=r"data\.mixture\.b\.weight = 0\.01 is less than 1 / 20"):
        Blend({"a": 1, "b": 0.01}, {"a": None, "b": None}, 0)
