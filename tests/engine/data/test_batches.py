import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.cli.run.data import InspectOptions, inspect
from shoal.engine.data.batches import SyntheticDataset, open_dataset
from shoal.engine.data.prepare import describe_data, prepare, train_tokenizer
from shoal.engine.data.shards import open_shards
from shoal.engine.data.token_stream import TokenStream
from shoal.engine.data.tokenizer import BytesTokenizer
from shoal.engine.models.loss import IGNORE
from shoal.spec.config import DataConfig, RunConfig

END = BytesTokenizer.end_of_document


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> DataConfig:
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(200):
        (folder / f"{i:03}.txt").write_text(f"{i} " * (i % 30 + 1))
    cache = tmp_path_factory.mktemp("cache")
    return DataConfig(source="text", paths=[str(folder)], cache=cache, sequence_length=16, validation_fraction=0.2)


def stream_of(config, split="train") -> torch.Tensor:
    stream = TokenStream(open_shards(config, BytesTokenizer()), split, BytesTokenizer.end_of_document)
    return torch.from_numpy(stream.read(0, len(stream)))


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("length", [1, 7, 16])
def test_an_epoch_is_the_stream_cut_in_sequences(config, split, length):
    dataset = open_dataset(config.model_copy(update={"sequence_length": length}), seed=3, split=split)
    stream = stream_of(config, split)
    assert dataset.samples == (len(stream) - 1) // length
    epoch = dataset.batch(range(dataset.samples, 2 * dataset.samples))
    used = dataset.samples * length
    rows = torch.stack([stream[:used].view(-1, length), stream[1 : used + 1].view(-1, length)], dim=1)
    read = torch.stack([epoch.tokens, epoch.targets], dim=1)
    assert sorted(read.flatten(1).tolist()) == sorted(rows.flatten(1).tolist())
    assert epoch.tokens.dtype == epoch.targets.dtype == torch.int64
    assert epoch.documents is None
    assert epoch.unmasked() == used


@settings(max_examples=30)
@given(indices=st.lists(st.integers(0, 10**9), min_size=1, max_size=8), parts=st.integers(1, 8))
def test_a_sequence_depends_on_its_index_alone(config, indices, parts):
    """However a batch is dealt to replicas and micro-batches, the same sequences are read."""
    for dataset in (
        open_dataset(config, seed=1, split="train"),
        open_dataset(config.model_copy(update={"source": "synthetic"}), seed=1, split="train"),
    ):
        whole = dataset.batch(indices)
        pieces = [dataset.batch(indices[part::parts]) for part in range(parts)]
        for part, piece in enumerate(pieces):
            assert torch.equal(piece.tokens, whole.tokens[part::parts])
            assert torch.equal(piece.targets, whole.targets[part::parts])


def test_seeds_change_the_order_of_training_only(config):
    for split, same in (("train", False), ("validation", True)):
        first, second = (open_dataset(config, seed=seed, split=split).batch(range(8)).tokens for seed in (1, 2))
        assert torch.equal(first, second) is same


def test_masked_documents_by_hand(tmp_path):
    """Two documents in one sequence: nothing predicts the first token of the second."""
    (tmp_path / "text.jsonl").write_text('{"text": "ab"}\n{"text": "c"}\n{"text": "d"}\n')
    config = DataConfig(
        source="jsonl", paths=[str(tmp_path)], cache=tmp_path / "cache", sequence_length=5,
        document_mask=True, validation_fraction=1e-9,
    )
    batch = open_dataset(config, seed=0, split="train").batch([0])
    assert batch.tokens.tolist() == [[97, 98, END, 99, END]]
    assert batch.targets.tolist() == [[98, END, IGNORE, END, IGNORE]]
    assert batch.documents.tolist() == [[0, 0, 0, 1, 1]]
    assert batch.documents.dtype == torch.int32
    assert batch.unmasked() == 3


@pytest.mark.parametrize("source", ["text", "synthetic"])
def test_documents_and_masks_agree_everywhere(config, source):
    config = config.model_copy(update={"document_mask": True, "source": source})
    batch = open_dataset(config, seed=0, split="train").batch(range(64))
    ends = batch.tokens == END
    assert ends.any()
    assert (batch.documents[:, 0] == 0).all()
    assert torch.equal(batch.documents.diff(dim=1) == 1, ends[:, :-1])
    assert (batch.targets[ends] == IGNORE).all()
    kept = batch.targets[:, :-1] != IGNORE
    assert torch.equal(batch.targets[:, :-1][kept], batch.tokens[:, 1:][kept])


def test_synthetic_masks_vary_strongly_between_samples():
    batch = SyntheticDataset(97, 64, seed=0).batch(range(1000))
    shares = (batch.targets != IGNORE).float().mean(dim=1)
    assert 0.6 < shares.mean() < 0.8
    assert shares.std() > 0.25
    assert shares.min() < 0.1
    assert ((batch.targets != IGNORE).sum(dim=1) >= 1).all()
    assert batch.tokens.min() == 0
    assert batch.tokens.max() == 96


@settings(max_examples=30)
@given(length=st.integers(1, 20), seed=st.integers(0, 2**32), documents=st.booleans())
def test_every_synthetic_sample_has_a_target(length, seed, documents):
    batch = SyntheticDataset(5, length, seed, masked=0.9, documents=documents).batch(range(20))
    assert ((batch.targets != IGNORE).sum(dim=1) >= 1).all()


def test_synthetic_seeds_splits_and_sizes_differ(config):
    synthetic = config.model_copy(update={"source": "synthetic"})
    first = [
        open_dataset(synthetic, seed=seed, split=split).batch([0]).tokens.tolist()
        for seed in (0, 1)
        for split in ("train", "validation")
    ]
    assert len({str(tokens) for tokens in first}) == 4
    assert open_dataset(synthetic, seed=0, split="train").vocab_size == 257
    assert SyntheticDataset(11, 8, 0, masked=0).batch(range(9)).unmasked() == 72
    with pytest.raises(UsageError, match=r"masked = 1\.0"):
        SyntheticDataset(11, 8, 0, masked=1.0)


def test_a_split_shorter_than_a_sequence_is_refused(config):
    with pytest.raises(UsageError, match=r"train split .* data\.sequence_length \+ 1 = 1000001"):
        open_dataset(config.model_copy(update={"sequence_length": 10**6}), seed=0, split="train")
    with pytest.raises(UsageError, match=r"validation split .* 0 documents"):
        open_dataset(config.model_copy(update={"validation_fraction": 1e-9}), seed=0, split="validation")


def test_batches_move_but_for_documents(config):
    """Masks are made from these on the host."""
    masked = config.model_copy(update={"document_mask": True})
    batch = open_dataset(masked, seed=0, split="train").batch([0, 1]).to(torch.device("meta"))
    assert {t.device.type for t in (batch.tokens, batch.targets, batch.samples)} == {"meta"}
    assert batch.documents.device.type == "cpu"


def test_train_a_tokenizer_then_look_through_it(config, tmp_path, capsys):
    out = tmp_path / "tokenizer.json"
    tokenizer = train_tokenizer(config, vocab_size=280, out=out)
    assert (tokenizer.path, tokenizer.vocab_size) == (out, 280)
    trained = config.model_copy(update={"tokenizer": str(out)})
    found = describe_data(trained)
    dataset = open_dataset(trained, seed=0, split="train")
    assert dataset.vocab_size == found.splits["train"].stream.vocab_size == 280
    assert found.splits["train"].samples == dataset.samples
    inspect(InspectOptions(), RunConfig(data=trained))
    shown = capsys.readouterr().out
    assert any(line.startswith("train ") and line.endswith(f" {dataset.samples:,}") for line in shown.splitlines())
    assert "280 token ids" in shown and found.sample in shown
    synthetic = config.model_copy(update={"source": "synthetic", "paths": ()})
    inspect(InspectOptions(), RunConfig(data=synthetic))
    shown = capsys.readouterr().out
    assert not describe_data(synthetic).splits and "sample 0 of seed 0" in shown
    assert all(letter.isprintable() or letter in "\n\t" for letter in shown)  # random bytes can move a cursor


def test_preparing_builds_and_checks(config, tmp_path):
    fresh = config.model_copy(update={"cache": tmp_path})
    prepare(fresh, progress=False)
    folder = next((tmp_path / "shards").glob("*/"))
    (folder / "validation-00000.bin").write_bytes(b"")
    with pytest.raises(UsageError, match=r"validation-00000\.bin"):
        prepare(fresh)
    prepare(DataConfig(source="synthetic", cache=tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_only_batches_import_torch():
    code = "import sys, shoal.engine.data.prepare, shoal.engine.data.order; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
