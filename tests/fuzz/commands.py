"""Commands that are fuzzed: on damaged run folders, schedules, catalogs and model folders, and with random words.

Each case is one command in this process. It returns a code, or a clear error and 2; it starts no process, shows no
control character, and changes no file but those that it was told to write.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints
from unittest.mock import patch

import torch
from hypothesis import strategies as st

import shoal
from shoal.base.errors import UsageError
from shoal.base.files import json_lines
from shoal.base.section import Section
from shoal.base.terminal import UNSAFE
from shoal.cli.commands import COMMANDS
from shoal.cli.estimate import EstimateOptions
from shoal.cli.main import main
from shoal.engine.checkpoint.manifest import MANIFEST, MANIFEST_SUM
from shoal.engine.models.transformer import Transformer, initialise
from shoal.pipeline.schedules import EVERY
from shoal.pipeline.schedules.file import dump_csv
from shoal.spec.catalog.tables import KINDS, forget, shipped
from shoal.spec.config import RunConfig, build_config, save_config
from shoal.training.run_folder import with_absolute_paths
from tests.engine.checkpoint.cuts import whole, write_checkpoint
from tests.fuzz.wild import WILD, WORDS, changed, changed_bytes, put, toml

TINY = {
    "model": {"name": "tiny", "layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 32},
    "data": {"source": "synthetic", "sequence_length": 16},
    "train": {"steps": 4, "global_batch": 2, "threads": 1, "device": "cpu"},
}
STEP = "checkpoints/step-00000002"
NEW = "new"  # begins the names of the files that commands are told to write


class Started(BaseException):
    """A command has passed its checks, and starts a process or a measurement."""


class Place:
    """A folder of good files in which commands run, beside one of others' files.

    Attributes:
        mine: folder that commands run in.
        theirs: folder of the same files, which links lead to.
    """

    def __init__(self, folder: Path):
        self.folder, self.mine, self.theirs = folder, folder / "mine", folder / "theirs"
        self.mine.mkdir(parents=True)
        config = build_config({**TINY, "checkpoint": {"every": 1}})
        save_config(config, self.mine / "good.toml")
        self.make_run(self.mine / "run", config)
        shoal.export_hf(self.mine / "run", self.mine / "model")
        (self.mine / "catalog.toml").write_text(toml(CATALOG))
        for file, name in (("schedule.csv", "1f1b"), ("other.csv", "zb-v")):
            (self.mine / file).write_text(dump_csv(program(name, 2, 3)))
        (self.mine / "text.jsonl").write_text(json_lines({"text": f"row {number}"} for number in range(99)))
        os.mkfifo(self.mine / "pipe")
        shutil.copytree(self.mine / "run", self.theirs / "run")
        (self.mine / "link.html").symlink_to(self.theirs / "run" / "run.toml")
        self.before = self.look()
        self.names = {*os.listdir(self.mine)}

    def make_run(self, run: Path, config: RunConfig) -> None:
        """Write the folder of a run of 2 steps, as on two pipeline ranks, without training."""
        run.mkdir()
        save_config(with_absolute_paths(config), run / "run.toml")
        shape = config.model.shape(vocab=257, sequence_length=16)
        initialise(model := Transformer(shape), seed=0)
        weights = {f"model.{name}": each.detach() for name, each in model.named_parameters()}
        made = write_checkpoint(run / STEP, [whole(weights)], extra={"model": shape.model_dump(mode="json")})
        assert made == run / STEP
        steps = [{"step": n, "steps": 4, "loss": 5.5, "learning_rate": 1e-3, "tokens_per_second": 9.0, "mfu": 0.1,
                  "tokens_per_second_per_rank": 9.0, "memory_bytes": 2**20, "seconds_left": 1.0, "gradient_norm": 1.0,
                  "validation_loss": 5.0, "loss_scale": 8.0} for n in (1, 2)]
        (run / "metrics.jsonl").write_text(json_lines(steps))
        events = [{"event": "failure", "rank": 1, "step": 1, "how": "killed", "attempt": 0}, {"event": "restart"},
                  {"event": "recovered", "step": 1, "lost": 1, "seconds": 2.5}, {"event": "resumed", "step": 1},
                  {"event": "end", "code": 0, "seconds": 9.0, "counted": 4.0, "failures": 1, "lost": 1}]
        (run / "events.jsonl").write_text(json_lines({"time": 1e9 + n, **each} for n, each in enumerate(events)))
        tensors = [{"kind": "weights", "name": "norm.weight", "first": 437, "counts": [1, 0, 15]}]
        (run / "histograms").mkdir()
        (run / "histograms/step-00000002.json").write_text(json.dumps({"step": 2, "tensors": tensors}))
        (run / "profile").mkdir()
        played = program("1f1b", 2, 2)
        described = {name: value for name, value in asdict(played).items() if name != "actions"}
        for rank, actions in enumerate(played.actions):
            moments = {f: [0.01 * i + late for i in range(len(actions))]
                       for f, late in (("begin", 0.001), ("arrived", 0.002), ("end", 0.009))}
            lines = [{"rank": rank, "pp": rank, "dp": 0, "tp": 0, "layout": "pp 2", "device": "cpu",
                      "program": described, "actions": actions}, {"step": 1, **moments}]
            (run / f"profile/rank-{rank:05}.jsonl").write_text(json_lines(lines))

    def look(self) -> dict[str, tuple[int, int]]:
        """Size and time of each file that no command may change."""
        found = {}
        for folder, names, files in os.walk(self.folder):
            names[:] = [name for name in names if not name.startswith((NEW, "cache"))]
            for name in files:
                if not name.startswith((NEW, "report.html")):
                    state = os.lstat(path := os.path.join(folder, name))
                    found[path] = state.st_size, state.st_mtime_ns
        return found

    def run(self, *words: str | Path) -> None:
        """Run one command in the folder ``mine``.

        Raises:
            UsageError: it refused its input.
            AssertionError: it changed a file of others, or showed a control character.
        """
        said, former = io.StringIO(), os.getcwd()
        os.chdir(self.mine)
        try:
            with patch.multiple(subprocess.Popen, __init__=_start), patch("os.fork", _start), \
                    patch("shoal.calibrate", _start), patch("shoal.cli.bench.show_progress", _start), \
                    patch("shoal.report.server.PageServer.run", _start), \
                    redirect_stdout(said), redirect_stderr(said), suppress(Started):
                code = 0
                code = main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
        finally:
            os.chdir(former)
            forget()
            named = {str(word).rpartition("=")[2].partition("/")[0] for word in words}  # "1.5" names a file too
            for new in [*self.mine.iterdir()]:
                if new.name.startswith(NEW) or new.name in named - self.names:
                    shutil.rmtree(new) if new.is_dir() else new.unlink()
        assert code in (0, 1, 2), code
        assert not (unsafe := UNSAFE.search(said.getvalue())), (unsafe, said.getvalue())
        now = self.look()
        touched = {path for path in now.keys() | self.before.keys() if now.get(path) != self.before.get(path)}
        assert not touched, touched
        if code == 2:
            raise UsageError(said.getvalue())


def _start(*_: object, **__: object) -> None:
    raise Started


def program(schedule: str, ranks: int, microbatches: int) -> Any:
    """A small pipeline program."""
    return shoal.build_program(EVERY[schedule], ranks=ranks, microbatches=microbatches)


# ---- run folders and model folders -----------------------------------------------------------------------------------


def read_folder(folder: Path) -> dict[str, bytes]:
    """The files below a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@st.composite
def some_damage(draw: Callable, good: dict[str, bytes], theirs: Path) -> dict[str, Any]:
    """Up to two of the files damaged: other values or bytes, or what `put` makes in their place; "" for none."""
    damage: dict[str, Any] = {}
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2]))):
        name = draw(st.sampled_from(sorted(good)))
        match draw(st.sampled_from(["values"] * 6 + ["bytes", "bytes", "special", "gone"])):
            case "values":
                damage[name] = _other_values(draw, name, good[name])
            case "bytes":
                damage[name] = draw(changed_bytes(good[name]))
            case "gone":
                damage[name] = ""
            case _:  # a link, a folder or a pipe, in place of a file or of its folder
                name = draw(st.sampled_from([name, str(Path(name).parent)])) if "/" in name else name
                places = [str(theirs / name), "/dev/zero", "/etc/passwd", "..", "nowhere", name, None, "|"]
                damage[name] = draw(st.sampled_from(places))
    return damage


def damaged(good: dict[str, bytes], damage: dict[str, Any]) -> dict[str, Any]:
    """The files with this damage; the checksum of a manifest fits, as a forger knows how it is made."""
    special = [name for name in damage if name not in good]
    files = {name: content for name, content in (good | damage).items()
             if content != "" and not any(name.startswith(f"{each}/") for each in special)}
    if isinstance(manifest := files.get(f"{STEP}/{MANIFEST}"), bytes) and f"{STEP}/{MANIFEST_SUM}" not in damage:
        files[f"{STEP}/{MANIFEST_SUM}"] = f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()
    return files


def _other_values(draw: Callable, name: str, content: bytes) -> bytes:
    """The content with other values, where its format has some."""
    kind = name.rpartition(".")[2]
    if kind == "toml":
        return toml(draw(changed(tomllib.loads(content.decode()), most=1))).encode(errors="surrogatepass")
    if kind == "json":
        return json.dumps(draw(changed(json.loads(content), most=1))).encode()
    if kind == "jsonl":
        lines = [json.loads(line) for line in content.splitlines()]
        return json_lines(draw(changed(lines)) or []).encode() if draw(st.booleans()) else json_lines(
            [*lines[:-1], draw(changed(lines[-1], most=1))]).encode()
    if kind == "safetensors":
        size = int.from_bytes(content[:8], "little")
        header = json.dumps(draw(changed(json.loads(content[8 : 8 + size])))).encode()
        length = draw(st.sampled_from([len(header)] * 5 + [0, 1, 2**31, 2**40, 2**63, 2**64 - 1]))
        return length.to_bytes(8, "little") + header + content[8 + size :]
    return draw(changed_bytes(content))


ON_RUNS = (
    ("report", "{}"), ("report", "{}", "--out", "new.json"), ("report", "{}", "--out", "new.svg"),
    ("sample", "{}", "def", "--max-tokens", "2"), ("export", "hf", "{}", "--out", "new"),
    ("train", "--resume", "{}"), ("train", "--resume", "{}", "--train.steps", "9", "--metrics.profile"),
    ("checkpoint", "verify", "{}/" + STEP), ("checkpoint", "inspect", "{}/" + STEP),
)  # fmt: skip


def on_run(words: Sequence[str], files: dict[str, Any], place: Place) -> None:
    """One command on a damaged run folder."""
    put(place.mine / "new-run", files)
    place.run(*(word.replace("{}", "new-run") for word in words))


def on_model(files: dict[str, Any], place: Place) -> None:
    """The import of a damaged model folder, and the checks of a run that starts with it."""
    put(place.mine / "new-model", files)
    try:
        place.run("import", "hf", "new-model")
    finally:
        put(place.mine / "new-model", files)
        place.run("train", "good.toml", "--model.weights", "new-model", "--run-folder", "new")


# ---- schedules and catalogs ------------------------------------------------------------------------------------------


@st.composite
def some_schedule(draw: Callable) -> tuple[list[str], bytes]:
    """Options of ``shoal simulate``, and a schedule file with some cells moved, repeated, removed or damaged."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "dualpipev"]))
    text = dump_csv(program(name, 2, 4), transfers=draw(st.booleans()))
    content, how = text.encode(), draw(st.integers(0, 9))
    if how in (1, 2):
        content = draw(changed_bytes(content, most=2))
    elif how:
        rows = draw(changed([row.split(",") for row in text.splitlines()], most=2))
        rows = rows if isinstance(rows, list) else [rows]
        lines = [",".join(map(str, row)) if isinstance(row, list) else str(row) for row in rows]
        content = "\n".join(lines).encode(errors="surrogatepass")
    words = [("--comm", "0.5"), ("--straggler", "1=2"), ("--slow-link", "0-1=3"), ("--jitter", "0.1"), ("--dp", "2"),
             ("--compare", "1f1b"), ("--out", "new.html"), ("--out", "new.json"), ("--memory", "2")]
    return [word for pair in draw(st.lists(st.sampled_from(words), max_size=2, unique_by=lambda w: w[0]))
            for word in pair], content


def on_schedule(case: tuple[list[str], bytes], place: Place) -> None:
    """The simulation of a damaged schedule."""
    (place.mine / "new.csv").write_bytes(case[1])
    place.run("simulate", "--csv", "new.csv", *case[0])


CATALOG: dict[str, Any] = {
    kind: {"mine": {name: value for name, value in shipped(kind)[of].items() if name != "devices"}}
    for kind, of in zip(KINDS, ("h100-sxm", "nvlink-4", "H100", "tiny", "torchtitan"), strict=True)
}  # fmt: skip
CATALOG["nodes"]["mine"] |= {"accelerator": "mine", "inside": "mine", "nic": "mine"}
ON_CATALOGS = (
    ("estimate", "--model", "mine", "--cluster", "2x2xmine", "--global-batch", "8", "--parallel.pp", "2"),
    ("estimate", "--model", "mine", "--cluster", "2xmine", "--software", "mine", "--global-batch", "8"),
    ("plan", "--model", "mine", "--cluster", "2xmine", "--global-batch", "8"),
    ("simulate", "--model", "mine", "--cluster", "2x2xmine", "--pp", "4"),
)


def on_catalog(case: tuple[Sequence[str], bytes], place: Place) -> None:
    """A prediction with a damaged catalog."""
    (place.mine / "new-catalog.toml").write_bytes(case[1])
    place.run(*case[0], "--catalog", "new-catalog.toml")


# ---- command lines ---------------------------------------------------------------------------------------------------

JUNK = st.one_of(WORDS, WILD.map(str), st.sampled_from(["--", "-1", "1e400", "0x1", "None", "True", "=", "--help"]))
FILES = ("good.toml", "catalog.toml", "schedule.csv", "other.csv", "text.jsonl", "run", "model", "pipe", "link.html",
         "run/" + STEP, "run/run.toml", "missing", "missing/new.html", "new", "new.html", "new.svg", "new.toml",
         "new.json", "new.png", "")  # fmt: skip
NAMES = ("tiny", "mine", "llama-3-8b", "2xH100", "2x2xmine", "1f1b", "zb-h1", "adamw", "bf16", "fp32", "muon", "shoal",
         "torchtitan", "all", "1=2", "0-1=2", "x=2", "8", "30s", "4M", "1,2", "tp=2", "kill")  # fmt: skip
FIRST = {  # words that keep a command small, unless others replace them
    "plan": {"--model": "tiny", "--cluster": "2xH100"}, "plan auto": {"--layers": "1", "--cluster": "2xH100"},
    "goodput": {"--failures": "50"}, "estimate": {"--model": "tiny"}, "sample": {"--max-tokens": "2"},
    "verify": {"--steps": "1"}, "train": {"--run-folder": "new"}, "data train-tokenizer": {"--out": "new"},
    "export hf": {"--out": "new"}, "export gguf": {"--out": "new.gguf"}, "explain": {}, "bench": {},
}  # fmt: skip


def options_of(name: str) -> dict[str, Any]:
    """The options of a command and their types."""
    command = COMMANDS[name]
    hints = get_type_hints(getattr(import_module(command.module), command.function))
    section: type[Section] = hints.get("options", EstimateOptions if name == "estimate" else Section)
    found = {f"--{field.replace('_', '-')}": info.annotation for field, info in section.model_fields.items()}
    if "config" in hints or name == "estimate":
        fields = RunConfig.model_fields
        for part in command.config or (("parallel",) if name == "estimate" else tuple(fields)):
            inside = fields[part].annotation.model_fields
            found |= {f"--{part}.{field}": info.annotation for field, info in inside.items()}
    return found


@st.composite
def some_words(draw: Callable) -> list[str]:
    """The words of a command line: a command, and options with plausible values or junk."""
    name = draw(st.sampled_from([*COMMANDS, "train", "simulate", "plan", "estimate"]))
    given, options = dict(FIRST.get(name, {})), options_of(name)
    words = name.split()
    if draw(st.integers(0, 19)) == 0:
        words[draw(st.integers(0, len(words) - 1))] = draw(JUNK)
    if name in ("sample", "report", "import hf", "export hf", "export gguf", "checkpoint verify", "checkpoint inspect",
                "validate"):
        words += [draw(st.sampled_from(FILES))] + ["def"] * (name == "sample")
    elif name in ("explain", "bench"):
        words.append(draw(st.sampled_from(["all-reduce", "compatibility", "precision", "A[Ix] -> A[x]", "step"])))
    elif any(option.startswith("--data.") for option in options):
        words.append(draw(st.sampled_from(["good.toml"] * 9 + [*FILES])))
    for option in draw(st.lists(st.sampled_from([*options, "--help"]), max_size=4)):
        kind = options.get(option)
        if kind is bool:
            given[option] = None
            continue
        known = [str(word) for word in get_args(kind) if isinstance(word, (str, int)) and word not in ("hub", "stdlib")]
        good = st.sampled_from(known) if known else st.one_of(
            st.integers(0, 8).map(str), st.sampled_from(FILES), st.sampled_from(NAMES), st.floats(0, 2).map(str))
        given[option] = draw(st.one_of(good, good, good, JUNK))
    for option, value in given.items():
        words += [option] if value is None else [option, value] if draw(st.booleans()) else [f"{option}={value}"]
    if draw(st.integers(0, 9)) == 0:
        words.insert(draw(st.integers(0, len(words))), draw(JUNK))
    return [word for word in words if not _leads_out(word)]


def _leads_out(word: str) -> bool:
    """Whether a word names a file outside, which the command would then be right to write."""
    _, _, value = word.rpartition("=")
    return value.startswith(("/", "~")) or ".." in value or ":" in value


# ---- all -------------------------------------------------------------------------------------------------------------


def command_target(name: str, folder: Path) -> tuple[st.SearchStrategy, Callable[[Any], None]]:
    """What draws the cases of a target, and what runs one."""
    place = Place(folder / "place")
    match name:
        case "run":
            good = read_folder(place.mine / "run")
            return (st.tuples(st.sampled_from(ON_RUNS), some_damage(good, place.theirs / "run")),
                    lambda case: on_run(case[0], damaged(good, case[1]), place))
        case "model":
            good = read_folder(place.mine / "model")
            return some_damage(good, place.theirs), lambda case: on_model(damaged(good, case), place)
        case "schedule":
            return some_schedule(), lambda case: on_schedule(case, place)
        case "catalog":
            text, trees = toml(CATALOG).encode(), changed(CATALOG, most=1)
            contents = st.one_of(
                st.just(text), trees.map(lambda tree: toml(tree).encode(errors="surrogatepass")), changed_bytes(text))
            return st.tuples(st.sampled_from(ON_CATALOGS), contents), lambda case: on_catalog(case, place)
        case _:
            return some_words(), lambda case: place.run(*case)


torch.set_num_threads(1)
COMMAND_TARGETS = ("run", "model", "schedule", "catalog", "words")
