"""What a trained model writes: the same for the same seed, and from a checkpoint of any layout."""

import io
import shutil
import sys

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from shoal.base.errors import UsageError
from shoal.base.section import plain
from shoal.cli.main import main
from shoal.engine.checkpoint import Checkpointer, load, newest_good
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.data.batches import open_dataset
from shoal.engine.models.cache import Slice
from shoal.engine.models.transformer import Transformer, initialise
from shoal.spec.catalog import model_shape
from shoal.spec.config import build_config
from shoal.training.check import check
from shoal.training.records.metrics import read_metrics
from shoal.training.sample import generate, load_model, sample
from shoal.training.step.engine import Engine
from tests.trainings.runs import checkpoints, small_config, train_in

LAYOUTS = {
    "tp 2": {"tp": 2, "micro_batch": 2},
    "pp 2": {"pp": 2, "micro_batch": 2},
    "dp 2, ZeRO-3": {"dp": 2, "zero": 3, "micro_batch": 2},
}


@pytest.fixture(autouse=True)
def one_thread():
    """The model is so small that several threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def run(request, corpus, pool, tmp_path_factory):
    """A run on one device, and its config."""
    config = small_config(corpus, {"micro_batch": 8}, model={"tied": request.param}, train={"steps": 20})
    return config, train_in(pool, config, tmp_path_factory.mktemp("sample") / "run")


def write(folder, prompt="def ", tokens=40, temperature=0.8, seed=0) -> str:
    return sample(folder, prompt, tokens=tokens, temperature=temperature, seed=seed)


def test_the_seed_decides_what_is_written(run):
    _, folder = run
    assert write(folder, seed=1) == write(folder, seed=1)
    assert len({write(folder, seed=seed) for seed in range(4)}) > 1
    assert write(folder).startswith("def ")


def test_at_temperature_0_it_is_the_likeliest_whatever_the_seed(run):
    _, folder = run
    assert write(folder, temperature=0, seed=1) == write(folder, temperature=0, seed=2)


def cut_anew(values, source, target) -> None:
    """Load a checkpoint into another layout, and save it from there."""
    config = build_config(values)
    shape = check(config)
    samples = open_dataset(config.data, seed=0, split="train")
    engine = Engine(config, shape, Mesh(config.parallel, dist.get_rank()), samples)
    group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
    found, _ = newest_good(source / "checkpoints", group=group)
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


class Counts(torch.nn.Module):
    """Says the last token plus one, surely; remembers how much it was shown, and how much of it anew."""

    def __init__(self):
        super().__init__()
        self.longest = self.computed = 0

    def forward(self, tokens, part):
        kept = torch.zeros(1, 1, part.start + tokens.shape[1], 1)
        part.stop = part.start + tokens.shape[1]
        part.extend(self, kept[:, :, part.start :], kept[:, :, part.start :])
        self.longest = max(self.longest, part.stop)
        self.computed += tokens.shape[1]
        return torch.nn.functional.one_hot((tokens + 1) % 10, 10) * 100.0


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_it_stops_at_the_end_of_the_document_and_sees_no_more_than_its_window(temperature):
    model = Counts()
    ids = generate(model, torch.tensor([3]), 20, temperature=temperature, window=4, stop=9,
                   generator=torch.Generator())
    assert ids.tolist() == [3, 4, 5, 6, 7, 8] and model.longest == 4
    ids = generate(model, torch.tensor([3]), 2, temperature=temperature, window=4, stop=9, generator=torch.Generator())
    assert ids.tolist() == [3, 4, 5]


def test_each_token_is_computed_once_until_the_window_is_full():
    model = Counts()
    generate(model, torch.arange(3), 5, temperature=0, window=8, stop=-1, generator=torch.Generator())
    assert (model.computed, model.longest) == (7, 7)
    model = Counts()
    generate(model, torch.arange(3), 8, temperature=0, window=8, stop=-1, generator=torch.Generator())
    assert (model.computed, model.longest) == (8 + 4 + 1, 8)  # the ninth token begins again from the last four


@pytest.mark.parametrize("family", ["tiny", "tiny-gpt"])
def test_what_is_written_with_kept_keys_is_what_the_whole_text_would_be_answered_with(family):
    model = Transformer(model_shape(family).model_copy(update={"vocab": 50, "layers": 2})).double()
    initialise(model, seed=1)
    with torch.no_grad():
        for p in model.parameters():
            p *= 5  # so that the likeliest token changes from place to place
    ids = generate(model, torch.tensor([1, 2, 3]), 12, temperature=0, window=30, stop=-1, generator=torch.Generator())
    assert len(set(ids.tolist())) > 5
    for length in range(3, 15):
        with torch.no_grad():
            assert ids[length] == model(ids[:length].unsqueeze(0))[0, -1].argmax()


def test_the_command_prints_the_text(run, capsys):
    _, folder = run
    assert main(["sample", str(folder), "def ", "--tokens", "30", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == write(folder, tokens=30, temperature=0) + "\n"


def test_any_text_is_printed_whatever_letters_the_terminal_has(run, monkeypatch):
    """An untrained model writes bytes that are no text, and a run that is done must not fail for what it prints."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr("shoal.training.sample.sample", lambda *_, **__: "def \ufffd\u2713")
    assert main(["sample", str(run[1]), "def "]) == 0
    assert terminal.buffer.getvalue() == b"def ??\n"


def test_any_temperature_gives_a_text(run):
    assert write(run[1], temperature=1e-320, tokens=4) == write(run[1], temperature=0, tokens=4)


def test_what_is_no_run_is_refused(run, tmp_path, capsys):
    _, folder = run
    assert main(["sample", str(tmp_path), "def "]) == 2
    assert f"{tmp_path} is not the folder of a run (run.toml is missing)" in capsys.readouterr().err
    shutil.copy(folder / "run.toml", tmp_path / "run.toml")
    assert main(["sample", str(tmp_path), "def "]) == 2
    assert "has no good checkpoint" in capsys.readouterr().err
    with pytest.raises(UsageError, match="the prompt is empty"):
        write(folder, prompt="")


def test_the_weights_that_it_uses_are_those_of_the_checkpoint(run, tmp_path):
    """Change one stored weight, and the checksum refuses it: nothing else can be behind the text."""
    _, folder = run
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


def test_no_token_of_a_prompt_is_dropped(short_of_room, monkeypatch):
    """As long as a text is written its capacity is not known, so that there is none: a prompt computes what its tokens
    do one by one."""
    config, folder = short_of_room
    written_by = []
    monkeypatch.setattr("shoal.training.sample.generate", lambda model, ids, *_, **__: written_by.append(model) or ids)
    write(folder)
    (model,) = written_by
    ids = torch.arange(40, 64).unsqueeze(0)
    with torch.no_grad():
        together, seen, one_by_one = model(ids, part=Slice()), None, []
        for token in ids.split(1, dim=1):
            seen = Slice(seen)
            one_by_one.append(model(token, part=seen))
        torch.testing.assert_close(together, torch.cat(one_by_one, 1))
        shape = config.model.shape(vocab=model.shape.vocab, sequence_length=32)
        trained = load_model(newest_good(folder / "checkpoints")[0].path, shape)
        assert not torch.allclose(together, trained(ids, part=Slice()), rtol=1e-3)
