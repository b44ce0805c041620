"""What is split operator by operator: a model of the catalog, or a module from a user's file, with example inputs."""

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


def catalog_shape(model: str, layers: int | None, sequence_length: int) -> ModelShape:
    """The shape of a dense model of the catalog, or of its first layers.

    Raises:
        UsageError: the model has experts or fewer layers, or no positions for so many tokens.
    """
    shape = model_shape(model)
    if shape.experts or shape.depths:
        raise UsageError(f"--model {model}: which tokens an expert gets depends on numbers; plan dense models")
    if layers:
        if layers > shape.layers:
            raise UsageError(f"--layers {layers}: {model} has {shape.layers}")
        shape = shape.model_copy(update={"layers": layers})
    if shape.family == "gpt" and sequence_length > shape.max_sequence:
        raise UsageError(f"--sequence-length {sequence_length}: {model} has positions for {shape.max_sequence}")
    return shape


def catalog_model(shape: ModelShape, sequences: int, sequence_length: int, *, check: bool) -> Subject:
    """A model in float64 and example tokens; of one that is not checked, shapes alone.

    Args:
        sequences: of a micro-batch, of all devices together.
    """
    with torch.device("cpu" if check else "meta"):
        model = Transformer(shape).double()
        if check:
            initialise(model, 0)
            tokens = torch.randint(0, shape.vocab, (sequences, sequence_length))
        else:
            tokens = torch.empty((sequences, sequence_length), dtype=torch.int64)
    return model, (tokens, tokens)


def own_module(text: str, *, check: bool) -> Subject:
    """A user's module from a file of theirs; one that is checked has numbers."""
    file, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier() or not Path(file).is_file():
        raise UsageError(f"--module {text}: write FILE.py:FUNCTION, of a file that is there")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"--module {text}: {file} is no Python file")
    space = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(space)
        made = getattr(space, name)() if hasattr(space, name) else None
    except Exception as error:
        raise UsageError(f"--module {text}: {type(error).__name__}: {error}") from error
    if made is None:
        raise UsageError(f"--module {text}: {did_you_mean(name, [n for n in vars(space) if not n.startswith('_')])}")
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise UsageError(f"--module {text}: {name}() must return (module, example inputs)")
    module, inputs = made
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    leaves = torch.utils._pytree.tree_leaves(inputs)
    held = {"its weights": module.parameters(), "its buffers": module.buffers(), "the inputs": leaves}
    empty = [what for what, every in held.items() if any(isinstance(x, torch.Tensor) and x.is_meta for x in every)]
    if check and empty:
        raise UsageError(
            f"--module {text} --check: {' and '.join(empty)} are on the meta device, which holds no numbers to compute"
            " with.\n  Make them on the CPU, or plan without --check."
        )
    return module.double(), torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs
    )
