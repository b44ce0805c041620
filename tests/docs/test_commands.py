"""Commands in the README and the documentation are commands of shoal, with options that these have."""

import re
from functools import cache

import pytest

from shoal.cli.commands import COMMANDS
from shoal.cli.completion import list_options
from tests.docs.test_site import PAGES, ROOT

COMMAND = re.compile(r"(?:^ {4,}|^\$ |`)(?:\w+=\S+ )*shoal ([a-z][^`#|;&>\n]*)", re.MULTILINE)
OPTION = re.compile(r"(?<=\s)--[a-z][\w.-]*")
OF_THEIR_OWN = {"explain", "bench"}  # each topic and each benchmark has options of its own


@cache
def options_of(name: str) -> frozenset[str]:
    return frozenset(list_options(COMMANDS[name]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_exist(page) -> None:
    text = page.read_text().replace("\\\n", " ")
    for words in COMMAND.findall(text):
        if words.startswith("help "):
            continue
        name = next((n for n in (" ".join(words.split()[:2]), words.split()[0]) if n in COMMANDS), "")
        assert name, f"shoal {words}"
        if name.split()[0] not in OF_THEIR_OWN:
            unknown = [o for o in OPTION.findall(words) if not is_known(o.replace("_", "-"), options_of(name))]
            assert not unknown, f"shoal {words}: {unknown}"


def is_known(option: str, options: frozenset[str]) -> bool:
    """Return whether it is an option, its negative, or a field of one that is a section."""
    option = option.replace("--no-", "--").replace(".no-", ".")
    return option in options or option.rpartition(".")[0] in options
