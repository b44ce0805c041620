"""Every example in a docstring runs. tests/test_api.py runs the ones of public names."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import shoal

PUBLIC = {f"{module}.{name}" for module, names in shoal._HOMES.items() for name in names}
MODULES = [module.name for module in pkgutil.walk_packages(shoal.__path__, "shoal.")
           if not module.name.endswith("__main__")]
PACKAGES = sorted(path.parent.name for path in Path(shoal.__file__).parent.glob("*/__init__.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_the_examples_of_a_package_run(package: str) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for name in MODULES:
        if name.split(".")[1] == package:
            for test in doctest.DocTestFinder().find(importlib.import_module(name)):
                if test.name not in PUBLIC:
                    assert runner.run(test).failed == 0, test.name
