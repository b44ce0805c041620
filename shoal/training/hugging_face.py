"""Models from and to Hugging Face's format: the TOML of a run that starts with one, and a run's model as a folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import tomli_w
import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from shoal.base.errors import UsageError
from shoal.base.files import check_writable, claim, write_atomically
from shoal.engine.checkpoint import storage
from shoal.engine.checkpoint.gguf import check_gguf
from shoal.engine.checkpoint.gguf import export_gguf as export_gguf_file
from shoal.engine.checkpoint.hugging_face import HFWeights
from shoal.engine.checkpoint.hugging_face_export import HFExport
from shoal.engine.data.chat import PLAIN, ChatTemplate
from shoal.engine.data.tokenizer import BytesTokenizer, Tokenizer, has_other_tokenizer
from shoal.engine.optim.schedule import learning_rate
from shoal.spec.config import build_config
from shoal.spec.hugging_face import hf_config
from shoal.spec.optimizers import READ_BY
from shoal.training.inference.source import describe_hf, describe_run, find_good_checkpoint, find_hf_folder

BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
"""Files that belong to a tokenizer or a model, in the run folder or in the folder that a run started with."""


def import_hf(folder: str | Path, out: str | Path | None = None, *, sequence_length: int | None = None) -> str:
    """Return the TOML of a run that starts with the weights of a model folder, and write it to a new file.

    Args:
        folder: ``config.json`` and weights of a family in docs/hugging-face.md, ``tokenizer.json`` if it has one; or
            "owner/name" of a model on the Hugging Face hub.
        sequence_length: tokens per sequence of the run (default: 1024, or the model's longest sequence if shorter).

    Raises:
        UsageError: another family, other files, more tokens than learned positions, or ``out`` exists.

    >>> import shoal
    >>> _ = shoal.export_hf("runs/example", "models/example")
    >>> print(shoal.import_hf("models/example").splitlines()[1])
    name = "example"
    """
    check_writable(Path(out) if out else None, "--out", ".toml", new=True)
    name = Path(folder).expanduser().absolute().name
    folder = find_hf_folder(folder).absolute()
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such folder.\n  Give one with config.json and weights, or owner/name "
                         "of a model on the Hugging Face hub.")
    values = describe_hf(folder, name, sequence_length)
    shape = build_config(values).model.shape(vocab=1, sequence_length=1)
    if shape.family == "gpt" and (sequence_length or 0) > shape.max_sequence:
        most = shape.max_sequence
        raise UsageError(f"--sequence-length {sequence_length}: the model has positions for {most} tokens.\n"
                         f"  Give at most {most}.")
    if found := HFWeights(folder, shape).optimizer:  # its files are readable
        names = {"lr": "learning_rate"}
        values["optimizer"] = {"from_weights": True} | {names.get(name, name): each for name, each in found.items()}
        build_config(values)
    text = tomli_w.dumps(values)
    if out:
        write_atomically(Path(out), text, new=True)
    return text


def export_hf(
    run_folder: str | Path, out: str | Path, *, dtype: str = "saved",
    weights: Literal["safetensors", "dcp"] = "safetensors", optimizer: bool = False,
) -> str:
    """Write the newest good checkpoint of a run as a new folder that transformers' ``from_pretrained`` reads.

    The folder appears under its name when it is complete. A tokenizer goes along if the run has one of its own.

    Args:
        dtype: "saved", or the number format of the weights as torch names it.
        weights: the format of their files; "dcp" is read by `torch.distributed.checkpoint` instead.
        optimizer: with "dcp", also write the moments of "adam" or "adamw".

    Returns:
        What was written, in a line.

    Raises:
        UsageError: no run, no good checkpoint, a model that transformers does not have, or ``out`` exists.

    >>> import shoal
    >>> shoal.export_hf("runs/example", "exported")
    'exported: LlamaForCausalLM, step 2, float32; no tokenizer (the run reads bytes)'
    """
    out, number_format = Path(out), read_dtype(dtype)
    if weights not in ("safetensors", "dcp"):
        raise UsageError(f"--weights {weights}: give safetensors or dcp.")
    config, shape, tokenizer = describe_run(run_folder)
    if os.path.lexists(out):
        raise UsageError(f"--out {out} exists already, and nothing is overwritten.\n  Name a new folder.")
    hf_config(shape, "", str(run_folder))  # before anything is read
    if optimizer and (weights != "dcp" or config.optimizer.name not in READ_BY["from_weights"]):
        raise UsageError(f"--optimizer with --weights {weights}, and optimizer.name = '{config.optimizer.name}': only "
                         "the state of adam or adamw is written, with --weights dcp.\n  Leave it out.")
    found = find_good_checkpoint(config, run_folder)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise UsageError(f"--out {out} cannot be made: {error.strerror}.") from None
    try:
        stored = HFExport(found.path, shape, number_format)
        if weights == "dcp":
            rate = learning_rate(min(found.step, config.train.steps - 1), config.train.steps, config.optimizer)
            stored.save_dcp(made, config.optimizer if optimizer else None, rate)
        else:
            stored.save_safetensors(made)
        ends = {"bos_token_id": None, "eos_token_id": tokenizer.end_of_document}  # not the family's default tokens
        longest = max(shape.max_sequence, config.data.sequence_length)  # rotary positions are as many as were trained
        described = hf_config(shape.model_copy(update={"max_sequence": longest}), stored.dtype, str(run_folder)) | ends
        write_atomically(made / "config.json", json.dumps(described, indent=2))
        tokens = _write_tokenizer(tokenizer, Path(run_folder), config.model.weights, made)
        for path in (*made.iterdir(), made):
            storage.sync(path)
        storage.rename(made, out)
    except (SafetensorError, CheckpointException) as error:
        why = str(error).splitlines()[-1].rstrip(".")
        raise UsageError(f"--out {out} cannot be written: {why}.\n  Is its disk full?") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    left = shape.mtp_depth - described.get("num_nextn_predict_layers", 0)
    tokens += "; without its modules of multi-token prediction, which the family does not have" if left else ""
    return f"{out}: {described['architectures'][0]}, step {found.step}, {stored.dtype}; {tokens}"


def read_dtype(dtype: str) -> torch.dtype | None:
    """Return the number format of exported weights; None for that of the checkpoint.

    Raises:
        UsageError: another name.
    """
    if dtype not in ("saved", "float32", "bfloat16", "float16"):
        raise UsageError(f"--dtype {dtype}: give saved, float32, bfloat16 or float16.")
    return None if dtype == "saved" else getattr(torch, dtype)


def export_gguf(run_folder: str | Path, out: str | Path, *, dtype: str = "saved") -> str:
    """Write the newest good checkpoint of a run as a new GGUF file for llama.cpp, with its tokenizer and chat template.

    Needs the extra ``shoal[gguf]``.

    Args:
        dtype: "saved", or the number format of matrices as torch names it; llama.cpp's own tool quantises further.

    Returns:
        What was written, in a line.

    Raises:
        UsageError: no run, no good checkpoint, a model or tokenizer that llama.cpp does not have, or ``out`` exists.

    >>> import shoal
    >>> shoal.export_gguf("runs/example", "example.bin")
    Traceback (most recent call last):
    shoal.base.errors.UsageError: --out example.bin: give a file ending in .gguf.
    """
    out, number_format = Path(out), read_dtype(dtype)
    config, shape, tokenizer = describe_run(run_folder)
    check_writable(out, "--out", ".gguf", new=True)
    architecture = check_gguf(shape, tokenizer, str(run_folder))
    if find_spec("gguf") is None:
        raise UsageError("shoal export gguf needs the extra: pip install 'shoal[gguf]'.")
    found = find_good_checkpoint(config, run_folder)
    weights = [config.model.weights] if config.model.weights else []
    template = ChatTemplate.find([Path(run_folder), *weights]).text
    made = out.with_name(f".{out.name}-{os.getpid()}")
    try:
        export_gguf_file(
            found.path, shape, made, number_format, architecture=architecture,
            name=config.model.name, tokenizer=tokenizer, template="" if template == PLAIN else template,
        )
        storage.sync(made)
        claim(made, out)
    finally:
        made.unlink(missing_ok=True)
    tokens = "no tokenizer (the run reads bytes)" if isinstance(tokenizer, BytesTokenizer) else "with its tokenizer"
    return f"{out}: {architecture}, step {found.step}, {out.stat().st_size:,} bytes; {tokens}"


def _write_tokenizer(tokenizer: Tokenizer, run_folder: Path, weights: Path | None, made: Path) -> str:
    name = "bytes" if isinstance(tokenizer, BytesTokenizer) else str(tokenizer.path)
    for folder in (weights, run_folder):
        if folder is not None and not has_other_tokenizer(folder, name):
            for file in BESIDE:
                if (folder / file).is_file():
                    shutil.copyfile(folder / file, made / file)
    if isinstance(tokenizer, BytesTokenizer):
        return "no tokenizer (the run reads bytes)"
    shutil.copyfile(tokenizer.path, made / "tokenizer.json")
    if not (made / "tokenizer_config.json").exists():
        values = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.end_name}
        write_atomically(made / "tokenizer_config.json", json.dumps(values, indent=2))
    return "with its tokenizer"
