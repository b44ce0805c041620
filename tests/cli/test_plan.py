"""`shoal plan`: what it prints can be trained, its other questions have consistent answers, bad input is refused."""

import re
from pathlib import Path

import pytest

import shoal
from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.launch.worker_pool import Pool
from shoal.pipeline.from_layout import check_schedule
from shoal.planning.search.planner import LayoutPlanner
from shoal.planning.search.search import search
from shoal.planning.search.space import LayoutSpace, check_fixed
from shoal.report.tables import table_lines
from shoal.report.timeline.palette import GROUND
from shoal.spec.catalog import model_shape
from shoal.spec.compatibility.sizes import check_layout
from shoal.spec.config import RunConfig, load_config
from shoal.spec.layout import Layout
from tests.engine.parallel.counting import engine_of

FEW = LayoutSpace(("1f1b", "zb-h1"), most_virtual=2, uneven=False)


def test_the_toml_is_a_run_that_train_takes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out, page = tmp_path / "plan.toml", tmp_path / "plan.html"
    words = "plan --model llama-3-8b --cluster 2x8xH100 --global-batch 512K --fix pp=4,schedule=interleaved-1f1b"
    assert main([*words.split(), "--tokens", "1e9", "--toml", str(out), "--out", str(page), "--explain"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^recommended .*pp 4 \(interleaved-1f1b.*tokens per second", said, re.M)
    said_so = r"^80 % intervals of the recommended: step .* to .* s, memory .* GB to .* GB of 85.1 GB"
    assert re.search(said_so, said, re.M)
    assert re.search(r"^seconds of a step +recommended.*^bubble +\d.* waiting for other", said, re.M | re.S)
    before = out.read_bytes()
    assert main([*words.split(), "--toml", str(out)]) == 2
    assert "is not overwritten" in capsys.readouterr().err and out.read_bytes() == before
    config = load_config(out)
    shape = config.model.shape(vocab=257, sequence_length=config.data.sequence_length)
    assert shape == model_shape("llama-3-8b")
    sizes = {"global_batch": config.train.global_batch, "sequence_length": config.data.sequence_length}
    check_layout(config.parallel, shape, **sizes, ranks=16)
    check_schedule(config.parallel, shape, config.train.global_batch, sequence_length=config.data.sequence_length)
    assert config.train.steps == round(1e9 / 2**19), "of 512 K tokens"
    assert config.parallel.pp == 4 and config.parallel.schedule == "interleaved-1f1b"
    html = page.read_text()
    assert html.count("<svg") == 2 and "<script src" not in html
    assert "fill: var(--ground)" in html and GROUND not in html  # behind text, of a dark page too
    assert "<h2>Command</h2>" in html and "interleaved-1f1b&quot;" in html


def trained_layers(config: RunConfig) -> int:
    """Train one step of a config; return the number of this rank's layers."""
    engine = engine_of(config)
    engine.step(0)
    return len(engine.stages[0].module.layers)


def test_the_toml_trains_as_it_is(
    pool: Pool, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "plan --model tiny --cluster 2xH100 --sequence-length 64 --global-batch 8"
    assert main([*words.split(), "--fix", "pp=2,stage_layers=1/3", "--toml", "plan.toml"]) == 0
    printed = capfd.readouterr().out
    assert "stages of 1 + 3 layers" in printed and Path("plan.toml").read_text() in printed
    config = load_config(Path("plan.toml"))
    assert (config.parallel.pp, config.parallel.stage_layers) == (2, (1, 3))
    assert pool.run(trained_layers, 2, config) == [1, 3]


def test_the_run_of_a_file_is_planned_with_all_that_it_says(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file, out, page = tmp_path / "run.toml", tmp_path / "out.toml", tmp_path / "plan.html"
    file.write_text("""
        [model]
        name = "llama-3.2-1b"
        vocab = 128256
        layers = 4
        [parallel]
        dp = 3
        bucket_mb = 64.0
        [data]
        tokenizer = "not-here.json"
        sequence_length = 2048
        [train]
        steps = 700
        global_batch = 64
        precision = "fp32"
        [optimizer]
        name = "sgd"
        learning_rate = 0.5
    """)
    words = ["plan", "--cluster", "2xH100", str(file), "--toml", str(out), "--out", str(page)]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "fp32, sgd" in said and "64 sequences of 2,048 tokens" in said
    assert f"training on {700 * 64 * 2048:.3g} tokens" in said
    planned, given = load_config(out), load_config(file)
    assert planned.parallel.world_size == 2 and planned.parallel.bucket_mb == Layout().bucket_mb
    assert planned.replace(parallel=given.parallel) == given
    assert out.read_text() in said and "not-here.json" in page.read_text()
    config = given.replace(train={"attention": "explicit"})
    plain, unfused = (shoal.plan(None, "2xH100", config=each).found for each in (given, config))
    assert unfused.seconds > plain.seconds, "scores are written"
    assert main([*words[:4], "--model", "gpt2-124m", "--sequence-length", "1024", "--tokens", "1e9"]) == 0
    said = capsys.readouterr().out
    assert 'name = "gpt2-124m"\nvocab = 50257' in said and f"steps = {round(1e9 / 64 / 1024)}" in said
    assert "sequence_length = 1024" in said and "layers = 4" not in said


@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_scales_whose_cost_is_unknown_are_refused(command: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (file := tmp_path / "run.toml").write_text('[train]\nprecision = "fp8"\n[float8]\nscales = "block"\n')
    assert main([command, str(file)]) == 2
    assert "float8.scales = block: such products are not estimated" in capsys.readouterr().err


def test_the_fewest_devices_hold_it_and_fewer_do_not() -> None:
    planner = LayoutPlanner("llama-3-8b", "2x8xH100", global_batch=8, sequence_length=4096)
    planner.space = FEW
    plan = planner.fewest()
    assert plan.found.memory.reserved <= 85.44e9
    smaller = [n for n in (1, 2, 4, 8, 16) if n < plan.run.cluster.size]
    assert smaller, "8 B parameters do not fit on one device"
    sizes = {"global_batch": 8, "sequence_length": 4096}
    for size in smaller:
        name = f"{size}xH100" if size > 1 else "h100-sxm"
        assert search(LayoutPlanner("llama-3-8b", name, **sizes).run, FEW, diverse=False).best == []


def test_more_of_anything_never_makes_it_slower() -> None:
    planner = LayoutPlanner("llama-3.2-1b", "2x4xA100", global_batch=16, sequence_length=4096)
    planner.space = FEW
    seconds = {words: plan.found.seconds for words, plan in planner.what_if().items() if plan}
    plain = seconds.pop("as it is")
    for words, changed in seconds.items():
        assert changed <= plain if words.startswith("twice") else changed >= plain, words
    assert seconds["twice the arithmetic"] < 0.8 * plain
    times = [plan.found.seconds for plan in planner.doubling()]
    assert times == sorted(times, reverse=True) and len(times) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--model lama-3-70b", "did you mean 'llama-3-70b'"),
        ("--global-batch 4X", "give sequences, as 1024, or tokens, as 4M"),
        ("--global-batch 4K --sequence-length 3000", "is no multiple of --sequence-length 3000"),
        ("--fix tp", "tp has none"),
        ("--fix teepee=3", "there is no key 'teepee'"),
        ("--fix tensor_model_parallel_size=2", "did you mean 'tp'?"),
        ("--fix pp=4 --fix dp=4", "no layout of 8 devices with --fix pp=4,dp=4"),
        ("--parallel.micro-batch 2", "Fix a field of it with --fix micro_batch=2."),
        ("--parallel.sequence-parallel", "Fix a field of it with --fix sequence_parallel=true."),
        ("--fix bucket-mb=3", "it is not searched"),
        ("--fix schedule=zb", "there is no such schedule"),
        ("--fix schedule=zb-auto", "it is not searched; allowed: 1f1b,"),
        ("--fix pp=4,dp=4", "no layout of 8 devices with --fix pp=4,dp=4"),
        ("--fix stage_layers=2/x", "write the layers of all stages, as stage_layers=7/9"),
        ("--fix stage_layers=2/2", "no layout of 8 devices with --fix stage_layers=2/2 can split"),
        ("--precision bf61", "did you mean 'bf16'"),
        ("--out plan.svg", "ending in .html"),
        ("--map 1,x --out map.svg", "give numbers of at least 1"),
        ("--map 1,2 --cluster 8xH100", "Name two, as 2x8xH100"),
        ("--fewest --what-if", "Ask one at a time"),
        ("--fewest --toml run.toml", "--toml run.toml: --fewest lists no layouts of one search"),
        ("--map 1,2 --toml run.toml", "--toml run.toml: --map lists no layouts of one search"),
        ("--what-if --out plan.html", "--out plan.html: --what-if lists no"),
        ("--budget 5 --explain", "--explain: --budget lists no"),
        ("--map 1,2 --tokens 1e9", "--tokens 1000000000.0: --map prices no training"),
        ("--fewest --price 3", "--price 3.0: --fewest prices no training"),
        ("--budget 5 --cluster v5e-16", "slices of a pod"),
    ],
)
def test_what_cannot_be_is_refused(words: str, says: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", *words.split()]) == 2
    assert says in capsys.readouterr().err


def test_what_does_not_fit_is_said(capsys: pytest.CaptureFixture) -> None:
    words = "--model llama-3-405b --cluster 8xH100 --global-batch 8"
    assert main(["plan", *words.split()]) == 1
    assert re.search(r"No searched layout fits in \d\d(\.\d)? GB", capsys.readouterr().out)


def test_fixed_fields_have_their_types() -> None:
    assert check_fixed("tp=8,sequence-parallel=true,recompute=full") == {
        "tp": 8, "sequence_parallel": True, "recompute": "full"
    }
    with pytest.raises(UsageError):
        check_fixed("tp=zero")


def test_a_table_is_as_wide_as_its_terminal(monkeypatch):
    layout = "dp 8 (ZeRO-1, shard 4) x tp 2 + sequence parallel x pp 2"
    rows = [["1", layout, "+0.3 %: bubble +37.5 ms"], ["2", "dp 8", ""]]
    full = table_lines(["", "layout", "against the best"], rows)
    assert [len(line) for line in full] == [77, 84, 7]  # without a terminal each row is a line
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    narrow = table_lines(["", "layout", "against the best"], rows)
    assert max(map(len, narrow)) <= 59 and len(narrow) > 3
    assert sorted(" ".join(narrow).split()) == sorted(" ".join(full).split())
