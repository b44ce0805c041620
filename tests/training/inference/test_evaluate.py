"""The loss of a trained model on a text: the run's own validation loss, on any layout, over all tokens."""

import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F

import shoal
from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.engine.data.batches import open_complete
from shoal.engine.models.loss import IGNORE
from shoal.spec.config import build_config, load_config, save_config
from shoal.spec.layout import Layout
from shoal.training.inference.source import load_model, open_source
from shoal.training.records.metrics import read_metrics
from tests.trainings.runs import small_config, train_in

LENGTH = 32
LAYOUTS = (
    {"dp": 2, "zero": 3, "tp": 2, "micro_batch": 3}, {"pp": 2, "tp": 2, "micro_batch": 2}, {"cp": 2, "dp": 2},
    {"pp": 4, "micro_batch": 5},
)  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A corpus of documents with their own validation split, whose sequences have no rest."""
    folder = tmp_path_factory.mktemp("texts")
    documents = [f"def f{i}(x):\n    return x * {i * 7919 % 1000}\n" for i in range(400)]
    held_out = [text for text in documents if is_held_out(text)]
    documents.append(fill_up(sum(len(text) + 1 for text in held_out)))
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    held_out = [text for text in documents if is_held_out(text)]
    (folder / "held-out.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in held_out))
    return folder, (sum(len(text) + 1 for text in held_out) - 1) // LENGTH


def is_held_out(text) -> bool:
    from shoal.engine.data.shards import assign_split

    return assign_split(text.encode(), 0.1) == "validation"


def fill_up(tokens) -> str:
    """A held-out document after which the tokens are one more than full sequences have."""
    size = -tokens % LENGTH + LENGTH
    return next(text for i in range(1000) if is_held_out(text := str(i).rjust(size)))


@pytest.fixture(scope="module")
def run(texts, pool, tmp_path_factory):
    folder, sequences = texts
    config = small_config(
        folder / "corpus.jsonl", {"micro_batch": 4}, model={"layers": 4},
        data={"document_mask": True, "validation": {"held-out": str(folder / "held-out.jsonl")}},
        train={"steps": 8, "validation_sequences": sequences, "validate_every": 0, "precision": "fp64"},
    )
    per_pass = next(n for n in (4, 3, 2, 1) if sequences % n == 0)  # so that no sequence counts twice
    config = config.model_copy(update={"parallel": Layout(micro_batch=per_pass)})
    config = config.model_copy(update={"train": config.train.model_copy(update={"global_batch": 4 * per_pass})})
    return train_in(pool, config, tmp_path_factory.mktemp("evaluate") / "run")


def test_it_is_the_runs_own_validation_loss(run, texts):
    own = read_metrics(run)[-1].validation_loss
    given = shoal.evaluate(run, [texts[0] / "held-out.jsonl"])
    assert given.loss == pytest.approx(own, rel=1e-12)
    assert shoal.evaluate(run).loss == pytest.approx(own, rel=1e-12)
    assert given.perplexity == pytest.approx(math.exp(own))
    assert given.bits_per_byte == pytest.approx(own / math.log(2) * (given.bytes + given.documents) / given.bytes)
    metrics = read_metrics(run)[-1]
    assert metrics.named_validation == {"held-out": pytest.approx(own, rel=1e-12)}
    assert metrics.values()["validation/held-out"] == metrics.named_validation["held-out"]
    # each end of a document predicts nothing, and the first token is predicted by none
    assert given.tokens == given.bytes


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_computes_the_same(layout, run, pool, kept, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x\n" * 13)  # the last sequence is not full, nor is the last pass
    for precision, error in (("fp64", 1e-12), ("fp32", 1e-6)):
        one = shoal.evaluate(run, [text], precision=precision)
        other = shoal.evaluate(run, [text], precision=precision, layout=Layout(**layout))
        assert other.tokens == one.tokens == len(text.read_text())
        assert other.loss == pytest.approx(one.loss, rel=error)


def test_it_is_the_loss_of_every_token_computed_directly(run, tmp_path):
    text = "x = [1, 2, 3]\n" * 7
    (tmp_path / "text.txt").write_text(text)
    source = open_source(run)
    model = load_model(source, source.on(Layout()))
    stream, total = torch.tensor([*text.encode(), 256]), 0.0
    for start in range(0, len(text), LENGTH):
        tokens = stream[start : start + LENGTH + 1]
        total += F.cross_entropy(model.logits(tokens[None, :-1])[0], tokens[1:], reduction="sum").item()
    found = shoal.evaluate(run, [tmp_path / "text.txt"])
    assert found.loss == pytest.approx(total / len(text), rel=1e-12) and found.documents == 1
    first = shoal.evaluate(run, [tmp_path / "text.txt"], sequences=1)
    assert first.tokens == LENGTH and first.loss != found.loss


def test_sequences_past_the_end_have_no_targets(run, tmp_path):
    (tmp_path / "text.txt").write_text("a" * 40)
    data = open_source(run).config.data.model_copy(update={
        "source": "text", "paths": (str(tmp_path / "text.txt"),), "validation_fraction": 1.0,
    })
    samples = open_complete(data)
    batch = samples.batch(range(4))
    assert samples.samples == 2 and (batch.targets != IGNORE).sum(1).tolist() == [32, 8, 0, 0]


def test_json_lines_with_another_field_are_read(run, tmp_path, capsys):
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"content": "one fish, two fish, red fish"}) + "\n")
    with pytest.raises(UsageError, match=r"no field .text. \(data.field\); allowed: content"):
        shoal.evaluate(run, file)
    assert main(["eval", str(run), "--data", str(file), "--field", "content"]) == 0
    assert capsys.readouterr().out.endswith(" of a text of 1 document, 28 bytes\n")
    with pytest.raises(UsageError, match="--field: the run's own text is read as in training"):
        shoal.evaluate(run, field="content")


def test_a_run_of_a_mixture_is_evaluated_source_by_source(run, texts, tmp_path, capsys):
    shutil.copytree(run, mixed := tmp_path / "mixed")
    (tmp_path / "b.txt").write_text("b = 1\n" * 500)
    said = [json.dumps({"messages": [{"role": "assistant", "content": f"{i} fish"}]}) for i in range(100)]
    (tmp_path / "chat.jsonl").write_text("\n".join(said))
    config = load_config(mixed / "run.toml")
    values = config.model_dump(mode="json", exclude={"data": {"paths"}})

    def mix(other: dict) -> None:
        sources = {"code": {"paths": config.data.paths}, "b": other}
        save_config(build_config(values | {"data": values["data"] | {"mixture": sources}}), mixed / "run.toml")

    mix({"paths": [str(tmp_path / "chat.jsonl")], "chat": True})
    found = shoal.evaluate(mixed, sequences=1)
    assert found.bits_per_byte is found.sources["b"].bits_per_byte is None and found.sources["code"].bits_per_byte > 0
    mix({"paths": [str(tmp_path / "b.txt")], "weight": 0.1})
    found, alone = shoal.evaluate(mixed, layout=Layout(dp=2)), shoal.evaluate(run)
    code, b = found.sources["code"], found.sources["b"]
    assert code.loss == pytest.approx(alone.loss, rel=1e-12) and code.tokens == alone.tokens and b.loss != code.loss
    together = (code.loss * code.tokens + b.loss * b.tokens) / (code.tokens + b.tokens)
    assert found.loss == pytest.approx(together, rel=1e-12) and found.tokens == code.tokens + b.tokens
    per_byte = (code.bits_per_byte * code.bytes + b.bits_per_byte * b.bytes) / (code.bytes + b.bytes)
    assert found.bits_per_byte == pytest.approx(per_byte, rel=1e-12)
    assert main(["eval", str(mixed)]) == 0
    assert f"\ncode           {code.loss:.6f} nats per token, {code.tokens:,} tokens\n" in capsys.readouterr().out


def test_conversations_count_only_what_the_assistant_says(run, tmp_path, capsys):
    question, answer = "User: one fish?\nAssistant:", " two fish\n"
    messages = [{"role": "user", "content": "one fish?"}, {"role": "assistant", "content": "two fish"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    stream = torch.tensor([*f"{question}{answer}".encode(), 256])
    source = open_source(run)
    logits = load_model(source, source.on(Layout())).logits(stream[None, :-1])[0]
    spoken = slice(len(question) - 1, None)
    expected = F.cross_entropy(logits[spoken], stream[1:][spoken]).item()
    found = shoal.evaluate(run, tmp_path / "chat.jsonl", chat=True, sequence_length=64)
    assert (found.loss, found.tokens, found.bits_per_byte) == (pytest.approx(expected), len(answer) + 1, None)
    words = ["eval", str(run), "--data", str(tmp_path / "chat.jsonl"), "--sequence-length", "64"]
    assert main([*words, "--chat"]) == 0
    assert f"{found.loss:.6f}" in (out := capsys.readouterr().out) and "bits per byte" not in out
    assert main([*words, "--no-chat"]) == 2
    assert "data.chat reads conversations" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--chat: the run's own text is read as in training"):
        shoal.evaluate(run, chat=True)


def test_an_exported_model_has_the_same_loss(run, texts, tmp_path):
    shoal.export_hf(run, tmp_path / "model")
    text = [texts[0] / "held-out.jsonl"]
    # an imported model is not known to have been trained inside documents
    theirs = shoal.evaluate(tmp_path / "model", text, precision="fp64", sequence_length=LENGTH)
    assert theirs.tokens == theirs.bytes + theirs.documents - 1
    with pytest.raises(UsageError, match="this model comes without a text"):
        shoal.evaluate(tmp_path / "model")


def test_the_command_prints_it(run, texts, capsys):
    words = ["eval", str(run), "--data", str(texts[0] / "held-out.jsonl"), "--micro-batch", "4"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["loss", "perplexity", "bits per byte", "predicted"]
    assert main([*words, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert f"{values['loss']:.6f}" in lines[0] and f"{values['tokens']:,} tokens" in lines[3]


def test_rows_of_token_ids_have_the_same_loss_and_an_unknown_number_of_bytes(run, tmp_path, capsys):
    text, file = "def f(x):\n    return x\n" * 13, tmp_path / "text.jsonl"
    file.write_text(json.dumps({"text": text}))
    expected = shoal.evaluate(run, file)
    file.write_text(json.dumps({"text": [*text.encode()]}))
    found = shoal.evaluate(run, file)
    assert (found.loss, found.tokens, found.bytes) == (expected.loss, expected.tokens, None)
    assert main(["eval", str(run), "--data", str(file)]) == 0
    assert "bytes" not in capsys.readouterr().out


def test_bad_input_is_refused(run, tmp_path, capsys):
    for words, message in (
        (["--data", str(tmp_path / "none.txt")], "no such file"),
        (["--tp", "3"], "parallel.tp = 3"),
        (["--pp", "8"], "parallel.pp = 8"),
    ):
        assert main(["eval", str(run), *words]) == 2
        assert message in capsys.readouterr().err


def test_a_run_refuses_named_texts_that_it_cannot_read(texts, tmp_path, capsys):
    folder, _ = texts
    words = ["train", "--data.paths", str(folder / "corpus.jsonl"), "--run-folder", str(tmp_path / "run")]
    words += ["--data.sequence-length", "32", "--data.validation-fraction", "0.1", "--data.cache", str(tmp_path)]
    assert main([*words, "--data.validation", "more", str(tmp_path / "none.txt")]) == 2
    assert "no such file" in capsys.readouterr().err and not (tmp_path / "run").exists()
    assert main([*words, "--data.validation", "a b", str(folder / "held-out.jsonl")]) == 2
    assert "data.validation" in capsys.readouterr().err
    named = ["--data.validation", "more", str(folder / "held-out.jsonl")]
    assert main([*words, *named, "--parallel.sync", "hogwild", "--parallel.dp", "2", "--train.device", "cpu"]) == 2
    assert "do not meet" in capsys.readouterr().err
