"""What is fuzzed: the loader of configs, the readers of checkpoints and data, and commands (`tests.fuzz.commands`).

Each target draws a case, and reads it. Nothing but a `UsageError` may come out, within `SECONDS`.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, get_args

import torch
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.engine.checkpoint import load, verify
from shoal.engine.checkpoint.load import describe_checkpoint, load_checkpoint
from shoal.engine.checkpoint.manifest import MANIFEST, MANIFEST_SUM, checksum
from shoal.engine.data.batches import open_dataset
from shoal.engine.data.tokenizer import load_tokenizer, train_bpe
from shoal.engine.device import pick_device
from shoal.launch.checks.memory import check_memory
from shoal.spec.config import RunConfig, build_config, load_config
from shoal.training.check import check
from tests.engine.checkpoint.cuts import cut, whole, write_checkpoint
from tests.fuzz.commands import COMMAND_TARGETS, command_target
from tests.fuzz.wild import WILD, WORDS, changed, changed_bytes, put, toml

SECONDS = 20  # of CPU, for one case: on a busy machine the clock on the wall says nothing


class Stuck(BaseException):
    """A case that does not end."""


@contextmanager
def limited() -> Iterator[None]:
    """Stop what takes more than `SECONDS`, or waits for ever."""

    def stop(*_: object) -> None:
        raise Stuck

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, SECONDS), signal.SIGALRM: (signal.ITIMER_REAL, 30 * SECONDS)}
    former = {which: signal.signal(which, stop) for which in timers}
    for timer, seconds in timers.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for which, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(which, former[which])


def outcome(read: Callable[[], object]) -> str:
    """``accepted`` or ``refused``; whatever else is raised is found by the caller."""
    with limited():
        try:
            read()
        except UsageError as error:
            assert str(error).strip(), "an error that says nothing"
            return "refused"
    return "accepted"


# ---- configs ---------------------------------------------------------------------------------------------------------

FIELDS = [
    (section, key, field) for section, part in RunConfig.model_fields.items()
    for key, field in part.annotation.model_fields.items()
]  # fmt: skip
GOOD = '''[model]
name = "tiny"
layers = 4
[parallel]
dp = 2
tp = 2
zero = 1
[data]
source = "synthetic"
sequence_length = 64
[optimizer]
betas = [0.9, 0.95]
lr_factors = { "embed.*" = 0.5 }
'''


@st.composite
def some_config(draw: Callable) -> bytes:
    """A config's file: fields with plausible or wild values, or a good file with some bytes changed."""
    if draw(st.integers(0, 2)) == 0:
        return draw(changed_bytes(GOOD.encode()))
    values: dict[str, Any] = {"data": {"source": "synthetic"}}
    for section, key, field in draw(st.lists(st.sampled_from(FIELDS), max_size=6)):
        choices = [word for word in get_args(field.annotation) if isinstance(word, (str, int))]
        good = st.sampled_from(choices) if choices else st.one_of(st.integers(0, 8), st.booleans(), st.floats(0, 2))
        value = draw(st.one_of(good, good, good, WILD))
        values.setdefault(draw(st.sampled_from([section] * 9 + ["trian"])), {})[key] = value
    if draw(st.integers(0, 9)) == 0:
        values[draw(WORDS)] = draw(WILD)
    return toml(values).encode(errors="surrogatepass")


def read_config(content: bytes, folder: Path) -> str:
    """As `shoal train` does before anything is made."""
    file = folder / "run.toml"
    file.write_bytes(content)

    def read() -> None:
        config = load_config(file)
        ranks = range(config.parallel.world_size)
        check_memory(config, check(config), pick_device("cpu"), ranks)

    return outcome(read)


# ---- checkpoints -----------------------------------------------------------------------------------------------------

VALUES = {
    "model.w": torch.arange(24.0).reshape(4, 6),
    "model.b": torch.ones(6, dtype=torch.bfloat16),
    "optimizer.count": torch.tensor(3),
}  # fmt: skip


class Original:
    """The files of one good checkpoint."""

    def __init__(self, folder: Path):
        self.path = write_checkpoint(folder / "good", cut(Random(1), VALUES, 2), extra={"model": {"layers": 2}})
        self.files = {file.name: file.read_bytes() for file in sorted(self.path.iterdir())}
        self.manifest = json.loads(self.files[MANIFEST])
        self.tensors = [name for name in self.files if name.endswith(".safetensors")]


@st.composite
def some_checkpoint(draw: Callable, good: Original) -> dict[str, bytes | str | None]:
    """The files of a checkpoint: their bytes, where a link leads, or None for a folder in its place.

    A forger knows how checksums are made: after a change of the manifest or of a file's header they fit again.
    """
    files: dict[str, bytes | str | None] = dict(good.files)
    how = draw(st.sampled_from(["none", "bytes", "manifest", "manifest", "header", "link", "gone"]))
    name = draw(st.sampled_from(sorted(files)))
    if how == "none":
        return files
    if how == "bytes":
        files[name] = draw(changed_bytes(good.files[name]))
    elif how == "manifest":
        _seal(files, draw(changed(good.manifest)))
    elif how == "header":
        name = draw(st.sampled_from(good.tensors))
        size = int.from_bytes(good.files[name][:8], "little")
        header = json.loads(good.files[name][8 : 8 + size])
        text = json.dumps(draw(changed(header))).encode()
        length = draw(st.one_of(st.just(len(text)), st.sampled_from([0, 1, 2**31, 2**40, 2**63, 2**64 - 1])))
        files[name] = length.to_bytes(8, "little") + text + good.files[name][8 + size :]
        manifest = json.loads(good.files[MANIFEST])
        entry = manifest["files"][name]
        entry["bytes"], entry["header_bytes"] = len(files[name]), 8 + len(text)
        entry["header"] = checksum(files[name][: 8 + len(text)])
        _seal(files, manifest)
    elif how == "link":
        files[name] = draw(st.sampled_from(["/etc/passwd", "/dev/zero", "/dev/full", "..", "nowhere", name]))
    elif draw(st.booleans()):
        files[name] = None
    else:
        del files[name]
    return files


def _seal(files: dict[str, Any], manifest: Any) -> None:
    files[MANIFEST] = json.dumps(manifest).encode()
    files[MANIFEST_SUM] = f"{hashlib.sha256(files[MANIFEST]).hexdigest()}  {MANIFEST}\n".encode()


def read_checkpoint(files: dict[str, bytes | str | None], folder: Path) -> str:
    """As `shoal checkpoint` and a resumed run do."""
    path = folder / "step-00000001"
    put(path, files)
    state = whole({name: torch.zeros_like(tensor) for name, tensor in VALUES.items()})
    reads: tuple[Callable[[], object], ...] = (
        lambda: verify(path), lambda: describe_checkpoint(path), lambda: load_checkpoint(path),
        lambda: load(path, state, model={"layers": 2}),
    )
    found = {outcome(read) for read in reads}
    return "refused" if "refused" in found else "accepted"


# ---- data ------------------------------------------------------------------------------------------------------------


class Corpora:
    """Good texts of every kind, a tokenizer, and the tokens of one corpus."""

    def __init__(self, folder: Path):
        import pyarrow
        import pyarrow.parquet

        folder.mkdir(parents=True)
        rows = [{"text": f"row {number} {'of words ' * 9}"} for number in range(60)]
        jsonl = "".join(json.dumps(row) + "\n" for row in rows).encode()
        table = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
        self.texts = {"text": jsonl, "jsonl": jsonl, "parquet": table.getvalue()}
        train_bpe((row["text"] for row in rows), 270, folder / "tokenizer.json")
        self.tokenizer = json.loads((folder / "tokenizer.json").read_text())
        (folder / "corpus.jsonl").write_bytes(jsonl)
        self.good = {"data": {
            "source": "jsonl", "paths": [str(folder / "corpus.jsonl")], "cache": str(folder / "cache"),
            "sequence_length": 16, "validation_fraction": 0.3,
        }}
        open_dataset(build_config(self.good).data, seed=0, split="train")
        (self.shards,) = (path for path in (folder / "cache" / "shards").iterdir() if path.is_dir())
        self.files = {file.name: file.read_bytes() for file in self.shards.iterdir()}
        self.listings = list((folder / "cache" / "listings").iterdir())


@st.composite
def some_data(draw: Callable, good: Corpora) -> tuple[str, Any]:
    """A kind of file, and what is in it."""
    kind = draw(st.sampled_from(["text", "jsonl", "parquet", "tokenizer", "tokenizer", "tokens", "tokens", "listing"]))
    if kind == "tokenizer":
        if draw(st.booleans()):
            return kind, json.dumps(draw(changed(good.tokenizer, most=2))).encode()
        return kind, draw(changed_bytes(json.dumps(good.tokenizer).encode()))
    if kind == "listing":
        return kind, draw(st.one_of(st.binary(max_size=40), st.just(b"0" * 32)))
    if kind == "tokens":
        files: dict[str, Any] = dict(good.files)
        name = draw(st.sampled_from(sorted(files)))
        how = draw(st.sampled_from(["bytes", "manifest", "manifest", "ids", "link", "gone"]))
        if how == "bytes":
            files[name] = draw(changed_bytes(good.files[name]))
        elif how == "manifest":
            files["manifest.json"] = json.dumps(draw(changed(json.loads(good.files["manifest.json"])))).encode()
        elif how == "ids":  # with checksums that fit
            import xxhash

            manifest = json.loads(good.files["manifest.json"])
            shard = manifest["splits"]["train"]["shards"][0]
            content = draw(changed_bytes(good.files[shard["name"]]))
            files[shard["name"]], shard["checksum"] = content, xxhash.xxh3_64_hexdigest(content)
            shard["tokens"] = manifest["splits"]["train"]["tokens"] = len(content) // 2
            files["manifest.json"] = json.dumps(manifest).encode()
        elif how == "link":
            files[name] = draw(st.sampled_from(["/etc/passwd", "/dev/zero", "/dev/full", "..", "nowhere", name]))
        else:
            files.pop(name)
        return kind, files
    return kind, draw(changed_bytes(good.texts[kind]))


def read_data(case: tuple[str, Any], good: Corpora, folder: Path) -> str:
    """As a run does: both splits are opened, and a batch is read."""
    kind, content = case
    values = {**good.good["data"]}
    if kind == "tokens":
        put(good.shards, content)
    elif kind == "listing":
        for listing in good.listings:
            listing.write_bytes(content)
    elif kind == "tokenizer":
        (folder / "tokenizer.json").write_bytes(content)
        values |= {"tokenizer": str(folder / "tokenizer.json"), "cache": str(folder / "cache")}
    else:
        (folder / f"corpus.{kind}").write_bytes(content)
        values |= {"source": kind, "paths": [str(folder / f"corpus.{kind}")], "cache": str(folder / "cache")}
    config = build_config({"data": values}).data

    def read() -> None:
        if kind == "tokenizer":
            tokenizer = load_tokenizer(config.tokenizer)
            tokenizer.decode(tokenizer.encode("some text <|endoftext|> é").tolist())
        for split in ("train", "validation"):
            open_dataset(config, seed=0, split=split).batch([0, 1, 5])

    try:
        return outcome(read)
    finally:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        if kind == "tokens":
            put(good.shards, good.files)


# ---- all -------------------------------------------------------------------------------------------------------------


def target(name: str, folder: Path) -> tuple[st.SearchStrategy, Callable[[Any], str]]:
    """What draws the cases of a target, and what reads one."""
    if name in COMMAND_TARGETS:
        cases, run = command_target(name, folder)
        return cases, lambda case: outcome(lambda: run(case))
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    if name == "config":
        return some_config(), lambda case: read_config(case, scratch)
    if name == "checkpoint":
        return some_checkpoint(Original(folder / "good")), lambda case: read_checkpoint(case, scratch)
    good = Corpora(folder / "good")
    return some_data(good), lambda case: read_data(case, good, scratch)


TARGETS = ("config", "checkpoint", "data", *COMMAND_TARGETS)
