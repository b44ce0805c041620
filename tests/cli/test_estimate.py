"""The command estimate: what it prints, reads and refuses."""

import re
import subprocess
import sys
import tomllib
from datetime import date
from html import escape, unescape
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.engine.data.tokenizer import train_bpe
from shoal.planning.describe import describe_run
from shoal.planning.estimate import Estimate
from shoal.spec.config import build_config
from shoal.spec.layout import Layout


@pytest.mark.parametrize("words", ["--parallel.dp 1", "--parallel.dp=1", "FILE"])
def test_replicas_that_are_given_do_not(words: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "run.toml").write_text("[parallel]\ndp = 1\n")
    assert main(["estimate", *words.replace("FILE", str(tmp_path / "run.toml")).split(), "--cluster", "8xH100"]) == 2
    assert "pp 1 x dp 1" in capsys.readouterr().err


def test_the_command(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    words = "estimate --model llama-3-70b --cluster 64x8xH100 --parallel.tp 8 --parallel.pp 4"
    assert main([*words.split(), "--out", str(page)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("Does not fit: needs") and " a step (" in said.splitlines()[1]
    for word in ("MFU", "memory of the fullest rank", "bubble", "cost", "energy", "Layouts that fit"):
        assert word in said
    html = page.read_text()
    assert html.count("<svg") == 3 and "ridge: 295" in html
    (bound,) = (line for line in said.splitlines() if line.startswith("Does not fit"))
    assert html.index(f"<p class=alarm>{escape(bound)}</p>") < html.index("<table>")  # what does not fit is said first
    assert "http-equiv" in html and "<script src" not in html
    assert "<h1>Estimate of llama-3-70b</h1>" in html and "<td>memory of the fullest rank</td>" in html
    assert main(["estimate", "--cluster", "8xH101"]) == 2


def test_a_page_states_the_run_that_it_estimates(tmp_path: Path) -> None:
    """Also fields of the layout that no search varies."""
    page = tmp_path / "page.html"
    layout = "--parallel.dp 8 --parallel.zero 3 --parallel.prefetch 2 --parallel.bucket-mb 40"
    assert main(["estimate", "--model", "llama-3-8b", "--cluster", "8xH100", *layout.split(), "--out", str(page)]) == 0
    html = page.read_text()
    assert "<p class=alarm>" not in html and "<h2>Command</h2>" in html and str(date.today()) in html
    (text,) = re.findall("<h2>The layout, for shoal train</h2><pre>(.*?)</pre>", html, re.DOTALL)
    config = build_config(tomllib.loads(unescape(text)))
    assert config.parallel == Layout(dp=8, zero=3, prefetch=2, bucket_mb=40) and config.model.name == "llama-3-8b"


def test_a_runs_file_is_read_whole(tmp_path: Path) -> None:
    """Its tokenizer's vocabulary, its attention kernel, and masks between documents."""
    values = {
        "model": {"name": "llama-3.2-1b"}, "data": {"sequence_length": 4096}, "train": {"global_batch": 8},
        "parallel": {"dp": 8},
    }  # fmt: skip

    def read(precision: str = "bf16", **changed: dict) -> Estimate:
        config = build_config({**values, **changed})
        return Estimate(describe_run(config.parallel, cluster="8xH100", precision=precision, config=config))

    plain = read()
    assert plain.run.shape.vocab == 257, "bytes and an end"
    trained = train_bpe(["a b c d e " * 20, "f g h"], 260, tmp_path / "tokenizer.json").vocab_size
    other = read(data={"sequence_length": 4096, "tokenizer": str(tmp_path / "tokenizer.json")})
    assert other.run.shape.vocab == trained != 257
    assert read(model={"name": "llama-3.2-1b", "vocab": 1000}).run.shape.vocab == 1000
    away = read(model={"name": "llama-3.2-1b", "vocab": 1000}, data={"tokenizer": "not-here.json"})
    assert away.run.shape.vocab == 1000, "a stated vocabulary needs no tokenizer"
    written = read(train={"global_batch": 8, "attention": "explicit"})
    assert written.step_seconds > 1.1 * plain.step_seconds
    assert written.fullest.activations > 2 * plain.fullest.activations, "scores are kept"
    by_lengths = read(data={"sequence_length": 4096, "document_mask": True})
    rates = [plain.calibration.at(kernel, generation="hopper") for kernel in ("flash_2", "flash_3")]
    slower = rates[1] / rates[0]  # flash takes lengths, cuDNN does not
    assert by_lengths.layer().attention == pytest.approx(slower * plain.layer().attention)
    assert by_lengths.fullest.activations == plain.fullest.activations
    plain = read("fp32")
    masked = read("fp32", data={"sequence_length": 4096, "document_mask": True})
    assert masked.layer().attention == pytest.approx(2 * plain.layer().attention)
    assert masked.fullest.activations > plain.fullest.activations, "and the mask"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--measure", "--measure: only with --dry-run"),
        ("--rank 3", "--rank 3: only with --dry-run"),
        ("--steps 2", "--steps 2: only with --dry-run"),
        ("--dry-run --tokens 1e9", "--tokens 1000000000.0: a dry run"),
        ("--sweep tp=1 --tokens 1e9", "a sweep compares steps"),
        ("--sweep dp=1,2", "dp follows from nodes"),
        ("--sweep tp=1,a", "integers with commas, as tp=1,2,4"),
        ("--sweep tp=3", "no value can be estimated. The first: parallel.tp = 3"),
        ("--sweep nodes=0", "at least 1 is needed"),
    ],
)
def test_what_would_be_ignored_is_refused(words: str, says: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["estimate", *words.split()]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("words", [
    "estimate --model llama-3-8b --cluster 8xH100 --parallel.tp 8",
    "estimate --cluster=v5p-16 --sequence_length=1024 --optimizer sgd --tokens 1e12",
    "plan --model llama-3.2-1b --cluster 2xH100 --global-batch 8 --sequence-length 1024 --fix tp=2",
])
def test_an_answer_does_not_wait_for_what_it_does_not_need(words: str) -> None:
    """torch takes longer to import than everything else together."""
    forbidden = {"torch", "scipy"}
    code = (
        "import sys; from shoal.__main__ import main; code = main(); "
        f"sys.exit(code == 2 or ', '.join(sys.modules.keys() & {forbidden}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words.split()], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-300:]


@pytest.mark.parametrize(("words", "tokens"), [
    ("", "7.17e+05"), ("--tokens 5e9", "5e+09"), ("--model gpt2-124m", "7.17e+05"),
])
def test_a_runs_own_steps_are_its_training(words: str, tokens: str, capsys: pytest.CaptureFixture) -> None:
    run = Path(__file__).parents[2] / "examples" / "quickstart.toml"
    assert main(["estimate", str(run), "--cluster", "4xH100", *words.split()]) == 0
    assert f"training on {tokens} tokens" in capsys.readouterr().out


def test_a_run_without_steps_is_trained_on_20_tokens_per_parameter(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (run := tmp_path / "run.toml").write_text('[model]\nname = "llama-3-8b"\n[data]\nsequence_length = 8192\n')
    assert main(["estimate", str(run), "--model", "llama-3-8b", "--parallel.tp", "8", "--global-batch", "4M"]) == 0
    assert "training on 1.61e+11 tokens" in capsys.readouterr().out


def test_other_software_gets_its_arguments(capsys: pytest.CaptureFixture) -> None:
    words = "--model llama-3-8b --cluster 2x8xH100 --parallel.tp 4 --parallel.zero 1 --software megatron-core"
    assert main(["estimate", *words.split()]) == 0
    assert "The layout, as arguments of megatron-core" in (said := capsys.readouterr().out)
    assert "\n--tensor-model-parallel-size 4\n" in said
