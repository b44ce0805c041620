"""Files are data: nothing in one is run, none leads out of its folder, what is written is the user's alone, and secrets
of the environment stay there."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import pickle
import re
import shutil
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import shoal
from shoal.base.errors import UsageError, redact
from shoal.base.files import json_lines
from shoal.cli.main import main
from shoal.engine.checkpoint import CheckpointError, load, verify
from shoal.engine.data.batches import open_dataset
from shoal.launch.prefork import safe_environment
from shoal.spec.config import build_config, load_config
from shoal.training.check import check
from shoal.training.resilience.events import read_events
from tests.engine.checkpoint.cuts import whole, write_checkpoint
from tests.place import CONFIG, Place
from tests.trainings.runs import ROOT
from tests.trainings.runs import shoal as run_shoal

SHOAL = ROOT / "shoal"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return Place(tmp_path_factory.mktemp("security"))


# ---- no file is run --------------------------------------------------------------------------------------------------

RUNS_CODE = {"eval", "exec", "compile", "__import__"}
UNPICKLES = {"pickle", "cPickle", "dill", "marshal", "shelve", "joblib", "yaml"}
BETWEEN_PROCESSES = {
    SHOAL / "launch" / name for name in ("worker_pool.py", "pool_worker.py")
}  # a parent and its children, by a pipe that no one else has


BY_NAME = SHOAL / "engine" / "checkpoint" / "dcp.py"  # torch's own format, with a list of what a pickle may name

OF_OBJECTS = {name for name in dir(torch.distributed) if "object" in name and not name.startswith("_")}
BY_LOOPBACK = {SHOAL / "labs" / "autoshard" / "execute.py"}  # `shoal plan auto --check`, between processes of its own


def dotted(node: ast.expr) -> str:
    """A name with dots, or nothing."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_no_source_unpickles_or_runs_text():
    found, looked = [], 0
    # A tree of each file would take seconds: only a file with one of the names can do it.
    called, named = ("|".join(each) for each in (RUNS_CODE | {"load"}, UNPICKLES | OF_OBJECTS | {"trust_remote_code"}))
    suspect = re.compile(rf"\b(({called})\s*\(|({named})\b)")
    for path in sorted(SHOAL.rglob("*.py")):
        source = path.read_text()
        if not suspect.search(source):
            continue
        looked += 1
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and node.attr in OF_OBJECTS and path not in BY_LOOPBACK:
                found.append(f"{path}:{node.lineno}: {node.attr} unpickles what a peer sends")
            names = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            names |= {node.module} if isinstance(node, ast.ImportFrom) and node.module else set()
            called = dotted(node.func) if isinstance(node, ast.Call) else ""
            if (names & UNPICKLES and path not in {*BETWEEN_PROCESSES, BY_NAME}) or called in {*RUNS_CODE, "np.load"}:
                found.append(f"{path}:{node.lineno}: {called or names}")
            if called == "torch.load" and (path != BY_NAME or "weights_only=True" not in ast.unparse(node)):
                found.append(f"{path}:{node.lineno}: {called}")
            if path == BY_NAME and called in {"pickle.load", "pickle.loads", "pickle.Unpickler"}:
                found.append(f"{path}:{node.lineno}: {called}")
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                found.append(f"{path}:{node.value.lineno}: trust_remote_code")
    assert not found and looked > 20


class Payload:
    """Touches a file when it is unpickled."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


def payloads(canary: Path) -> list[bytes]:
    """The same deed in each of the languages that some reader of files somewhere runs."""
    act = f"__import__('os').mkdir({str(canary)!r})"
    return [
        pickle.dumps(Payload(canary)),
        f"!!python/object/apply:os.mkdir [{canary}]\n".encode(),
        f"import os; os.mkdir({str(canary)!r})\n".encode(),
        json.dumps({"__reduce__": act, "auto_map": {"AutoTokenizer": act}, "py/object": "os.mkdir", "x": act}).encode(),
        f'x = "{{{{ {act} }}}}"\n[model]\nname = "{act}"\n'.encode(),
    ]


def test_what_is_planted_in_a_file_is_not_run(place, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    canary = tmp_path / "canary"
    Payload(canary).__reduce__()[0](str(canary))  # the deed works,
    canary.rmdir()  # and is undone
    run = place.run()
    inside = Path("checkpoints/step-00000002")
    files = [path.relative_to(run) for path in sorted(run.rglob("*")) if path.is_file()]
    files = [file for file in files if file.parent == inside or "checkpoints" not in file.parts]
    assert len(files) >= 7
    files += [inside / name for name in (".metadata", "data.pkl", "model.pt")] + [Path("sitecustomize.py")]
    pickled, *texts = payloads(canary)
    for number, file in enumerate(files):
        for content in (pickled, texts[number % len(texts)]):
            folder = tmp_path / "run"
            shutil.copytree(run, folder)
            (folder / file).write_bytes(content)
            for words in (["checkpoint", "verify", folder / inside], ["sample", folder, "def", "--max-tokens", "1"]):
                assert main([str(word) for word in words]) in (0, 2)
            with suppress(UsageError):  # as `shoal train --resume` does, whose options take long to read
                config = load_config(folder / "run.toml")
                train = config.train.model_copy(update={"global_batch": 4})
                shoal.train(config.model_copy(update={"train": train}), resume=folder)
            assert not canary.exists(), (file, content)
            shutil.rmtree(folder)


def test_what_is_planted_in_a_checkpoint_of_torch_is_not_run(place, tmp_path, capfd):
    canary, model, run = tmp_path / "canary", tmp_path / "model", place.run()
    assert main(["export", "hf", str(run), "--out", str(model), "--weights", "dcp"]) == 0
    words = ["eval", str(model), "--data", str(place.corpus), "--limit", "1"]
    assert main(words) == 0
    for file in (".metadata", "__0_0.distcp"):
        good = (model / file).read_bytes()
        for content in payloads(canary):
            (model / file).write_bytes(content + bytes(max(0, len(good) - len(content))))
            assert main(words) == 2
            assert not canary.exists()
        (model / file).write_bytes(good)


@pytest.mark.parametrize("kind", ["tokenizer", "text", "jsonl", "parquet", "config", "catalog", "tokens"])
def test_what_is_planted_in_input_is_not_run(kind, place, tmp_path, capfd):
    canary = tmp_path / "canary"
    for number, content in enumerate(payloads(canary)):
        file = tmp_path / f"{number}.{kind}"
        file.write_bytes(content)
        config = CONFIG.format(corpus=place.corpus, cache=tmp_path / "cache")
        good = tmp_path / "good.toml"
        good.write_text(config)
        words = {
            "tokenizer": ["data", "inspect", good, "--data.tokenizer", file],
            "config": ["train", file], "catalog": ["estimate", "--catalog", file], "tokens": ["data", "inspect", good],
        }.get(kind, ["data", "inspect", good, "--data.source", kind, "--data.paths", file])
        if kind == "tokens":
            assert main(["data", "inspect", str(good)]) == 0
            for shard in (tmp_path / "cache").rglob("*.*"):
                if shard.is_file():
                    shard.write_bytes(content)
        assert main([str(word) for word in words]) in (0, 2)
        assert not canary.exists()
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)


# ---- no path leads out -----------------------------------------------------------------------------------------------


def seal(path: Path, manifest: dict) -> None:
    """Write a manifest with the checksum that it should have."""
    content = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(content)
    (path / "manifest.sha256").write_text(f"{hashlib.sha256(content).hexdigest()}  manifest.json\n")


@pytest.fixture
def checkpoint(tmp_path) -> tuple[Path, Path, dict]:
    """A checkpoint whose tensors lie, well-formed, outside of its folder; the file, and the manifest."""
    import torch

    path = write_checkpoint(tmp_path / "step-00000001", [whole({"w": torch.ones(4)})])
    outside = tmp_path / "outside.safetensors"
    (path / "rank-00000.safetensors").rename(outside)
    return path, outside, json.loads((path / "manifest.json").read_text())


@pytest.mark.parametrize("name", ["../outside.safetensors", "{outside}", "../../{folder}/outside.safetensors",
                                  "rank-00000.safetensors/../../outside.safetensors", "rank-00000.safetensors\n"])
def test_a_name_in_a_manifest_cannot_leave_its_folder(name, checkpoint):
    path, outside, manifest = checkpoint
    name = name.format(outside=outside, folder=path.parent.name)
    manifest["files"] = {name: manifest["files"].pop("rank-00000.safetensors")}
    manifest["tensors"]["w"]["boxes"][0]["file"] = name
    seal(path, manifest)
    assert refused(path) == "manifest"


def test_a_link_cannot_leave_its_folder(checkpoint):
    path, outside, _ = checkpoint
    (path / "rank-00000.safetensors").symlink_to(outside)
    assert refused(path) == "a link out of the checkpoint's folder"


def refused(path: Path) -> str:
    """What both readers say, in short."""
    import torch

    state = whole({"w": torch.zeros(4)})
    for read in (lambda: verify(path), lambda: load(path, state)):
        with pytest.raises(CheckpointError) as error:
            read()
    assert state["w"][0].tensor.sum() == 0
    return next(what for what in ("a link out of the checkpoint's folder", "manifest") if what in str(error.value))


@pytest.mark.parametrize("how", ["../outside.bin", "{outside}", "link"])
def test_a_shard_cannot_leave_its_folder(how, place, tmp_path):
    config = build_config({"data": {"source": "text", "paths": [str(place.corpus)], "cache": str(tmp_path / "cache"),
                             "sequence_length": 8}}).data
    open_dataset(config, seed=0, split="train")
    (folder,) = (path for path in (tmp_path / "cache" / "shards").iterdir() if path.is_dir())
    manifest = json.loads((folder / "manifest.json").read_text())
    shard = manifest["splits"]["train"]["shards"][0]
    outside = folder.parent / "outside.bin"
    (folder / shard["name"]).rename(outside)
    if how == "link":
        (folder / shard["name"]).symlink_to(outside)
    else:
        shard["name"] = how.format(outside=outside)
        (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="damaged shard"):
        open_dataset(config, seed=0, split="train")


LINKED = ("metrics.jsonl", "events.jsonl", "processes.json", "logs/rank-0.log", "logs", "tensorboard", "profile",
          "histograms", "checkpoints")  # fmt: skip


def test_no_link_in_a_run_folder_is_written_through(place, tmp_path, capfd):
    outside = tmp_path / "outside"
    shutil.copytree(place.run(), outside)
    (outside / "profile").mkdir()
    (outside / "profile" / "rank-00000.jsonl").write_text("theirs")
    before = {path: (path.lstat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in outside.rglob("*")}
    for name in LINKED:
        folder = place.copy(f"linked-{name.replace('/', '-')}")
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(outside / name)
        words = ["train", "--resume", folder, "--train.steps", "3", "--metrics.profile", "--metrics.profile_after", "1"]
        assert main([str(word) for word in words]) == 2
        assert f"{path} is a symbolic link" in capfd.readouterr().err
    (folder := place.copy("linked-report")).joinpath("report.html").symlink_to(outside / "run.toml")
    assert main(["report", str(folder)]) == 2
    assert "report.html: it is a symbolic link" in capfd.readouterr().err
    (tmp_path / "mine").symlink_to(place.copy("linked-whole"))  # which the user named
    assert main(["report", str(tmp_path / "mine")]) == 0
    after = {path: (path.lstat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in outside.rglob("*")}
    assert after == before


# ---- what is written -------------------------------------------------------------------------------------------------

SECRETS = {
    "HF_TOKEN": "hf_planted_a1", "AWS_SECRET_ACCESS_KEY": "aws/planted+b2", "WANDB_API_KEY": "wandb-planted-c3",
    "DATABASE_PASSWORD": "planted d4", "github_pat": "pat_planted_e5",
}  # fmt: skip


def test_a_run_is_private_and_keeps_secrets(place, tmp_path, monkeypatch):
    """Under the mask that most users have (see `tests.trainings.forked`), with secrets in the environment."""
    folder = tmp_path / "run"
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    words = ["train", place.toml, "--run-folder", folder, "--profile", "--metrics.profile_after", "1",
             "--train.steps", "4", "--checkpoint.every", "2"]
    code, output = run_shoal(*words)
    assert code == 0, output
    assert main(["report", str(folder)]) == 0
    written = [folder, *folder.rglob("*")]
    assert len(written) > 15
    open_to_others = [path for path in written if stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert open_to_others in ([], [folder / "report.html"])  # which this process made, with a mask of its own
    said = output.encode() + b"".join(path.read_bytes() for path in written if path.is_file())
    assert [name for name, value in SECRETS.items() if value.encode() in said] == []


def test_a_message_shows_no_secret(place, capfd, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(place.toml), "--data.paths", f"/data?token={SECRETS['HF_TOKEN']}"]) == 2
    said = capfd.readouterr().err
    assert "[HF_TOKEN]" in said and SECRETS["HF_TOKEN"] not in said
    assert "data.paths" in said and "whose name marks it as secret" in said


def test_a_secret_in_a_config_is_refused(monkeypatch):
    config = build_config({"data": {"source": "hub", "dataset": "owner/name?planted-secret-9"}})
    check(config)
    monkeypatch.setenv("MY_SECRET", "planted-secret-9")
    with pytest.raises(UsageError, match=r"data.dataset = 'owner/name\?\[MY_SECRET\]' contains the value"):
        check(config)


@pytest.mark.parametrize(("name", "secret"), [
    ("HF_TOKEN", True), ("AWS_SECRET_ACCESS_KEY", True), ("OPENAI_API_KEY", True), ("PGPASSWORD", True), ("KEY", True),
    ("MYSQL_PWD", True), ("SSH_PASSPHRASE", True), ("SMTP_AUTH", True), ("AUTH", True), ("DB_PASS", True),
    ("SLACK_WEBHOOK_URL", True), ("PWD", False), ("OLDPWD", False), ("SSH_AUTH_SOCK", False), ("XAUTHORITY", False),
    ("COMPASS", False), ("MONKEY", False), ("KEYBOARD", False), ("PATH", False), ("HOME", False),
    ("TOKENIZERS_PARALLELISM", True),
])
def test_which_names_are_secret(name, secret):
    assert (redact("it says abcdefgh", {name: "abcdefgh"}) == f"it says [{name}]") == secret
    assert redact("it says true", {name: "true"}) == "it says true"  # too short to be one


def test_the_password_of_an_address_is_secret_whatever_its_variable_is_called():
    proxy = {"HTTPS_PROXY": "http://ann:p@ss-word@proxy:3128"}
    assert redact(f"no answer from {proxy['HTTPS_PROXY']}", proxy) == "no answer from http://[credentials]@proxy:3128"
    assert redact("wrong: p@ss-word", proxy) == "wrong: [HTTPS_PROXY]"
    assert redact("redis://:planted@host/0", {}) == "redis://[credentials]@host/0"
    for harmless in ("http://host:80/x@y", "hdfs://ann@host/x", "s3://bucket/a:b@c", "see http://a:1, or ann@host"):
        assert redact(harmless, {}) == harmless


def test_an_address_with_a_password_is_refused_in_a_config():
    message = r"checkpoint.folder = 'ftp://\[credentials\]@host/x' contains .* the password"
    with pytest.raises(UsageError, match=message):
        check(build_config({"checkpoint": {"folder": "ftp://ann:planted@host/x"}}))


# ---- hostile files ---------------------------------------------------------------------------------------------------


def test_sizes_that_a_manifest_claims_are_compared_before_anything_is_allocated(checkpoint, capsys):
    path, outside, manifest = checkpoint
    outside.rename(path / "rank-00000.safetensors")
    entry, tensor = manifest["files"]["rank-00000.safetensors"], manifest["tensors"]["w"]
    for claim in (
        lambda: entry.update(header_bytes=2**40), lambda: tensor.update(shape=[2**62]),
        lambda: tensor["boxes"][0].update(shape=[2**62]),
    ):  # fmt: skip
        claim()
        seal(path, manifest)
        for command in ("verify", "inspect"):
            code = main(["checkpoint", command, str(path)])
            assert code == 2 or (command, entry["header_bytes"]) == ("inspect", 2**40)
        with pytest.raises(UsageError):
            shoal.load_checkpoint(path)


def test_what_a_terminal_would_obey_is_escaped(tmp_path, capsys):
    path = write_checkpoint(tmp_path / "step-00000001", [whole({"w\x1b]0;title\x07\u202e": torch.ones(4)})])
    assert main(["checkpoint", "inspect", str(path)]) == 0
    assert main(["checkpoint", "verify", str(tmp_path / "a\x1b[2Jb")]) == 2
    said = capsys.readouterr()
    assert r"\x1b]0;title\x07\u202e" in said.out and r"a\x1b[2Jb" in said.err
    assert "\x1b" not in said.out + said.err


def test_a_damaged_file_is_one_message(tmp_path):
    path = write_checkpoint(tmp_path / "step-00000001", [whole({f"w{i}": torch.ones(4) for i in range(5)})])
    file = path / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-80] + bytes([7]) * 80)
    with pytest.raises(CheckpointError) as error:
        verify(path)
    assert "tensor 'w0' at [0:4] is not what was written, nor 4 others of 5" in str(error.value)
    assert str(error.value).count("\n") == 1


def test_nothing_is_imported_from_the_current_folder(tmp_path):
    for name in ("rich", "psutil", "pydantic", "tyro"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "simulate"], cwd=tmp_path, capture_output=True,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-c", "import rich, sys; sys.exit(0)"]
    assert subprocess.run(command, cwd=tmp_path, env=safe_environment(environment)).returncode == 0


@pytest.mark.parametrize("damage", [{"event": 1}, {"event": "\ud800"}, {"time": None}, {"seconds": float("inf")}])
def test_a_damaged_event_is_left_out(damage, tmp_path, capsys):
    event = {"time": 1.0, "event": "end", "seconds": 3.0, "counted": 2.0, "failures": 1, "lost": 1}
    (tmp_path / "events.jsonl").write_text(json_lines([event, event | damage]))
    assert read_events(tmp_path) == [event]
    assert "left out line 2" in capsys.readouterr().err
