"""What a trained model writes: the same for the same seed, in any company, and from a checkpoint of any layout."""

import io
import json
import shutil
import sys
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import shoal
from shoal.base.errors import UsageError
from shoal.base.section import plain
from shoal.cli.main import main
from shoal.engine.checkpoint import Checkpointer, load, newest_good
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.data.batches import open_dataset
from shoal.engine.data.tokenizer import BytesTokenizer
from shoal.engine.models.cache import Slice
from shoal.engine.models.transformer import Transformer, initialise
from shoal.spec.catalog import model_shape
from shoal.spec.config import build_config
from shoal.spec.layout import Layout
from shoal.training.check import check
from shoal.training.inference.generate import Sampling, draw, generate
from shoal.training.inference.sample import Continuation, encode_prompts, find_words, sample_run
from shoal.training.inference.source import load_model, open_source, read_any_length
from shoal.training.records.metrics import read_metrics
from shoal.training.step.engine import Engine
from tests.training.inference.models import export_fresh
from tests.trainings.runs import checkpoints, small_config, train_in

LAYOUTS = {
    "tp 2": {"tp": 2, "micro_batch": 2},
    "pp 2": {"pp": 2, "micro_batch": 2},
    "dp 2, ZeRO-3": {"dp": 2, "zero": 3, "micro_batch": 2},
}


@pytest.fixture(scope="module")
def trained(corpus, pool, tmp_path_factory):
    """A run on one device and its config, by whether embeddings are tied, each made once."""

    @cache
    def run(tied):
        config = small_config(corpus, {"micro_batch": 8}, model={"tied": tied}, train={"steps": 20})
        return config, train_in(pool, config, tmp_path_factory.mktemp("sample") / "run")

    return run


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def run(request, trained):
    return trained(request.param)


@pytest.fixture
def tied(trained):
    return trained(True)


def write(folder, prompt="def ", max_tokens=40, temperature=0.8, seed=0, **options) -> str:
    (text,) = shoal.sample(
        folder, prompt, max_tokens=max_tokens, temperature=temperature, seed=seed, **options
    )
    return text


def test_the_seed_decides_what_is_written(tied):
    _, folder = tied
    assert write(folder, seed=1) == write(folder, seed=1)
    assert len({write(folder, seed=seed) for seed in range(4)}) > 1
    assert write(folder).startswith("def ")


def test_at_temperature_0_it_is_the_likeliest_whatever_the_seed(tied):
    _, folder = tied
    assert write(folder, temperature=0, seed=1) == write(folder, temperature=0, seed=2)


def test_prompts_together_are_written_as_each_alone(tied):
    _, folder = tied
    prompts = ["def ", "class Attention(nn.Module", "x", "    return self.out"]
    together = shoal.sample(folder, prompts, max_tokens=40, seed=3, precision="fp64")  # some fill the window of 32
    alone = [write(folder, prompt, seed=3 + i, precision="fp64") for i, prompt in enumerate(prompts)]
    assert together == alone and len(set(together)) == 4


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_ranks_write_what_one_device_writes(layout, run, kept):
    prompts = ["def ", "class Attention(nn.Module"]
    one = shoal.sample(run[1], prompts, max_tokens=12, seed=1, precision="fp64")
    assert shoal.sample(run[1], prompts, max_tokens=12, seed=1, precision="fp64", **layout) == one


def cut_anew(values, source, target) -> None:
    """Load a checkpoint into another layout, and save it from there."""
    config = build_config(values)
    shape = check(config)
    samples = open_dataset(config.data, seed=0, split="train")
    engine = Engine(config, shape, Mesh(config.parallel, dist.get_rank()), samples)
    group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
    found, _ = newest_good(source / "checkpoints")
    extra = load(found.path, engine.state(), group=group, model=shape.model_dump(mode="json"))
    engine.restored(found.step)
    saver = Checkpointer(target / "checkpoints", group=group, keep=1, asynchronous=False)
    saver.save(found.step, engine.state(), extra)
    saver.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_any_layout_writes_the_same(layout, run, pool, tmp_path):
    config, folder = run
    changed = config.model_copy(update={"parallel": type(config.parallel)(**LAYOUTS[layout])})
    check(changed)
    shutil.copy(folder / "run.toml", tmp_path / "run.toml")
    pool.run(cut_anew, changed.parallel.world_size, plain(changed), folder, tmp_path)
    assert len(list(checkpoints(tmp_path)[20].glob("rank-*"))) == 2
    assert write(tmp_path, seed=3, temperature=1.0) == write(folder, seed=3, temperature=1.0)


def test_an_exported_model_writes_what_its_run_writes(run, tmp_path):
    shoal.export_hf(run[1], tmp_path / "model")
    assert write(tmp_path / "model", max_tokens=20) == write(run[1], max_tokens=20)


# ---- generation ------------------------------------------------------------------------------------------------------


class Counts:
    """Model that predicts the last token plus one. It records how many tokens it was given, and how many were new."""

    mesh = SimpleNamespace(device="cpu")

    def __init__(self):
        self.longest = self.computed = 0

    def logits(self, tokens, part):
        kept = torch.zeros(1, 1, part.start + tokens.shape[1], 1)
        part.stop = part.start + tokens.shape[1]
        part.extend(self, kept[:, :, part.start :], kept[:, :, part.start :])
        self.longest = max(self.longest, part.stop)
        self.computed += tokens.shape[1]
        return torch.nn.functional.one_hot((tokens + 1) % 10, 10) * 100.0

    def share(self, values):
        return values


def written(model, prompt, count, window, stop=-1, temperature=0.0) -> list[int]:
    ids = list(prompt)

    def take(row, token) -> bool:
        if token == stop:
            return False
        ids.append(token)
        return True

    generate(model, [prompt], Sampling(count, temperature), window=window, take=take)
    return ids


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_it_stops_at_the_end_of_the_document_and_sees_no_more_than_its_window(temperature):
    model = Counts()
    assert written(model, [3], 20, window=4, stop=9, temperature=temperature) == [3, 4, 5, 6, 7, 8]
    assert model.longest == 4
    assert written(model, [3], 2, window=4, stop=9, temperature=temperature) == [3, 4, 5]


def test_each_token_is_computed_once_until_the_window_is_full():
    model = Counts()
    written(model, range(3), 5, window=8)
    assert (model.computed, model.longest) == (7, 7)
    model = Counts()
    written(model, range(3), 8, window=8)
    assert (model.computed, model.longest) == (8 + 4 + 1, 8)  # the ninth token begins again from the last four


class Plain:
    """A model on this process."""

    mesh = SimpleNamespace(device="cpu")

    def __init__(self, family):
        self.model = Transformer(model_shape(family).model_copy(update={"vocab": 50, "layers": 2})).double()
        initialise(self.model, seed=1)
        with torch.no_grad():
            for p in self.model.parameters():
                p *= 5  # so that the likeliest token changes from place to place

    @torch.no_grad()
    def logits(self, tokens, part=None):
        return self.model(tokens, part=part)

    def share(self, values):
        return values


@pytest.mark.parametrize("family", ["tiny", "tiny-gpt"])
def test_what_is_written_with_kept_keys_is_what_the_whole_text_would_be_answered_with(family):
    model = Plain(family)
    ids = written(model, [1, 2, 3], 12, window=30)
    assert len(set(ids)) > 5
    for length in range(3, 15):
        assert ids[length] == model.logits(torch.tensor([ids[:length]]))[0, -1].argmax()


def test_top_k_and_top_p_keep_the_likeliest():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).double().log()
    generator = torch.Generator().manual_seed(0)

    def drawn(**options):
        return {draw(logits, Sampling(temperature=1.0, **options), generator) for _ in range(100)}

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {1, 3}
    assert drawn(top_p=0.65) == {1, 3} and drawn(top_p=0.75) == {1, 2, 3} and drawn(top_p=1e-9) == {1}
    assert drawn(top_k=3, top_p=0.4) == {1}


def test_a_stop_text_ends_a_text_and_no_part_of_it_is_shown():
    shown = []
    text = Continuation(BytesTokenizer(), b"ab", frozenset({256}), ("\n\n", "END"), shown.append)
    for i, byte in enumerate("x\u00e9 e\nNEND".encode()):
        assert text.take(byte) == (i < 9)
        assert "\ufffd" not in "".join(shown) and not "".join(shown).endswith("E")
    assert text.finish() == "".join(shown) == "x\u00e9 e\nN"
    assert not Continuation(BytesTokenizer(), b"", frozenset({256})).take(256)


def test_a_text_of_an_imported_model_begins_as_its_tokenizer_says(tmp_path, corpus):
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words.add_tokens(sorted(pre_tokenizers.ByteLevel.alphabet()))
    words.add_special_tokens(["<s>", "</s>"])
    ids = [words.token_to_id(each) for each in ("<s>", "</s>")]
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", ids[0]), ("</s>", ids[1])])
    shape = small_config(corpus, model={"vocab": 300}).model.shape(vocab=300, sequence_length=32)
    export_fresh(shape, tmp_path / "model")
    words.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, ids[1]]}))
    source = open_source(tmp_path / "model")
    assert source.ends == {7, ids[1]} and source.window == shape.max_sequence
    assert encode_prompts(source, ["a"]) == [[ids[0], words.token_to_id("a")]]
    assert write(tmp_path / "model", "a", max_tokens=3).startswith("a")


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_the_text(tied, capsys):
    _, folder = tied
    assert main(["sample", str(folder), "def ", "--max-tokens", "30", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == write(folder, max_tokens=30, temperature=0) + "\n"


def test_the_command_prints_several_texts(tied, capsys, tmp_path):
    (tmp_path / "prompts").write_text("class A\n\nx = 1\n")
    words = ["def ", "--prompts", str(tmp_path / "prompts"), "--max-tokens", "4", "--seed", "5"]
    assert main(["sample", str(tied[1]), *words]) == 0
    prompts = ["def ", "class A", "x = 1"]
    expected = [write(tied[1], prompt, max_tokens=4, seed=5 + i) for i, prompt in enumerate(prompts)]
    assert capsys.readouterr().out == "\n--------\n".join(expected) + "\n"


def test_any_text_is_printed_whatever_letters_the_terminal_has(tied, monkeypatch):
    """An untrained model writes bytes that are no text, and a run that is done must not fail for what it prints."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr("shoal.launch.inference.sample", lambda *_, show, **__: show("def \ufffd\u2713\x1b[31m"))
    assert main(["sample", str(tied[1]), "def "]) == 0
    assert terminal.buffer.getvalue() == b"def ??\\x1b[31m\n"


def test_any_temperature_gives_a_text(tied):
    assert write(tied[1], temperature=1e-320, max_tokens=4) == write(tied[1], temperature=0, max_tokens=4)


@pytest.mark.parametrize(("text", "words"), [
    ("ing it.\n\n----\n    def main(args, more=3, *rest):\n", "def main(args, more=3, *rest):"),
    ("ttle cat sat on the mat", "cat sat on the"), ("word", "word"), ("", ""),
    ("\ufffd\u4e00\u4e8c" + "\u4e09" * 80, "\u4e00\u4e8c" + "\u4e09" * 58), ("12 34\n56\n", ""),
])
def test_words_to_begin_with_are_the_first_of_a_whole_line(text, words):
    assert find_words(text) == words


@pytest.mark.parametrize(("given", "prompt"), [
    (None, "zebra crossing ahead of"), ("def main(", "def main("), ("", ""),
])
def test_a_run_ends_with_a_sample_of_its_held_out_text_or_of_the_given_prompt(tied, given, prompt):
    _, folder = tied
    source = open_source(folder)
    ids = torch.tensor([source.tokenizer.encode("ways.\nzebra crossing ahead of us").tolist()])
    held_out = SimpleNamespace(batch=lambda numbers: SimpleNamespace(tokens=ids))
    config = source.config.replace(metrics={"sample_prompt": given})
    found, text = sample_run(folder, config, source.shape, held_out, pytest.fail)
    assert found == prompt and bool(text) == bool(prompt)
    assert not prompt or not text.startswith(prompt), "the display prints the prompt before the text"
    assert source.window == config.data.sequence_length < source.shape.max_sequence


def test_what_is_no_run_is_refused(tied, tmp_path, capsys):
    _, folder = tied
    assert main(["sample", str(tmp_path), "def "]) == 2
    assert f"{tmp_path} is not the folder of a run (run.toml is missing)" in capsys.readouterr().err
    for near in ("checkpoints", "run.toml"):
        assert main(["sample", str(folder / near), "def "]) == 2
        assert f"\n  Did you mean {folder}?" in capsys.readouterr().err
    shutil.copy(folder / "run.toml", tmp_path / "run.toml")
    assert main(["sample", str(tmp_path), "def "]) == 2
    assert "has no good checkpoint" in capsys.readouterr().err
    with pytest.raises(UsageError, match="the prompt is empty"):
        write(folder, prompt="")
    assert main(["sample", str(folder)]) == 2
    assert "there is no prompt" in capsys.readouterr().err
    assert main(["sample", str(folder), "def ", "--tp", "3"]) == 2
    assert "parallel.tp = 3" in capsys.readouterr().err
    assert main(["sample", str(folder), "def ", "--stop", ""]) == 2
    assert "--stop ''" in capsys.readouterr().err


def test_the_weights_that_it_uses_are_those_of_the_checkpoint(tied, tmp_path):
    """Change one stored weight, and the checksum refuses it: nothing else can be behind the text."""
    _, folder = tied
    shutil.copytree(folder, tmp_path / "run")
    for path in checkpoints(tmp_path / "run").values():
        file = next(path.glob("rank-*"))
        assert load_file(file)
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
    with pytest.raises(UsageError, match="has no good checkpoint"):
        write(tmp_path / "run")


@pytest.fixture(scope="module")
def short_of_room(corpus, pool, tmp_path_factory):
    """A run whose experts have room for half of their tokens."""
    experts = {"count": 4, "per_token": 2, "ffn": 32, "capacity_factor": 0.5}
    config = small_config(corpus, {"micro_batch": 8}, model={"experts": experts}, train={"steps": 1})
    return config, train_in(pool, config, tmp_path_factory.mktemp("experts") / "run")


def test_what_validation_dropped_is_logged(short_of_room):
    (metrics,) = read_metrics(short_of_room[1])
    assert 0.5 <= metrics.validation_dropped < 1


def test_no_token_of_a_prompt_is_dropped(short_of_room):
    """Experts have no capacity limit in generation, so a prompt gives the same as its tokens one by one."""
    source = open_source(short_of_room[1])
    model = load_model(source, source.on(Layout()))
    ids = torch.arange(40, 64).unsqueeze(0)
    trained = model.logits(ids, Slice())
    read_any_length(model)
    together, seen, one_by_one = model.logits(ids, Slice()), None, []
    for token in ids.split(1, dim=1):
        seen = Slice(seen)
        one_by_one.append(model.logits(token, seen))
    torch.testing.assert_close(together, torch.cat(one_by_one, 1))
    assert not torch.allclose(together, trained, rtol=1e-3)
