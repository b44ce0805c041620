"""The examples of CONTRIBUTING.md are at most 30 lines each, and run."""

import re
import tomllib
from pathlib import Path

import pytest

from shoal.spec.catalog.software import Software

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
EXAMPLES = dict(re.findall(r"## (Add [^\n]*)\n.*?```(?:python|toml)\n(.*?)```", TEXT, re.DOTALL))


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_is_short_and_runs(title: str) -> None:
    code = EXAMPLES[title]
    assert code.count("\n") <= 30
    if "software" in title:
        ((name, fields),) = tomllib.loads(code).items()
        assert Software(name=name, **fields).overlap_data
    else:
        exec(compile(code, title, "exec"), {"__name__": "example"})


def test_there_are_five() -> None:
    assert len(EXAMPLES) == 5
