"""Every bad input ends before training: one clear message, exit code 2, no traceback, and nothing made on the disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from shoal.cli.main import main
from tests.place import Place


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return Place(tmp_path_factory.mktemp("bad"))


class Bad(NamedTuple):
    """One bad input: the words of the command line, and what the message must say."""

    words: Callable[[Place], list[str | Path]]
    says: tuple[str, ...]


def option(*words: str, says: str | tuple[str, ...]) -> Bad:
    """Good files, and these options."""
    return Bad(lambda p: ["train", p.toml, *words], (says,) if isinstance(says, str) else says)


def file(content: str | bytes, says: str | tuple[str, ...]) -> Bad:
    """A config of this content."""
    return Bad(lambda p: ["train", p.write("bad.toml", content)], (says,) if isinstance(says, str) else says)


def corpus(content: bytes, *words: str, says: str | tuple[str, ...], name: str = "bad.txt") -> Bad:
    """A corpus of this content."""
    return Bad(
        lambda p: ["train", p.toml, "--data.paths", p.write(name, content), *words],
        (says,) if isinstance(says, str) else says,
    )


def tokenizer(p: Place, *tokens: str, ids: tuple[int, ...] | None = None) -> Path:
    """A tokenizer.json which knows these tokens alone, and drops all other text."""
    vocabulary = dict(zip(tokens, ids or range(len(tokens)), strict=True))
    added = [{"id": vocabulary["<|endoftext|>"], "content": "<|endoftext|>", "special": True, "single_word": False,
              "lstrip": False, "rstrip": False, "normalized": False}] if "<|endoftext|>" in vocabulary else []
    return p.write("tokenizer.json", json.dumps({
        "version": "1.0", "added_tokens": added, "normalizer": None, "pre_tokenizer": None, "post_processor": None,
        "decoder": None, "truncation": None, "padding": None,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }))


JSONL = ("--data.source", "jsonl")
CASES = {
    # ---- the config
    "a file that is not there": Bad(lambda p: ["train", "/no/such.toml"], ("no such file: /no/such.toml",)),
    "a folder for a config": Bad(lambda p: ["train", p.folder], ("is the folder of a run",)),
    "a key of 20,000 dots": file("a" + ".a" * 20_000 + " = 1", "nested too deep"),
    "a schedule with a field of 200 kB": Bad(
        lambda p: ["simulate", "--csv", p.write("long.csv", "0F0" * 70_000)], ("field larger than field limit",)),
    "a pipeline of a billion ranks": Bad(
        lambda p: ["simulate", "--pp", "1000000000"], ("--pp 1000000000", "is not simulated")),
    "a billion disturbed replicas": Bad(
        lambda p: ["simulate", "--dp", "1000000000", "--jitter", "0.1"], ("--dp 1000000000", "is not simulated")),
    "a binary config": file(bytes(range(256)), "is not TOML: "),
    "a module for a config": Bad(lambda p: ["plan", p.write("mine.py", "own = 3")], ("is a Python file",)),
    "a config nested too deep": file("a = " + "[" * 9000, "nested too deep"),
    "a number of 5,000 digits": file("[train]\nsteps = " + "9" * 5000, "is not TOML: "),
    "a number beyond all": file("[train]\nsteps = 1" + "0" * 30, "train.steps is a number beyond 2^53"),
    "a misspelt section": file("[trian]\nsteps = 3", "there is no key 'trian'; did you mean 'train'?"),
    "a misspelt key": file("[train]\nstepz = 3", "there is no key 'train.stepz'; did you mean 'steps'?"),
    "a key of another section": file("zero = 1", "there is no key 'zero'; did you mean 'parallel.zero'?"),
    "a misspelt key deep inside": file("[model.experts]\ncuont = 4", "'model.experts.cuont'; did you mean 'count'?"),
    "a misspelt option": option(
        "--train.stepz", "3", says=("Unrecognized options: --train.stepz", "Perhaps you meant: --train.steps,")),
    "text for a number": file("[train]\nsteps = '7'", "train.steps = '7': input should be a valid integer"),
    "a boolean for a number": file("[train]\nsteps = true", "train.steps = True: input should be a valid integer"),
    "a fraction for a count": file("[train]\nsteps = 7.5", "train.steps = 7.5: input should be a valid integer"),
    "a number for a boolean": file("[checkpoint]\nasynchronous = 1", "checkpoint.asynchronous = 1: input should be"),
    "a date for a number": file("[train]\nsteps = 1979-05-27", "train.steps = '1979-05-27': input should be"),
    "a text for a list": file("[float8]\nkeep = 'x'", "float8.keep = 'x': input should be a valid array"),
    "a number for a section": file("train = 3", "train = 3: input should be a table"),
    "neither of two types": file(
        "[parallel]\nbucket_mb = '1'", "parallel.bucket_mb = '1': input should be a valid number, or input should be"),
    "what is not a number": file("[optimizer]\nlearning_rate = nan", "learning_rate = nan: input should be a finite"),
    "a word for a number, typed": option(
        "--train.steps", "many", says="Error parsing --train.steps: 'many' is not an integer"),
    "a name that is no text": option("--model.name", "\udcff", says="is not Unicode text"),
    # ---- the layout
    "a degree that does not divide": option(
        "--parallel.tp", "3", says=("parallel.tp = 3 does not divide model.heads = 2", "Nearest tp that fits")),
    "more stages than layers": option("--parallel.pp", "3", says="parallel.pp = 3: 2 layers cannot fill 3 stages"),
    "a batch that does not divide": option(
        "--parallel.dp", "3",
        says="train.global_batch = 8 is not a multiple of dp 3 x micro_batch 1 = 3: global_batch = dp x micro_batch x"),
    "too few devices": option(
        "--parallel.dp", "2", "--parallel.tp", "2", "--ranks", "3",
        says=("pp 1 x dp 2 x tp 2 = 4 ranks, but 3 were given", "Use 4 ranks")),
    "more ranks than there can be": option("--parallel.cp", "100000000000", says="parallel.cp = 100000000000: input"),
    "a product of more ranks than there can be": option(
        "--parallel.cp", "1000000", "--parallel.tp", "1000000", says="= 1000000000000 ranks, but there can be at most"),
    "more micro-batches than a step can have": option(
        "--train.global_batch", "1000000", says="1,000,000 micro-batches, but a step can have at most 65,536"),
    "CUDA where there is none": option("--train.device", "cuda", says="torch sees no CUDA device here"),
    "more threads than there can be": option("--train.threads", "20000", says="train.threads = 20000: input should be"),
    "a pace of ages": option("--testing.min_step_seconds", "1e30", says="1e+30: input should be less than or equal"),
    "a straggler of ages": option("--testing.straggler", "0=1e9", says="write it as in testing.straggler = '1=4'"),
    "a straggler that is too slow": option("--testing.straggler", "0=1001", says="a factor of 1 to 1000"),
    # ---- the model
    "a model that does not exist": option("--model.name", "tinny", says=("tinny", "did you mean 'tiny'?")),
    "a model that does not fit": option(
        "--model.hidden", "1048576", "--model.ffn", "1048576",
        says=("model.name = 'tiny' (", "parameters) does not fit: the fullest rank needs", "weights ", "gradients ",
              "optimizer ", "and this machine has")),
    "activations that do not fit": option(
        "--parallel.micro_batch", "1048576", "--train.global_batch", "1048576", says=("does not fit", "activations ")),
    # ---- the text
    "a corpus that is not there": option("--data.paths", "/no/such", says="'/no/such': no such file, folder or match"),
    "a path too long": option("--data.paths", "a" * 5000, says="ile name too long"),
    "no paths": option("--data.paths", says="data.paths is empty"),
    "an empty corpus": corpus(b"", says="has 0 tokens in 0 documents"),
    "a binary corpus": corpus(b"abc\0def" * 4000, says=("bad.txt is a binary file", "leave its file out with a glob")),
    "a corpus that is not UTF-8": corpus(b"caf\xe9 " * 4000, says="bad.txt is not UTF-8 text"),
    "UTF-16": corpus(("hello " * 4000).encode("utf-16"), says="bad.txt is not UTF-8 text"),
    "paths that nothing reads": Bad(
        lambda p: ["train", "--data.source", "stdlib", "--data.paths", p.corpus, "--run-folder", p.folder / "unread"],
        ("with data.source = 'stdlib', which does not read it", "Set data.source (auto, text, jsonl, parquet, me")),
    "paths and a dataset": Bad(
        lambda p: ["data", "inspect", "--data.paths", p.corpus, "--data.dataset", "a/b"], ("Set data.source (hub)",)),
    "a file of an unknown format": Bad(
        lambda p: ["data", "inspect", "--data.paths", p.write("rows.csv", "a")],
        ("its name has no suffix of a known format", "Set data.source = 'text'")),
    "paths of random tokens": Bad(
        lambda p: ["train", "--data.source", "synthetic", "--data.paths", p.corpus, "--run-folder", p.folder / "no"],
        ("with data.source = 'synthetic', which does not read it",)),
    "a look at paths that nothing reads": Bad(
        lambda p: ["data", "inspect", "--data.source", "stdlib", "--data.paths", p.corpus],
        ("with data.source = 'stdlib'",)),
    "a field of plain text": option("--data.field", "body", says="data.field = 'body' with data.source = 'text'"),
    "a dataset of plain text": option("--data.dataset", "a/b", says="Set data.source (hub), or leave data.dataset out"),
    "a path that is empty": option("--data.paths", "", says="data.paths: '' names no file"),
    "a home of nobody": option("--data.paths", "~no-such-user/x", says="there is no home of that name"),
    "a tokenizer in a home of nobody": option("--data.tokenizer", "~no-such-user/x", says="data.tokenizer: '~no-"),
    "a cache in a home of nobody": option("--data.cache", "~no-such-user/x", says="data.cache: '~no-such-user"),
    "a sequence longer than the corpus": option(
        "--data.sequence_length", "1000000", says="one sequence needs data.sequence_length + 1 = 1000001"),
    "JSON lines that are none": corpus(b'{"text": "a"}\n{"te', *JSONL, says="bad.txt, line 2: not JSON"),
    "JSON nested too deep": corpus(b"[" * 100_000, *JSONL, says="bad.txt, line 1 is nested too deeply to parse"),
    "JSON lines without the field": corpus(b'{"txet": "a"}\n', *JSONL, says="no field 'text' (data.field)"),
    "JSON lines of numbers": corpus(b'{"text": 3}\n', *JSONL, says="the field 'text' holds int, not text"),
    "a parquet file that is none": corpus(
        b"PAR1 and no more PAR1", "--data.source", "parquet", says="is not a parquet file that can be read"),
    "a cache in a file's place": Bad(
        lambda p: ["train", p.toml, "--data.cache", p.toml], ("data.cache = ", "cannot be used", "can be written")),
    # ---- tokens
    "a tokenizer that is not there": option("--data.tokenizer", "/no/such.json", says="nor a readable file"),
    "a tokenizer that is none": Bad(
        lambda p: ["train", p.toml, "--data.tokenizer", p.write("t.json", "{}")], ("is not a tokenizer.json",)),
    "a tokenizer without an end": Bad(
        lambda p: ["train", p.toml, "--data.tokenizer", tokenizer(p, "a")], ("has no token that ends a document",)),
    "all labels masked": Bad(
        lambda p: ["train", p.toml, "--data.sequence_length", "2", "--data.tokenizer", tokenizer(p, "<|endoftext|>")],
        ("data: every label of", "is masked", "but no token in this tokenizer")),
    "a vocabulary too small": option("--model.vocab", "100", says="model.vocab = 100 is smaller than the tokenizer's"),
    # ---- folders
    "a folder that holds something": Bad(
        lambda p: ["train", p.toml, "--run-folder", p.corpus], ("exists already", "Name another folder")),
    "a folder in a file's place": Bad(
        lambda p: ["train", p.toml, "--run-folder", p.toml / "run"], ("cannot be written: Not a directory",)),
    "checkpoints in a file's place": Bad(
        lambda p: ["train", p.toml, "--run-folder", p.folder / "new", "--checkpoint.folder", p.toml],
        ("checkpoints cannot be written into ", "run.toml: Not a directory", "folder by checkpoint.folder")),
    "another run's checkpoints": Bad(
        lambda p: ["train", p.toml, "--run-folder", p.folder / "new", "--checkpoint.folder", p.run() / "checkpoints"],
        ("already holds step-00000002 of another run", "a folder of its own")),
    "an address of no store": option("--checkpoint.folder", "s4://bucket/run", says="checkpoint.folder = 's4://bucket"),
    "memory in a file's place": Bad(
        lambda p: ["train", p.toml, "--run-folder", p.folder / "new", "--failover.memory_every", "1",
                   "--failover.memory_folder", p.toml], ("failover.memory_folder = ", "run.toml' does not exist")),
    "another run's folder": Bad(
        lambda p: ["train", p.toml, "--run-folder", p.run()], ("exists already", "--resume")),
    "a folder that cannot be": option("--run-folder", "/proc/run", says="--run-folder /proc/run cannot be written"),
    "a page that cannot be written": Bad(
        lambda p: ["estimate", "--out", "/proc/page.html"], ("/proc/page.html: no such file or directory",)),
    # ---- resuming
    "a run that is not there": Bad(lambda p: ["train", "--resume", "/no/run"], ("it has no run.toml",)),
    "a run of another config": Bad(
        lambda p: ["train", "--resume", p.run(), "--train.seed", "1", "--model.layers", "3", "--optimizer.name", "sgd",
                   "--data.sequence_length", "16", "--train.steps", "9"],
        ("this run was started with another config:", "\n  train.seed = 1, was 0: ", "\n  model.layers = 3, was 2: ",
         "\n  optimizer.name = 'sgd', was 'adamw': ", "\n  data.sequence_length = 16, was 32: ", "What may change: ")),
    "a run that has all its steps": Bad(
        lambda p: ["train", "--resume", p.run()], ("step 2 is done, and train.steps = 2", "Raise train.steps")),
    "a checkpoint of another model": Bad(
        lambda p: ["sample", other_model(p), "def"],
        ("holds another model than this run's", "layers: 2 saved, 1 in this run", "ffn: 64 saved, 32 in this run")),
    "a run whose config is damaged": Bad(
        lambda p: ["train", "--resume", damaged(p, "run.toml", b"[train\n"), "--train.steps", "9"], ("is not TOML",)),
    # ---- other commands
    "a sample of nothing": Bad(lambda p: ["sample", "/no/run", "def"], ("is not the folder of a run",)),
    "a sample of an empty prompt": Bad(lambda p: ["sample", p.run(), ""], ("the prompt is empty",)),
    "a look at no text": Bad(lambda p: ["data", "inspect", p.toml, "--data.paths", "/no"], ("no such file, folder",)),
    "a vocabulary without bytes": Bad(
        lambda p: ["data", "train-tokenizer", p.toml, "--vocab-size", "3"], ("byte-level BPE needs at least 257",)),
    "a vocabulary into a file": Bad(
        lambda p: ["data", "train-tokenizer", p.toml, "--out", f"{p.toml}/x.json"], ("cannot write",)),
    "a vocabulary beyond all memory": Bad(
        lambda p: ["data", "train-tokenizer", p.toml, "--vocab-size", "1000000000000000"], ("less than or equal",)),
    "a checkpoint that is none": Bad(lambda p: ["checkpoint", "verify", p.corpus], ("is not a complete checkpoint",)),
    "a damaged checkpoint": Bad(
        lambda p: ["checkpoint", "verify", damaged(p, NEWEST, b"\0" * 200) / NEWEST.parent], ("is damaged",)),
    "a damaged manifest": Bad(
        lambda p: ["checkpoint", "inspect", damaged(p, NEWEST.with_name("manifest.json"), b"{}") / NEWEST.parent],
        ("manifest.json is damaged",)),
    "this machine, not measured": Bad(lambda p: ["estimate", "--cluster", "4xhere"], ("shoal calibrate",)),
    "a cluster that does not exist": Bad(lambda p: ["plan", "--cluster", "8xZ"], ("there is no node type 'Z'",)),
    "an estimate of an unknown model": Bad(lambda p: ["estimate", "--model", "llama-9"], ("is not in the catalog",)),
    "a proof of what cannot be": Bad(lambda p: ["verify", p.toml, "--parallel.tp", "3"], ("does not divide",)),
    "a plan over a file": Bad(lambda p: ["plan", "--toml", p.toml], ("is not overwritten",)),
    "a plan in a folder's place": Bad(lambda p: ["plan", "--toml", p.corpus], ("it is a folder",)),
    "a plan into no folder": Bad(lambda p: ["plan", "--out", "none/plan.html"], ("there is no folder none",)),
    "a plan for a number that is none": Bad(lambda p: ["plan", "--global-batch", "\u00b2"], ("--global-batch \u00b2",)),
    "a plan for too many devices": Bad(lambda p: ["plan", "--cluster", "200000x8xH100"], ("at most 1,048,576",)),
    "an estimate into no folder": Bad(lambda p: ["estimate", "--out", "none/page.html"], ("there is no folder none",)),
    "a calibration into no folder": Bad(lambda p: ["calibrate", "--out", "none/a.toml"], ("there is no folder none",)),
    "no ranks to calibrate": Bad(lambda p: ["calibrate", "--out", "q.toml", "--ranks"], ("ranks = []",)),
    "no ranks to measure": Bad(lambda p: ["bench", "transport", "--ranks"], ("ranks = []",)),
    "a recovery that does not exist": Bad(
        lambda p: ["bench", "failover", "--recoveries", "survivors, dsk"], ("did you mean 'survivors, disk'?",)),
    "no experts to measure": Bad(lambda p: ["bench", "experts", "--experts"], ("experts = []",)),
    "no sizes to measure": Bad(lambda p: ["bench", "collectives", "--sizes"], ("sizes = []",)),
    "a product beyond all memory": Bad(
        lambda p: ["bench", "peak", "--sides", "64", "2000000"], ("its matrices need 48 TB", "Use sides up to")),
    "a training that is not asked for": Bad(
        lambda p: ["bench", "experts", "--steps", "9"], ("--steps 9: it needs --learning",)),
    "a measurement in whose place a training is asked for": Bad(
        lambda p: ["bench", "experts", "--learning", "--tokens", "9"], ("--tokens 9: it configures the measurement",)),
    "turns of a race that takes two": Bad(
        lambda p: ["bench", "step", "--quick", "--turns", "3"], ("--turns 3: --quick takes 2 turns",)),
    "a part of bench gpu that does not exist": Bad(
        lambda p: ["bench", "gpu", "--part", "9"], ("part = 9: input should be less than or equal to 6",)),
    "a profile that is not written": Bad(
        lambda p: ["calibrate", "--check", "here.toml", "--out", "a.toml"], ("--out a.toml: only for a new file",)),
    "ranks that are not measured": Bad(
        lambda p: ["calibrate", "--check", "here.toml", "--ranks", "3"], ("--ranks (3,): only for a new file",)),
    "layouts that are not checked": Bad(lambda p: ["calibrate", "--layouts", "3"], ("--layouts 3: only with --check",)),
    "layouts beside all": Bad(
        lambda p: ["calibrate", "--check", "here.toml", "--layouts", "3", "--pick", "2"], ("--layouts 3: --pick",)),
    "checkpoints of no model": Bad(lambda p: ["bench", "checkpoint", "--model", "tinny"], ("did you mean 'tiny'?",)),
    "a goodput into no folder": Bad(lambda p: ["goodput", "--out", "none/g.svg"], ("there is no folder none",)),
    "a fit into no folder": Bad(lambda p: ["validate", ".", "--fit", "none/c.toml"], ("there is no folder none",)),
    "a seed of nothing": Bad(lambda p: ["simulate", "--seed", "4"], ("--seed 4: only of --jitter",)),
    "waiting for messages that take no time": Bad(lambda p: ["simulate", "--blocking"], ("--blocking: messages",)),
    "slices of nothing": Bad(lambda p: ["simulate", "--schedule", "zb-auto", "--slices", "4"], ("--slices 4",)),
    "a file's schedule on more ranks": Bad(
        lambda p: ["simulate", "--csv", p.toml, "--pp", "8"], ("--pp 8: --csv determines",)),
    "a table that is drawn": Bad(lambda p: ["simulate", "--check", ".", "--out", "a.svg"], ("--out a.svg: --check",)),
    "spares and how many there should be": Bad(
        lambda p: ["goodput", "--spares", "3", "--availability", "0.9999"], ("--availability 0.9999",)),
    "records that are none": Bad(
        lambda p: ["report", damaged(p, "metrics.jsonl", b'[1]\n{"step": 1}\n')], ("metrics.jsonl, line 1",)),
    "a record of another kind": Bad(
        lambda p: ["report", damaged(p, "metrics.jsonl", b'{"step": 1}\n')], ("it is no record of a step",)),
    "records in no text": Bad(
        lambda p: ["report", damaged(p, "metrics.jsonl", b'"\xff"\n{}\n')], ("it is no record of a step",)),
    "a report of no run": Bad(lambda p: ["report", p.corpus], ("is not a run folder",)),
}  # fmt: skip
NEWEST = Path("checkpoints/step-00000002/rank-00000.safetensors")


def damaged(p: Place, name: str | Path, content: bytes) -> Path:
    """A copy of the run with one file replaced."""
    folder = p.copy(f"damaged-{len(list(p.folder.iterdir()))}")
    (folder / name).write_bytes(content)
    return folder


def other_model(p: Place) -> Path:
    """A copy of the run whose config describes a smaller model than its checkpoints hold."""
    smaller = (p.run() / "run.toml").read_text().replace("layers = 2", "layers = 1").replace("ffn = 64", "ffn = 32")
    return damaged(p, "run.toml", smaller.encode())


@pytest.mark.parametrize("name", CASES)
def test_one_clear_message(name, place, capfd, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.chdir(place.folder)
    place.run()
    words = [str(word) for word in CASES[name].words(place)]
    before = tree(place.folder)
    capfd.readouterr()
    code = main(words)
    said = capfd.readouterr().err
    assert code == 2, said
    assert all(text in said for text in CASES[name].says), said
    assert "Traceback" not in said and said.count("shoal: error: ") == 1, said
    assert tree(place.folder) == before  # nothing was begun, and no run was touched


def tree(folder: Path) -> dict[Path, tuple[int, int]]:
    """Every file and folder below, but for the cache of tokens."""
    return {
        path: (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else (0, 0)
        for path in folder.rglob("*") if "cache" not in path.relative_to(folder).parts
    }
