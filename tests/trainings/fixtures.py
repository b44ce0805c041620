"""One corpus for all trainings here, and one training on 4 ranks that nothing interrupts."""

import json
from pathlib import Path

import pytest

from shoal.spec.config import save_config
from tests.trainings.runs import FOUR_RANKS, ROOT, shoal, small_config

BASE_STEPS = 16


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """What shoal's models are written in, piece by piece: some hundred documents of JSON lines in one file, since every
    rank of every training looks at all files and reads all tokens."""
    folder = tmp_path_factory.mktemp("corpus") / "text"
    folder.mkdir()
    engine = ROOT / "shoal" / "engine"
    files = [file for name in ("models", "parallel", "optim") for file in sorted((engine / name).rglob("*.py"))]
    pieces = [piece for file in files for piece in file.read_text().split("\n\n\n")]
    (folder / "shoal.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    return folder


@pytest.fixture(scope="session")
def base_config(corpus, tmp_path_factory) -> Path:
    """The TOML file of `base_run`."""
    path = tmp_path_factory.mktemp("config") / "small.toml"
    metrics = {"sample_prompt": None, "tensorboard": True}
    train = {"steps": BASE_STEPS, "validate_every": BASE_STEPS // 2}
    save_config(small_config(corpus, FOUR_RANKS, train=train, metrics=metrics), path)
    return path


@pytest.fixture(scope="session")
def base_run(base_config, tmp_path_factory) -> tuple[Path, str]:
    """The folder of a run on 4 ranks (dp 2 x tp 2, ZeRO-1) by the command line, and what it said."""
    folder = tmp_path_factory.mktemp("base") / "run"
    code, output = shoal("train", base_config, "--run-folder", folder)
    assert code == 0, output
    return folder, output
