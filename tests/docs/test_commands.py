"""Commands in the README and the documentation are commands of shoal, with options that these have."""

import re
import shlex
from functools import cache
from textwrap import dedent

import pytest

from shoal.cli.bench import load_benchmark
from shoal.cli.commands import COMMANDS
from shoal.cli.completion import list_options
from shoal.cli.main import main
from shoal.labs.explain.subjects import find_subject
from tests.docs.test_site import PAGES, ROOT

EXAMPLES = sorted(ROOT.glob("examples/*.toml"))
COMMAND = re.compile(r"(?:^ {4,}|^\$ |`)(?:\w+=\S+ )*shoal ([a-z][^`#|;&>\n]*)", re.MULTILINE)
OPTION = re.compile(r"(?<=\s)--[a-z][\w.-]*")
COMPUTED = re.compile(r"^(?: {4,}|\$ )shoal ((?:estimate|explain|goodput|simulate) .*?)(?:   .*| [|#].*)?$", re.M)
ELSEWHERE = re.compile(r"\.toml|\.csv|here|--dry-run|--run|optimizers")  # a file, calibration, ranks; or the course's


@cache
def list_known(name: str, subject: str) -> frozenset[str]:
    """Return the options of a command; each topic of `explain` and each benchmark has its own."""
    if name not in ("explain", "bench"):
        return frozenset(list_options(COMMANDS[name]))
    kind = load_benchmark(subject) if name == "bench" else find_subject(subject)[0]
    return frozenset({"--help", *(f"--{field.rstrip('_').replace('_', '-')}" for field in kind.model_fields)})


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_exist(page) -> None:
    text = page.read_text().replace("\\\n", " ").replace("\n#   ", "\n    ")
    for words in COMMAND.findall(text):
        if words.startswith("help "):
            continue
        name = next((n for n in (" ".join(words.split()[:2]), words.split()[0]) if n in COMMANDS), "")
        assert name, f"shoal {words}"
        subject = re.sub(r'^\w+ *"?', "", words).partition(" ")[0]
        if name not in ("explain", "bench") or "[" in subject or re.match(r"[a-z\d]", subject):  # no SUBJECT, no ...
            known = list_known(name, subject)
            unknown = [o for o in OPTION.findall(words) if not is_known(o.replace("_", "-"), known)]
            assert not unknown, f"shoal {words}: {unknown}"


def list_computed() -> list[str]:
    """Return the examples that only compute, one of each; the course's are run with what they print."""
    found = {
        command.strip(): None
        for page in PAGES if "course" not in page.parts
        for command in COMPUTED.findall(re.sub(r"\\\n +", "", page.read_text())) if not ELSEWHERE.search(command)
    }
    return list(found)


@pytest.mark.parametrize("command", list_computed())
def test_examples_that_only_compute_run(command, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == ("Does not fit" in (out := capsys.readouterr().out)), out


def test_a_module_of_ones_own_is_estimated_as_its_page_says(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("transformers")
    section = (ROOT / "docs" / "own-model.md").read_text().partition("## Estimates")[2]
    monkeypatch.chdir(tmp_path)
    files = re.search(r"^    # llama.py\n(.*?)\n\n    # run.toml\n(.*?)\n\n    shoal", section, re.M | re.S)
    for name, text in zip(("llama.py", "run.toml"), files.groups(), strict=True):
        (tmp_path / name).write_text(dedent(text))
    words = " ".join(section.split())
    for command in ("estimate run.toml --cluster 8xH100", re.search("estimate --model [^`]*", words)[0]):
        assert main(command.split()) == 0
    printed = " ".join(capsys.readouterr().out.split())
    stated = re.search(r"llama-1b on dp 8 .*? hidden\)", words)[0]
    took, kept = re.search(r"takes (\S+ ms), and activations (\S+ GB)", words).groups()
    assert all(each in printed for each in (stated, f"step {took};", f"activations {kept}")), printed


def test_a_module_of_ones_own_is_split_as_its_page_says(tmp_path, monkeypatch, capsys) -> None:
    page = (ROOT / "docs" / "auto.md").read_text()
    (tmp_path / "mine.py").write_text(dedent(re.search(r"^    # mine.py\n(.*?)\n\n(?=\S)", page, re.M | re.S)[1]))
    monkeypatch.chdir(tmp_path)
    command = re.search(r"^    shoal (plan auto --module .*?) --check", page, re.M)[1]
    assert main(command.split()) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^0.weight +\[Ay, B\]", printed, re.M) and re.search(r"^2.weight +\[A, By\]", printed, re.M)
    longer = re.search(r"data parallelism, takes (\S+) % longer", page)[1]
    assert re.search(rf"^data parallel .*\+{longer} %$", printed, re.M), printed


def is_known(option: str, options: frozenset[str]) -> bool:
    """Return whether it is an option, its negative, or a field of one that is a section."""
    option = option.replace("--no-", "--").replace(".no-", ".")
    return option in options or option.rpartition(".")[0] in options
