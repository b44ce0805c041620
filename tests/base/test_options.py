"""What is read from a command line, and what the help says."""

import sys

import pytest

from shoal.base.errors import UsageError
from shoal.base.options import parse, read
from shoal.base.section import docstrings
from shoal.base.usual_names import USUAL_NAMES
from shoal.cli.estimate import EstimateOptions
from shoal.cli.run.data import TokenizerOptions
from shoal.cli.run.eval import EvalOptions
from shoal.spec.config import DataConfig, OptimizerConfig, RunConfig
from shoal.spec.config.model import ExpertsConfig
from shoal.spec.layout import Layout


def test_an_error_has_no_frame_and_no_colours_even_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(UsageError) as refused:
        parse("shoal estimate", EstimateOptions, ["--sequence-lenght", "2048"])
    first, nearest, help_ = str(refused.value).splitlines()
    assert first == "shoal estimate: Unrecognized options: --sequence-lenght, 2048"
    assert nearest.startswith("  Perhaps you meant: --sequence-length ") and "Tokens per sequence" in nearest
    assert help_ == "  For full helptext, run shoal estimate --help"


@pytest.mark.parametrize(
    ("given", "suggested"),
    [
        (["--tp", "2"], "Perhaps you meant: --parallel.tp"),
        (["--beta", "1"], "Perhaps you meant: --optimizer.betas, --optimizer.sensitivity-beta"),
        (["--data.path", "x"], "Perhaps you meant: --data.paths, --data.chat"),  # a flag with two names
        (["--lr", "1"], "Perhaps you meant: --optimizer.learning-rate"),
        (["--data.micro-batch", "1"], "Perhaps you meant: --parallel.micro-batch"),
        (["--vpp", "2"], "Perhaps you meant: --parallel.virtual-stages"),
        (["--lr-decay-style", "cosine"], "Perhaps you meant: --optimizer.schedule"),  # not a pipeline's
    ],
)
def test_of_several_similar_options_only_the_names_are_shown_and_the_same_name_alone(given: list[str], suggested: str):
    with pytest.raises(UsageError) as refused:
        read("shoal train", "", {"parallel": Layout, "optimizer": OptimizerConfig, "data": DataConfig}, {}, given)
    assert str(refused.value).splitlines()[1] == f"  {suggested}"


def test_each_of_several_unknown_options_has_its_own_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")  # where the list of the options is wrapped
    sections = {"parallel": Layout, "optimizer": OptimizerConfig, "data": DataConfig}
    given = ["--tensor-model-parallel-size=2", "--optimizer.lr", "1", "--parallel.zreo", "1", "--seq-length", "8"]
    with pytest.raises(UsageError) as refused:
        read("shoal train", "", sections, {}, given)
    assert str(refused.value).splitlines()[1:] == [
        "  For --tensor-model-parallel-size: --parallel.tp",
        "  For --optimizer.lr: --optimizer.learning-rate",
        "  For --seq-length: --data.sequence-length",
        "  Arguments similar to --parallel.zreo: --parallel.zero, --parallel.ep, --parallel.etp",
        "  For full helptext, run shoal train --help",
    ]


def test_names_of_other_trainers_lead_to_fields_that_exist() -> None:
    kinds = {name: type(field.default) for name, field in RunConfig.model_fields.items()}
    fields = {name for kind in kinds.values() for name in kind.model_fields}
    fields |= {f"{section}.{name}" for section, kind in kinds.items() for name in kind.model_fields}
    fields |= set(ExpertsConfig.model_fields)
    commands = {"microbatches", "--ranks", "--cluster", "--run-folder", "--resume", "--max-tokens"}
    assert set(USUAL_NAMES) - fields == commands


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--parallel.tp", "many"], "--parallel.tp: 'many' is not an integer"),
        (["--optimizer.weight-decay", "big"], "--optimizer.weight-decay: 'big' is not a number"),
        (["--parallel.zero-shard", "all"], "--parallel.zero-shard: 'all' is not an integer"),
    ],
)
def test_a_number_that_is_none_is_named(given: list[str], says: str) -> None:
    with pytest.raises(UsageError) as refused:
        read("shoal train", "", {"parallel": Layout, "optimizer": OptimizerConfig}, {}, given)
    assert str(refused.value).splitlines()[0] == f"shoal train: Error parsing {says}"


@pytest.mark.parametrize(("words", "value"), [
    (["--parallel.tp-overlap", "true"], True), (["--parallel.tp-overlap=false"], False),
    (["--parallel.tp_overlap", "True"], True), (["--parallel.tp-overlap", "auto"], "auto"),
])
def test_true_and_false_are_spelled_as_in_toml(words: list[str], value: bool | str) -> None:
    given = read("shoal train", "", {"parallel": Layout}, {}, ["--parallel.tp", "2", *words])
    assert given["parallel"]["tp_overlap"] == value and given["parallel"]["tp"] == 2


@pytest.mark.parametrize(("words", "value"), [
    (["--data.document-mask"], True), (["--data.document-mask", "true"], True), (["--data.document_mask=True"], True),
    (["--data.no-document-mask"], False), (["--data.document-mask", "false"], False),
    (["--data.document-mask=false"], False),
])
def test_a_flag_takes_true_and_false_too(words: list[str], value: bool) -> None:
    given = read("shoal train", "", {"data": DataConfig}, {}, [*words, "--data.field", "body"])
    assert given["data"]["document_mask"] is value and given["data"]["field"] == "body"


def test_a_long_description_does_not_widen_the_help(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse("shoal estimate", EstimateOptions, ["--help"], description="word " * 30)
    assert max(map(len, capsys.readouterr().out.splitlines())) == 80


@pytest.mark.parametrize("columns", [40, 80])
def test_the_row_of_help_itself_is_left_out(columns: int, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        parse("shoal estimate", EstimateOptions, ["--help"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert rows[0].startswith("│ --") and not any("-h, --help" in row for row in rows)


def test_help_says_what_stands_below_a_field() -> None:
    assert docstrings(TokenizerOptions)["vocab_size"].startswith("Vocabulary size, including the 256 bytes")
    assert docstrings(Layout).keys() == Layout.model_fields.keys()


@pytest.mark.parametrize(("words", "value"), [
    (["--chat"], True), (["--no-chat"], False), (["--chat", "false"], False), (["--chat=true"], True), ([], None),
])
def test_a_flag_with_a_third_value_is_spelled_as_one_too(words: list[str], value: bool | None) -> None:
    given = read("shoal eval", "", {"": EvalOptions}, {}, ["RUN", *words, "--limit", "2"])[""]
    assert (given["chat"], given["limit"]) == (value, 2)


@pytest.mark.parametrize("words", [["--folder", "RUN"], ["--folder=RUN"]])
def test_a_positional_argument_is_given_without_its_name(words: list[str]) -> None:
    with pytest.raises(UsageError, match=r"eval: folder is given without --folder\.\n  Write shoal eval FOLDER\."):
        parse("shoal eval", EvalOptions, words)
