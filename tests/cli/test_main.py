"""The command line: what is typed arrives, and what cannot be is refused in a line or two with exit code 2."""

import subprocess
import sys
import types
from importlib.metadata import version
from pathlib import Path

import pytest

import shoal
from shoal.base.section import Section, plain
from shoal.cli.arguments import parse_run, split_run_file
from shoal.cli.main import main
from shoal.cli.run.chaos import ChaosOptions
from shoal.cli.run.train import TrainOptions
from shoal.engine.checkpoint.manifest import Manifest, StoredBox, StoredFile, StoredTensor
from shoal.engine.data.prepare import DataContents
from shoal.spec.config import RUN_FILE, MixtureSource, RunConfig, save_config
from shoal.spec.config.model import DepthsConfig, ExpertsConfig, LatentConfig

SECTIONS = tuple(RunConfig.model_fields)

# One value other than the default for each field, and how it is typed.
TYPED = {
    "model.name": ("gpt2-124m", ["gpt2-124m"]),
    "model.tied": (True, ["True"]),
    "model.family": ("gpt", ["gpt"]),
    "model.weights": (Path("/tmp/x y"), ["/tmp/x y"]),
    "model.qkv_bias": (True, ["True"]),
    "model.out_bias": (True, ["True"]),
    "model.sinks": (True, ["True"]),
    "model.qk_norm": (True, ["True"]),
    "model.joint_qk_norm": (True, ["True"]),
    "model.plain_qk_norm": (True, ["True"]),
    "model.chunked": (True, ["True"]),
    "model.global_rope": (False, ["False"]),
    "model.post_norm": ("only", ["only"]),
    "model.activation": ("gelu", ["gelu"]),
    "model.pattern": (("local", "global"), ["local", "global"]),
    "model.scaled_embedding": (True, ["True"]),
    "parallel.sync": ("diloco", ["diloco"]),
    "parallel.zero": (3, ["3"]),
    "parallel.schedule": ("gpipe", ["gpipe"]),
    "parallel.cp_order": ("striped", ["striped"]),
    "parallel.recompute": ("selective", ["selective"]),
    "parallel.offload": ("optimizer", ["optimizer"]),
    "parallel.sequence_slices": (4, ["4"]),
    "parallel.stage_layers": ((3, 4), ["3", "4"]),
    "parallel.bucket_mb": (0.5, ["0.5"]),
    "data.source": ("jsonl", ["jsonl"]),
    "data.validation": ({"a": "b c", "d": "e"}, ["a", "b c", "d", "e"]),
    "data.paths": (("a b", "c/*.txt"), ["a b", "c/*.txt"]),
    "data.mixture": (
        {"a": MixtureSource(paths=("b",)), "c": MixtureSource(paths=("d e",))}, ["a", "b", "c", "d e"]),
    "data.unreadable": ("skip", ["skip"]),
    "data.sampler": ("pool", ["pool"]),
    "data.validation_fraction": (0.25, ["0.25"]),
    "data.cache": (Path("/tmp/x y"), ["/tmp/x y"]),
    "parallel.tp_overlap": (True, ["True"]),
    "parallel.ep_overlap": (True, ["True"]),
    "optimizer.name": ("sgd", ["sgd"]),
    "optimizer.betas": ((0.5, 0.75), ["0.5", "0.75"]),
    "optimizer.lr_factors": ({"embed.*": 0.5, "head.*": 2.0}, ["embed.*", "0.5", "head.*", "2"]),
    "optimizer.schedule": ("wsd", ["wsd"]),
    "optimizer.decay_fraction": (0.5, ["0.5"]),
    "optimizer.min_lr_fraction": (0.5, ["0.5"]),
    "loss_scale.growth": (4.0, ["4"]),
    "float8.scales": ("row", ["row"]),
    "float8.amax": ("delayed", ["delayed"]),
    "float8.gradient": ("e4m3", ["e4m3"]),
    "float8.keep": (("layers.0.*", "*.mlp.down"), ["layers.0.*", "*.mlp.down"]),
    "metrics.sample_prompt": ("Once upon", ["Once upon"]),
    "failover.memory_folder": (Path("/tmp/x y"), ["/tmp/x y"]),
    "failover.spike_window": (9, ["9"]),
    "failover.reexecute_on": ("replica", ["replica"]),
    "failover.shrink": ("replicas", ["replicas"]),
    "train.precision": ("bf16", ["bf16"]),
    "train.attention": ("explicit", ["explicit"]),
    "train.device": ("cpu", ["cpu"]),
    "train.transport": ("backend", ["backend"]),
}


def typed(name, default):
    """A value for a field and its words on the command line."""
    if name in TYPED:
        value, words = TYPED[name]
        return value, [f"--{name}", *words]
    if isinstance(default, bool):
        section, key = name.split(".")
        return not default, [f"--{section}.no-{key}" if default else f"--{name}"]
    if isinstance(default, str):
        return "-word 1", [f"--{name}=-word 1"]
    if isinstance(default, float):
        return 0.125, [f"--{name}", "1.25e-1"]
    return 7, [f"--{name}", "7"]


FIELDS = [
    f"{name}.{key}" for name, s in RunConfig.model_fields.items() for key in s.annotation.model_fields
    if not isinstance(s.annotation.model_fields[key].default, Section)
]


@pytest.mark.parametrize("dashes", [False, True])
@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_can_be_typed(section, dashes):
    defaults, values, words = getattr(RunConfig(), section), {}, []
    for name in (name for name in FIELDS if name.startswith(f"{section}.")):
        key = name.split(".")[1]
        values[key], (option, *rest) = typed(name, getattr(defaults, key))
        assert values[key] != getattr(defaults, key)
        words += [option.replace("_", "-") if dashes else option, *rest]
    _, config = parse_run("train", TrainOptions, words, SECTIONS)
    assert plain(config) == {**plain(RunConfig()), section: plain(defaults.model_copy(update=values))}


PARTS = {"experts": ExpertsConfig, "depths": DepthsConfig, "latent": LatentConfig}


@pytest.mark.parametrize("dashes", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_every_field_of_a_part_of_the_model_can_be_typed(part, dashes):
    """They are sections inside the model's."""
    others = {"gate": ("switch", "switch"), "score": ("sigmoid", "sigmoid"), "normalise": (False, "False"),
              "biases": (True, "True"), "scales_input": (True, "True"),
              "bias_update": (0.125, "0.125"), "capacity": (0.25, "0.25"), "weight": ("sigmoid", "sigmoid")}
    values, words = {}, []
    for key in PARTS[part].model_fields:
        values[key], word = others.get(key, (7, "7"))
        words += [f"--model.{part}.{key.replace('_', '-') if dashes else key}", word]
    _, config = parse_run("train", TrainOptions, words, SECTIONS)
    assert getattr(config.model, part) == PARTS[part](**values)
    assert config.model_copy(update={"model": RunConfig().model}) == RunConfig()


@pytest.mark.parametrize("where", [0, 2, 4])
def test_the_command_line_goes_over_the_file_and_the_file_over_the_defaults(tmp_path, where):
    file = tmp_path / "run.toml"
    file.write_text("[parallel]\ntp = 4\ndp = 2\nzero_shard = 2\nzero = 1")
    words = ["--parallel.dp", "8", "--parallel.zero-shard", "None"]
    _, config = parse_run("train", TrainOptions, [*words[:where], str(file), *words[where:]], SECTIONS)
    assert (config.parallel.tp, config.parallel.dp, config.parallel.zero_shard, config.parallel.pp) == (4, 8, None, 1)


def test_sections_that_a_command_does_not_show_are_the_files(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[parallel]\ntp = 4")
    _, config = parse_run("data inspect", TrainOptions, [str(file), "--data.source", "text"], ("data",))
    assert (config.parallel.tp, config.data.source) == (4, "text")


def test_without_a_file_a_command_may_have_a_run_of_its_own(tmp_path):
    options, config = parse_run("chaos", ChaosOptions, ["--trials", "20", "--parallel.dp", "4"])
    assert (options.trials, config.parallel.dp, config.model.layers, config.train.steps) == (20, 4, 2, 12)
    file = tmp_path / "run.toml"
    file.write_text("[parallel]\ntp = 4")
    _, config = parse_run("chaos", ChaosOptions, [str(file)])
    assert plain(config) == plain(RunConfig.model_validate({"parallel": {"tp": 4}}))


# ---- commands ------------------------------------------------------------------------------------------------------


@pytest.fixture
def called(monkeypatch):
    """Stand in for a function of the API: ``called`` gets the arguments of its calls."""
    calls = []

    def stand_in(name, result=None):
        def record(*args, **kwargs):
            calls.append((args, kwargs))
            return result

        monkeypatch.setitem(vars(shoal), name, record)
        return calls

    return stand_in


def test_train(called):
    calls = called("train", 1)
    assert main(["train", "--parallel.tp", "2", "--ranks", "2", "--run-folder", "x"]) == 1
    ((config,), options) = calls[0]
    assert config.parallel.tp == 2
    assert options == {"ranks": 2, "run_folder": Path("x"), "resume": None, "auto_resume": False}


def test_verify(called):
    words = ["verify", "--random", "200", "--precision", "own", "--model.layers", "3"]
    for same in (True, False):
        calls = called("verify", types.SimpleNamespace(same=same))
        assert main(words) == (0 if same else 1)
    ((config,), options) = calls[0]
    assert config.model.layers == 3
    assert options == {
        "random": 200, "rule": None, "steps": 3, "own_precision": True, "inject": None, "device": "cpu",
        "show": True,
    }


def test_sample(called, capsys):
    calls = called("sample", ["def main():"])
    words = ["--max-tokens", "5", "--stop", "a", "b", "--top-k", "3", "--top-p", "0.5", "--tp", "2"]
    assert main(["sample", "runs/a", "def main(", "--device", "cpu", *words]) == 0
    ((folder, prompts), options), = calls
    assert (folder, prompts) == (Path("runs/a"), ["def main("]) and callable(options.pop("show"))
    assert options == {"max_tokens": 5, "temperature": 0.8, "top_p": 0.5, "top_k": 3, "stop": ("a", "b"), "seed": 0,
                       "tp": 2, "pp": 1, "precision": "fp32", "device": "cpu"}


def test_data(called, capsys):
    calls = called("train_tokenizer", types.SimpleNamespace(path=Path("a/b.json"), vocab_size=1000))
    assert main(["data", "train-tokenizer", "--vocab-size", "1000", "--data.source", "text"]) == 0
    ((data,), options) = calls[0]
    assert data.source == "text" and options == {"vocab_size": 1000, "out": Path("tokenizer.json")}
    assert capsys.readouterr().out == "a/b.json: 1,000 tokens.  Use it with: --data.tokenizer a/b.json\n"
    calls = called("describe_data", DataContents("bytes", (), {}, 64, 60, "a\x1b[2Jb"))
    assert main(["data", "inspect", "--data.sequence-length", "64"]) == 0
    assert calls[-1][0][0].sequence_length == 64
    assert capsys.readouterr().out == "\nsample 0 of seed 0: 64 tokens, 60 in the loss\n\na\\x1b[2Jb\n"


def test_bench_forwards_everything(monkeypatch):
    calls = []

    def measure(args: list[str]) -> int:
        calls.append(args)
        return 0

    monkeypatch.setitem(sys.modules, "shoal.cli.bench", types.SimpleNamespace(main=measure))
    assert main(["bench", "step", "--seconds", "3"]) == 0
    assert calls == [["step", "--seconds", "3"]]


def test_checkpoint_verify(called, capsys):
    calls = called("verify_checkpoint")
    assert main(["checkpoint", "verify", "x/step-10"]) == 0
    assert capsys.readouterr().out == "x/step-10: complete and undamaged\n"
    assert calls == [(("x/step-10",), {})]


def test_checkpoint_inspect(called, capsys):
    box = StoredBox(file="rank-00000.safetensors", offset=(0, 0), shape=(3, 2), checksum="")
    calls = called("describe_checkpoint", Manifest(
        step=10, extra={}, files={"rank-00000.safetensors": StoredFile(bytes=24, header_bytes=0, header="")},
        tensors={"w": StoredTensor(shape=(3, 2), dtype="F32", boxes=[box])},
    ))
    assert main(["checkpoint", "inspect", "x/step-10"]) == 0
    assert calls == [(("x/step-10",), {})]
    assert capsys.readouterr().out.endswith("step 10: 1 tensors, 24 bytes in 1 files\n")


def test_version_is_said_without_importing_torch():
    code = (
        "import sys; from shoal.cli.main import main; main(['--version']); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == f"shoal {shoal.__version__}\ntorch {version('torch')}\n"


# ---- resume --------------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs under runs/; the newer one, b, has tp 2, and is neither first nor last by name."""
    import os

    monkeypatch.chdir(tmp_path)
    for age, (name, tp) in enumerate([("b", 2), ("a", 1), ("c", 1)]):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        save_config(RunConfig.model_validate({"parallel": {"tp": tp}, "train": {"steps": 77}}), folder / RUN_FILE)
        os.utime(folder / RUN_FILE, (1e9 - age, 1e9 - age))
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("words", "folder", "tp", "steps"),
    [
        (["--resume"], "runs/b", 2, 77),
        (["--resume", "--parallel.tp", "4"], "runs/b", 4, 77),
        (["--resume", "runs/a", "--parallel.dp", "2"], "runs/a", 1, 77),
        (["--parallel.dp", "2", "--resume=runs/a"], "runs/a", 1, 77),
        (["--run-folder", "runs/a", "--resume"], "runs/a", 1, 77),
        (["other.toml", "--resume", "runs/a"], "runs/a", 8, 200),
        (["--resume", "other.toml"], "runs/b", 8, 200),
    ],
)
def test_resume_takes_the_runs_own_config_unless_another_is_given(runs, called, words, folder, tp, steps):
    Path("other.toml").write_text("parallel.tp = 8")
    calls = called("train", 0)
    assert main(["train", *words]) == 0
    ((config,), options) = calls[0]
    assert (str(options["resume"]), config.parallel.tp, config.train.steps) == (folder, tp, steps)


def test_resume_of_nothing_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--resume"]) == 2
    assert f"there is no run under {tmp_path / 'runs'}" in capsys.readouterr().err
    assert main(["train", "--resume", "x"]) == 2
    assert "--resume x: not a run folder: it has no run.toml" in capsys.readouterr().err


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian", "there is no command 'trian'; did you mean 'train'?"),
        ("data", "'data' needs one of: train-tokenizer, inspect"),
        ("data insp", "there is no command 'data insp'; did you mean 'inspect'?"),
        ("export onnx RUN", "there is no command 'export onnx'; allowed: gguf, hf"),
        ("--verbose", "there is no command '--verbose'; allowed: bench"),
        ("train nothing.toml", "no such file: nothing.toml"),
        ("train nothing", "no such file: nothing"),
        ("train my.txt", "my.txt: this is no run's TOML file.\n  Give a text with --data.paths my.txt, or end "
         "the name of a run's file in .toml."),
        ("plan run.toml", "no such file: run.toml"),
        ("estimate --cluster mine.toml", "cluster 'mine.toml': there is no node type 'mine.toml'; allowed: A100"),
        ("simulate run.toml", "run.toml: shoal simulate reads no config of a run."),
        ("train gpt2-124m", "gpt2-124m: a model of the catalog is chosen with --model.name gpt2-124m."),
        ("estimate gpt3-175b", "gpt3-175b: a model of the catalog is chosen with --model gpt3-175b."),
        ("plan gpt3-175b", "gpt3-175b: a model of the catalog is chosen with --model gpt3-175b."),
        ("train --parallel.tp 0", "parallel.tp = 0: input should be greater than 0"),
        ("train --optimizer.betas 0.9 1.5", "optimizer.betas = 1.5: input should be less than 1"),
        ("train --ranks 0", "ranks = 0: input should be greater than 0"),
        ("verify --steps -1", "steps = -1: input should be greater than 0"),
        ("sample runs x --temperature -1", "temperature = -1.0: input should be greater than or equal to 0"),
    ],
)
def test_bad_input_is_one_line_and_code_2(words, message, capsys):
    assert main(words.split()) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("shoal: error: ")
    assert message in printed.err
    assert not printed.out
    assert len(printed.err.splitlines()) <= 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train --parallel.zreo 2", "Unrecognized options: --parallel.zreo, 2\n  Perhaps you meant: --parallel.zero, "),
        ("train --stepz 2", "Unrecognized options: --stepz, 2"),
        ("train --model tiny", "--model is a section of options.\n  Give one of them, such as --model.name"),
        ("train --train.stepz 2", "Unrecognized options: --train.stepz, 2\n  Perhaps you meant: --train.steps,"),
        ("data inspect --parallel.tp 2", "Unrecognized options: --parallel.tp, 2"),
        ("bench step --turs 3", "Unrecognized options: --turs, 3\n  Perhaps you meant: --turns INT"),
        ("explain experts --modle x", "Unrecognized options: --modle, x\n  Perhaps you meant: --model STR"),
        ("train --train.precision bfloat16", "invalid choice 'bfloat16' for argument '--train.precision'; did you"),
        ("train --parallel.zero 7", "invalid choice '7' for argument '--parallel.zero'. Expected one of ('0', '1',"),
        ("train --parallel.tp two", "Error parsing --parallel.tp: 'two' is not an integer"),
        ("train --train.steps 1.5", "Error parsing --train.steps: '1.5' is not an integer"),
        ("train --train.steps=", "Error parsing --train.steps: '' is not an integer"),
        ("train --train.steps -1 --train.seed x", "Error parsing --train.seed: 'x' is not an integer"),
        ("train --model.tied maybe", "invalid choice 'maybe' for argument '--model.tied'. Expected one of ("),
        ("train --model.experts.count x", "Error parsing --model.experts.count: 'x' is not an integer"),
        ("train --parallel.bucket_mb x", "Error parsing --parallel.bucket-mb: 'x' is not a number or {auto}"),
        ("train --optimizer.betas 0.9", "Missing value for argument '--optimizer.betas'. Expected 2 values."),
        ("train --optimizer.betas 0.9 x", "Error parsing --optimizer.betas: Could not parse arguments ['0.9', 'x']"),
        ("train --parallel.stage_layers 3 x", "Error parsing --parallel.stage-layers: '3', 'x' is not "),
        ("train --optimizer.lr-factors a b", "Error parsing --optimizer.lr-factors: Failed to parse key-value pairs!"),
        ("train --train.steps --train.seed 1", "Missing value for argument '--train.steps'. Expected 1 value"),
        ("train --train.steps 3 4", "Unrecognized options: 4"),
        ("train --train.compile yes", "Unrecognized options: yes"),
        ("train --train.compile=yes", "Unrecognized options: yes"),
        ("sample", "Missing from shoal sample: FOLDER A run, or a model in Hugging Face's format. (required)"),
        ("checkpoint verify a --x", "Unrecognized options: --x"),
    ],
)
def test_what_cannot_be_read_is_explained_with_code_2(words, message, capsys):
    """One error without tyro's frame, what is right before it (None, True, tuples) passed over."""
    good = ["--parallel.zero-shard", "None", "--model.tied", "True", "--optimizer.betas", "0.5", "0.75",
            "--train.no-compile", "--data.paths", "a", "b", "--optimizer.lr-factors", "embed.*", "0.5"]
    command, *rest = words.split()
    assert main([command, *(good if command == "train" else []), *rest]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("shoal: error: shoal ") and f": {message}" in printed.err, printed.err
    assert printed.err.endswith(" --help\n")
    assert len(printed.err.splitlines()) <= 3
    assert not printed.out


def test_an_interrupt_is_quiet_and_a_bug_is_loud(monkeypatch, capsys):
    def raising(error):
        def function(*_, **__):
            raise error

        return function

    monkeypatch.setitem(vars(shoal), "train", raising(KeyboardInterrupt()))
    assert main(["train"]) == 130
    assert capsys.readouterr() == ("", "")
    monkeypatch.setitem(vars(shoal), "train", raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main(["train"])


def test_a_text_that_ends_in_toml_is_not_the_file_of_the_run() -> None:
    words = ["--data.paths", "notes.toml"]
    assert split_run_file(words) == (None, words)
    assert split_run_file([*words, "run.toml"]) == (Path("run.toml"), words)
