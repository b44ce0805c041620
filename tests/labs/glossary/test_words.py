"""`shoal explain WORD`: words of the glossary are found by any of their names; others get the nearest."""

import pytest

from shoal.base.errors import UsageError
from shoal.cli.explain import main as explain
from shoal.cli.main import main
from shoal.labs.explain.subjects import SUBJECTS
from shoal.labs.glossary.words import find_word, nearest_words, read_words


def test_a_word_is_explained(capsys):
    assert main(["explain", "1F1B"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1f1b\n") and "docs/course/10-pipelines.md" in out and "shoal simulate" in out


def test_a_subject_with_a_word_of_the_same_name_is_computed(capsys):
    assert main(["explain", "broadcast", "--ranks", "4"]) == 0
    assert "docs/course" not in capsys.readouterr().out


def test_any_name_in_any_spelling_finds_its_word():
    for word in read_words().values():
        for name in (word.name, *word.also):
            assert find_word(name) is find_word(name.upper().replace("-", " ")) is word, "two words share a name"


@pytest.mark.parametrize(("given", "near"), [("buble", "bubble"), ("all-gahter", "all-gather"), ("piplin", "pipeline"),
                                             ("autogr", "'autograd'")])
def test_an_unknown_word_gets_the_nearest(given, near, capsys):
    assert main(["explain", given]) == 2
    message = capsys.readouterr().err
    assert f"unknown subject '{given}'" in message and near in message


def test_a_word_like_no_other_gets_the_subjects(capsys):
    assert main(["explain", "qqqqqqqq"]) == 2
    assert "allowed: broadcast" in capsys.readouterr().err and not nearest_words("qqqqqqqq")


def test_a_word_takes_no_options():
    assert "1f1b" not in SUBJECTS
    with pytest.raises(UsageError, match="--ranks"):
        explain(["1f1b", "--ranks", "3"])


def test_a_subject_that_takes_no_file_names_the_command_that_does(capsys):
    assert main(["explain", "memory", "run.toml"]) == 2
    message = capsys.readouterr().err
    assert "'memory' takes options alone, no 'run.toml'" in message and "shoal estimate RUN.toml" in message
