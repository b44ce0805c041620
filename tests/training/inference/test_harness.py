"""Questions of lm-evaluation-harness: answers equal to direct computation, and a task of the library itself."""

import json

import pytest
import torch

import shoal
from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.spec.layout import Layout
from shoal.training.inference.harness import TaskModel
from shoal.training.inference.source import load_model, open_source
from tests.trainings.runs import small_config, train_in

WINDOW = 32
PAIRS = [
    ("def f(x):", " return x"), ("def ", "f"), ("", "import"), ("x = 1 ", "+ 2"), ("a" * 60, "bcd"), ("class", "C" * 40)
]  # fmt: skip


@pytest.fixture(scope="module")
def run(corpus, pool, tmp_path_factory):
    config = small_config(corpus, {"micro_batch": 8}, train={"steps": 10, "precision": "fp64"})
    return train_in(pool, config, tmp_path_factory.mktemp("harness") / "run")


@pytest.fixture(scope="module")
def model(run):
    source = open_source(run)
    return TaskModel(load_model(source, source.on(Layout())), source)


def one_by_one(model, context: list[int], ids: list[int]) -> tuple[float, bool]:
    """The log-probability of ids after a context, token by token."""
    total, greedy, seen = 0.0, True, list(context)
    for token in ids:
        likely = model.model.logits(torch.tensor([seen[-WINDOW:]]))[0, -1].log_softmax(-1)
        total, greedy, seen = total + likely[token].item(), greedy and int(likely.argmax()) == token, [*seen, token]
    return total, greedy


def test_loglikelihood_is_the_sum_over_the_tokens(model):
    found = model.loglikelihood(PAIRS)
    for (context, continuation), (likelihood, greedy) in list(zip(PAIRS, found, strict=True))[:4]:
        start = len(context.rstrip())
        text = [*(context + continuation).encode()] if context else [256, *continuation.encode()]
        start = start or 1
        expected = one_by_one(model, text[:start], text[start:])
        assert (likelihood, greedy) == (pytest.approx(expected[0], rel=1e-9), expected[1])
    # of a text beyond the window, the last window + 1 tokens: the first is only read
    long = [*("a" * 60 + "bcd").encode()][-WINDOW - 1 :]
    assert found[4][0] == pytest.approx(one_by_one(model, long[:-3], long[-3:])[0], rel=1e-9)
    assert found[5][0] == pytest.approx(one_by_one(model, [ord("C")], [ord("C")] * WINDOW)[0], rel=1e-9)


def test_the_likeliest_continuation_is_greedy(model):
    # Without a space at the end, which would belong to the continuation.
    (answer,) = model.generate_until([("def", {"until": [], "max_gen_toks": 3})])
    assert model.loglikelihood([("def", answer)])[0][1] and not model.loglikelihood([("def", answer + "\x07")])[0][1]


@pytest.mark.parametrize("length", [5, WINDOW, WINDOW + 1, 2 * WINDOW + 7])
def test_rolling_predicts_each_token_once_and_the_last_with_a_full_window(model, length):
    text = "".join(chr(97 + i * i % 26) for i in range(length))
    ids, expected = [256, *text.encode()], 0.0
    for start in range(0, length, WINDOW):
        end = min(length, start + WINDOW)
        first = end - WINDOW if start else 0
        expected += one_by_one(model, ids[first : start + 1], ids[start + 1 : end + 1])[0]
    assert model.loglikelihood_rolling([text, "x"])[0] == pytest.approx(expected, rel=1e-9)


def test_generate_until_is_the_likeliest_text_up_to_a_stop(run, model):
    whole = shoal.sample(run, ["def "], max_tokens=20, temperature=0, precision="fp64")[0].removeprefix("def ")
    stop = whole[5:7]
    questions = [("def ", {"until": [stop], "max_gen_toks": 20}), ("def ", {"until": "\x07", "max_gen_toks": 9}),
                 ("class", {"do_sample": True, "temperature": 0.5, "max_gen_toks": 4})]
    first, second, third = model.generate_until(questions)
    assert first == whole[: whole.index(stop)] and second == whole[:9] and len(third) <= 4


def compute(run) -> list:
    source = open_source(run)
    model = TaskModel(load_model(source, source.on(Layout(tp=2, pp=2))), source)
    return [model.loglikelihood(PAIRS), model.generate_until([("def ", {"max_gen_toks": 5})])]


def test_ranks_answer_as_one_device(run, model, pool):
    likelihoods, answers = pool.run(compute, 4, run)[3]
    for ours, theirs in zip(likelihoods, model.loglikelihood(PAIRS), strict=True):
        assert ours == (pytest.approx(theirs[0], rel=1e-9), theirs[1])
    assert answers == model.generate_until([("def ", {"max_gen_toks": 5})])


def test_without_the_library_the_command_names_it(run, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    assert main(["eval", str(run), "--tasks", "hellaswag"]) == 2
    assert "pip install 'shoal[eval]'" in capsys.readouterr().err
    assert main(["eval", str(run), "--tasks", "hellaswag", "--dp", "2"]) == 2
    assert "--dp 2: --tasks has texts of its own" in capsys.readouterr().err


TASK = """
task: letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
{rest}
"""
CHOICE = 'doc_to_choice: [" a", " b"]\ndoc_to_target: 0\nmetric_list: [{metric: acc}]'
ANSWER = """
doc_to_target: "x"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
metric_list: [{metric: exact_match}]
"""


@pytest.mark.parametrize("kind, rest", [("multiple_choice", CHOICE), ("generate_until", ANSWER)])
def test_a_task_of_the_library(kind, rest, run, model, tmp_path, capsys, monkeypatch):
    pytest.importorskip("lm_eval", reason="needs the extra shoal[eval]")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    questions = [f"{i} is" for i in range(6)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"question": q}) + "\n" for q in questions))
    (tmp_path / "letters.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl", kind=kind, rest=rest))
    assert main(["eval", str(run), "--tasks", str(tmp_path / "letters.yaml"), "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out.splitlines()[-1])["letters"]
    if kind == "multiple_choice":
        pairs = [model.loglikelihood([(q, " a"), (q, " b")]) for q in questions]
        assert metrics["acc,none"] == pytest.approx(sum(a[0] > b[0] for a, b in pairs) / 6)
    else:
        answers = model.generate_until([(q, {"until": ["\n"], "max_gen_toks": 4}) for q in questions])
        assert metrics["exact_match,none"] == pytest.approx(sum(answer == "x" for answer in answers) / 6)


def test_an_unknown_task_is_refused(run, tmp_path):
    pytest.importorskip("lm_eval", reason="needs the extra shoal[eval]")
    with pytest.raises(UsageError, match=r"no such file: .*none\.yaml"):
        shoal.evaluate_tasks(run, [str(tmp_path / "none.yaml")])
