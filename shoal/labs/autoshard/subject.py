"""The module to plan, with example inputs: a model of the catalog, or a module from a user's file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.base.errors import UsageError, did_you_mean
from shoal.engine.models.transformer import Transformer, initialise
from shoal.spec.catalog import ModelShape, model_shape

Subject = tuple[nn.Module, tuple[Any, ...]]


def select_shape(model: str, layers: int | None, sequence_length: int) -> ModelShape:
    """Return the shape of a dense model of the catalog, or of its first layers.

    Raises:
        UsageError: the model has experts or fewer layers, or fewer positions than tokens.
    """
    shape = model_shape(model)
    if shape.experts or shape.depths:
        raise UsageError(f"--model {model}: the tokens of an expert depend on numbers; plan a dense model")
    if layers:
        if layers > shape.layers:
            raise UsageError(f"--layers {layers}: {model} has {shape.layers}")
        shape = shape.model_copy(update={"layers": layers})
    if shape.family == "gpt" and sequence_length > shape.max_sequence:
        raise UsageError(f"--sequence-length {sequence_length}: {model} has positions for {shape.max_sequence}")
    return shape


def build_model(shape: ModelShape, sequences: int, sequence_length: int, *, check: bool) -> Subject:
    """Build a model in float64 and example tokens, on the meta device unless it is checked.

    Args:
        sequences: per micro-batch, over all devices.
    """
    with torch.device("cpu" if check else "meta"):
        model = Transformer(shape).double()
        if check:
            initialise(model, 0)
            tokens = torch.randint(0, shape.vocab, (sequences, sequence_length))
        else:
            tokens = torch.empty((sequences, sequence_length), dtype=torch.int64)
    return model, (tokens, tokens)


def load_module(text: str, *, check: bool) -> Subject:
    """Load a user's module, in float64, and its inputs; with ``check`` they must not be on the meta device.

    Raises:
        UsageError: the function does not exist, fails, or returns something else.
    """
    file, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier() or not Path(file).is_file():
        raise UsageError(f"--module {text}: write FILE.py:FUNCTION, with an existing file")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"--module {text}: {file} is not a Python file")
    loaded = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(loaded)
        made = getattr(loaded, name)() if hasattr(loaded, name) else None
    except Exception as error:
        raise UsageError(f"--module {text}: {type(error).__name__}: {error}") from error
    if made is None:
        raise UsageError(f"--module {text}: {did_you_mean(name, [n for n in vars(loaded) if not n.startswith('_')])}")
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise UsageError(f"--module {text}: {name}() must return (module, example inputs)")
    module, inputs = made
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    leaves = torch.utils._pytree.tree_leaves(inputs)
    held = {"its weights": module.parameters(), "its buffers": module.buffers(), "the inputs": leaves}
    empty = [what for what, every in held.items() if any(isinstance(x, torch.Tensor) and x.is_meta for x in every)]
    if check and empty:
        raise UsageError(
            f"--module {text} --check: {' and '.join(empty)} are on the meta device, which holds no numbers.\n"
            "  Make them on the CPU, or plan without --check."
        )
    return module.double(), torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs
    )
