"""`shoal import hf`, `shoal export hf` and `shoal export gguf`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import PositiveInt

import shoal
from shoal.base.options import POSITIONAL
from shoal.base.section import Section
from shoal.base.terminal import printable, quote
from shoal.spec.config import OptimizerConfig


class ImportOptions(Section):
    folder: Annotated[Path, POSITIONAL]
    """Folder of a model: config.json, weights as safetensors or DCP, and a tokenizer.json if it has one; or owner/name
    on the Hugging Face hub."""

    out: Path | None = None
    """File to write instead of the terminal."""

    sequence_length: PositiveInt | None = None
    """Tokens per sequence of the run (default: 1024, or the model's longest sequence if that is shorter)."""


class FileExportOptions(Section):
    run_folder: Annotated[Path, POSITIONAL]
    """A run folder that holds a checkpoint."""

    out: Path
    """New folder or file to write."""

    dtype: Literal["saved", "float32", "bfloat16", "float16"] = "saved"
    """Number format of the weights; saved keeps the checkpoint's."""


class ExportOptions(FileExportOptions):
    weights: Literal["safetensors", "dcp"] = "safetensors"
    """Format of the files: safetensors, or a checkpoint that torch.distributed.checkpoint reads, in the same names."""

    optimizer: bool = False
    """With dcp, also the moments of adam or adamw, in torch's names, with which torch's own optimizer continues."""


def import_hf(options: ImportOptions) -> int:
    """Print or write the TOML of a run that starts with the model."""
    text = shoal.import_hf(options.folder, options.out, sequence_length=options.sequence_length)
    if options.out is None:
        print(text)
        return 0
    words = f"shoal train {quote(options.out)} --data.paths TEXT"
    if "\ntokenizer = " not in text:
        words += " --data.tokenizer FILE (its tokenizer.json, which the folder lacks)"
    if "\nlearning_rate = " not in text:  # that of a run from scratch would undo much of what the model has learned
        words += f" --optimizer.learning-rate RATE (default: {OptimizerConfig().learning_rate:g})"
    print(printable(f"written: {options.out}\nNext: {words}"))
    return 0


def export_hf(options: ExportOptions) -> int:
    """Write the newest good checkpoint as a model folder."""
    print(shoal.export_hf(**dict(options)))
    return 0


def export_gguf(options: FileExportOptions) -> int:
    """Write the newest good checkpoint as a file of llama.cpp."""
    print(shoal.export_gguf(**dict(options)))
    return 0
