"""Rules of the source tree: one direction of imports, no cycles, small files and folders, unique names."""

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

import grimp
import pytest

from tests.groups import GROUPS, ROOT

SHOAL = Path(__file__).parents[1] / "shoal"
FILES = sorted(SHOAL.rglob("*.py"))
CLASS = re.compile(r"^\s*class (\w+)(?=[(:])", re.MULTILINE)  # no tree of each file, which would take seconds
MOST_FILES, MOST_LINES, MOST_COMMAND_LINES = 15, 420, 150


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda path: str(path.name))
def test_a_folder_has_at_most_15_files(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= MOST_FILES


def test_files_are_short_and_command_files_shorter() -> None:
    lines = {str(path.relative_to(SHOAL)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: n for name, n in lines.items() if n > MOST_LINES} == {}
    assert {name: n for name, n in lines.items() if name.startswith("cli/") and n > MOST_COMMAND_LINES} == {}


def test_no_two_classes_share_a_name() -> None:
    """A leading underscore makes no difference."""
    homes = defaultdict(list)
    for path in FILES:
        for name in CLASS.findall(path.read_text()):
            homes[name.lstrip("_")].append(str(path.relative_to(SHOAL)))
    assert len(homes) > 500
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_every_package_says_what_it_is() -> None:
    """Three sentences: what it is, what is in it, what it may use."""
    for init in sorted(SHOAL.glob("*/__init__.py")):
        said = ast.get_docstring(ast.parse(init.read_text())) or ""
        assert said.count(". ") + said.count(".\n") + said.endswith(".") >= 3, init


def test_no_two_files_import_each_other_even_in_a_round() -> None:
    """Annotations and imports inside functions count too."""
    graph = grimp.build_graph("shoal", cache_dir=None)
    left = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    importers = Counter(imported for imports in left.values() for imported in imports)
    free = [module for module in left if not importers[module]]
    while free:  # take away what nobody imports, again and again: only circles remain, and what they import
        for imported in left.pop(free.pop()):
            importers[imported] -= 1
            if not importers[imported]:
                free.append(imported)
    in_circles = {module for module, imports in left.items() if imports & left.keys()}
    assert not in_circles


def test_groups_of_tests_name_files_that_exist() -> None:
    assert not [file for files in GROUPS.values() for file in files if not (ROOT / file).exists()]
