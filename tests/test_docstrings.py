"""Every example in a docstring runs. tests/test_api.py runs the ones of public names."""

import doctest
import importlib
from pathlib import Path

import pytest

import shoal

PUBLIC = {f"{module}.{name}" for module, names in shoal._HOMES.items() for name in names}
ROOT = Path(shoal.__file__).parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))


def list_modules(package: str) -> list[str]:
    """The modules of a package that have an example."""
    files = [file for file in sorted((ROOT / package).rglob("*.py")) if ">>>" in file.read_text()]
    names = [".".join(file.relative_to(ROOT.parent).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_examples_of_a_package_run(package: str) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for name in list_modules(package):
        for test in doctest.DocTestFinder().find(importlib.import_module(name)):
            if test.name not in PUBLIC:
                assert runner.run(test).failed == 0, test.name
