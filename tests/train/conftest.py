"""One corpus for all trainings here, and one training on 4 ranks that nothing interrupts."""

from pathlib import Path

import pytest

from shoal.config import save

from .runs import FOUR_RANKS, ROOT, shoal, small_config


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """shoal's own sources as text files: about 300 kB."""
    folder = tmp_path_factory.mktemp("corpus") / "text"
    for file in sorted((ROOT / "shoal").rglob("*.py")):
        copy = folder / file.relative_to(ROOT).with_suffix(".txt")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text())
    return folder


@pytest.fixture(scope="session")
def base_config(corpus, tmp_path_factory) -> Path:
    """The TOML file of `base_run`."""
    path = tmp_path_factory.mktemp("config") / "small.toml"
    save(small_config(corpus, FOUR_RANKS), path)
    return path


@pytest.fixture(scope="session")
def base_run(base_config, tmp_path_factory) -> tuple[Path, str]:
    """The folder of a run on 4 ranks (dp 2 x tp 2, ZeRO-1) by the command line, and what it said."""
    folder = tmp_path_factory.mktemp("base") / "run"
    code, output = shoal("train", base_config, "--run-folder", folder)
    assert code == 0, output
    return folder, output
