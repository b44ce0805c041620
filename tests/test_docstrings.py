"""Every example in a docstring runs, but those of the API that need a run: tests/test_api.py has these."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import shoal

NEED_A_RUN = {
    "train", "sample", "import_hf", "export_hf", "load_checkpoint", "chaos", "verify", "train_tokenizer",
    "write_report", "watch", "dry_run",
}  # fmt: skip
WITH_A_RUN = [module for module, names in shoal._HOMES.items() if NEED_A_RUN & {*names}]
MODULES = [module.name for module in pkgutil.walk_packages(shoal.__path__, "shoal.")
           if module.name not in WITH_A_RUN and not module.name.endswith("__main__")]
PACKAGES = sorted(path.parent.name for path in Path(shoal.__file__).parent.glob("*/__init__.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_the_examples_of_a_package_run(package: str) -> None:
    for name in MODULES:
        if name.split(".")[1] == package:
            module = importlib.import_module(name)
            assert doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0, name
