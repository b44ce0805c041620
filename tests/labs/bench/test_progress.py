"""What a benchmark says on its way."""

from io import StringIO

from rich.console import Console

from shoal.labs.bench.benchmark import progress


def test_a_log_has_a_line_for_each_and_a_table_none_of_them(capsys):
    results = StringIO()
    with progress(Console(file=results)) as tell:
        tell("local-sgd [seed 1]")
        tell("a name that is longer than the eighty columns which rich thinks that a log without a terminal has")
    assert results.getvalue() == ""
    first, second, *others = capsys.readouterr().err.splitlines()
    assert first == "local-sgd [seed 1]" and second.endswith("without a terminal has") and not others


def test_where_somebody_watches_the_line_changes(capsys):
    screen = StringIO()
    with progress(Console(file=screen, force_terminal=True)) as tell:
        tell("powersgd, seed 0")
    assert capsys.readouterr().err == "" and "powersgd" in screen.getvalue()
