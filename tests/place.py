"""Where `shoal` is used wrong: good files, to be damaged or given with bad options."""

from __future__ import annotations

import shutil
from pathlib import Path

from shoal.cli.main import main

CONFIG = """
[model]
name = "tiny"
layers = 2
hidden = 32
heads = 2
ffn = 64
[data]
source = "text"
paths = ["{corpus}"]
cache = "{cache}"
sequence_length = 32
[train]
steps = 2
global_batch = 8
validation_sequences = 8
threads = 1
device = "cpu"
"""


class Place:
    """A corpus, a config that trains, and room for files."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.corpus = folder / "corpus"
        self.corpus.mkdir()
        for number in range(120):
            (self.corpus / f"{number}.txt").write_text(f"document {number} says {'something ' * 20}\n")
        self.config = CONFIG.format(corpus=self.corpus, cache=folder / "cache")
        self.toml = self.write("run.toml", self.config)

    def write(self, name: str, content: str | bytes) -> Path:
        """A new file."""
        path = self.folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def run(self) -> Path:
        """A run folder with a checkpoint after each of two steps: trained once."""
        folder = self.folder / "done"
        if not folder.exists():
            words = ["--checkpoint.every", "1", "--run-folder", str(folder)]
            assert main(["train", str(self.toml), *words]) == 0
        return folder

    def copy(self, name: str) -> Path:
        """A copy of `run` to be damaged."""
        return Path(shutil.copytree(self.run(), self.folder / name))
