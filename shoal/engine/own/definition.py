"""Definition of a model of one's own, and how ranks load it."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from numbers import Number
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.data import default_collate

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.files import expanded, open_to_read
from shoal.engine.own.optimizer import MakeOptimizer
from shoal.engine.own.user_code import explain, explained, pickle_code
from shoal.engine.sharding.loss import LossPlan
from shoal.spec.catalog import ModelShape

PICKLED = ".pkl"
"""Suffix of a definition that `save_own_model` wrote; other files are Python modules."""

Samples = Sequence[Any] | Callable[[], Sequence[Any]]


@dataclass(frozen=True)
class OwnModel:
    """A model, its loss and its samples.

    Attributes:
        model: returns the module, with its initial values. It is called on each rank, with the same state of torch's
            random generator, and once on the meta device if that is possible.
        loss: returns the summed loss of a batch and the number of terms in the sum, from (module, batch). A step
            minimises the sum over the global batch divided by the number of terms. A third value may be metrics: a dict
            of names and their (sum, number of terms), without gradients.
        data: samples, with ``len(data)`` and ``data[i]``; or a function that returns them, called on each rank.
        validation: samples of the validation, of the same kind; None for none.
        collate: makes a batch, any nesting of tensors, from a list of samples.
        blocks: names of modules in the order of the forward, of which ZeRO-3 holds one or two at a time, such as
            ``("layers.0", "layers.1")``; without any, it gathers the full model for each micro-batch.
        pipeline: names of modules that run one after the other, each with the output of the one before as its first
            input; a list of modules stands for its modules. ``parallel.pp`` splits them into stages. "auto" takes the
            list of the most modules, of those in no other list.
        tensor_parallel: how layers are split over ``parallel.tp`` ranks: styles by pattern of their names
            (`shoal.engine.own.tensor`); None for the plan that a model of transformers has (``model.tp_plan``); "auto"
            for a split of the operators, which the search finds.
        expert_parallel: the same of experts over ``parallel.ep`` ranks (`shoal.engine.own.tensor.experts`); None for
            ``model.ep_plan``.
        make_optimizer: returns a ``torch.optim.Optimizer`` of groups of parameters, in the place of ``optimizer.name``.
        schedule: returns the learning rate of a step, from (step, steps), in the place of ``optimizer.schedule``.
        on_step: called with each logged record (`shoal.training.records.metrics`). This and the next two are called on
            rank 0, in its process; what they raise ends the run.
        on_validation: called with the record of each step that validated.
        on_save: called with the step and the folder of each checkpoint that is complete.

    >>> import torch
    >>> own = OwnModel(
    ...     model=lambda: torch.nn.Linear(4, 1), loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
    ...     data=torch.ones(16, 4),
    ... )
    >>> own.build(seed=0).weight.shape, len(own.samples("train"))
    (torch.Size([1, 4]), 16)
    """

    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], tuple[Tensor, Any]]
    data: Samples
    validation: Samples | None = None
    collate: Callable[[list[Any]], Any] = default_collate
    blocks: tuple[str, ...] = ()
    tensor_parallel: Mapping[str, str] | LossPlan | Literal["auto"] | None = None
    make_optimizer: MakeOptimizer | None = None
    schedule: Callable[[int, int], float] | None = None
    on_step: Callable[[Any], object] | None = None
    on_validation: Callable[[Any], object] | None = None
    on_save: Callable[[int, Any], object] | None = None
    pipeline: tuple[str, ...] | Literal["auto"] = ()
    expert_parallel: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        """Raises `UsageError` if `model` or another function is not callable, or names are given as one text."""
        if isinstance(self.model, nn.Module):
            kind = type(self.model).__name__
            raise UsageError(f"model.module: its model is a module, {kind}.\n  Give a function that makes it on each "
                             "rank, such as lambda: Net().")
        for name in ("model", "loss", "collate", "make_optimizer", "schedule", "on_step", "on_validation", "on_save"):
            value = getattr(self, name)
            if not callable(value) and not (value is None and name not in ("model", "loss", "collate")):
                raise UsageError(f"model.module: its {name} is {_describe(value)}.\n  Give a function.")
        for name in ("blocks", "pipeline"):
            if isinstance(value := getattr(self, name), str) and (name, value) != ("pipeline", "auto"):
                raise UsageError(f"model.module: its {name} are the text {value!r}.\n  Give a tuple of names.")
        for name in ("tensor_parallel", "expert_parallel"):
            value = getattr(self, name)
            found = name == "tensor_parallel" and (value == "auto" or isinstance(value, LossPlan))
            if value is not None and not found and not isinstance(value, Mapping):
                raise UsageError(f"model.module: its {name} is {_describe(value)}.\n  Give a dict of patterns and "
                                 "styles.")

    def build(self, seed: int) -> nn.Module:
        """Build the module on the CPU, with the initial values of a seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with explained("its model()"):
                return self.checked(self.model())

    def compute(self, module: nn.Module, batch: Any) -> tuple[Tensor, Any, dict[str, list[Any]]]:
        """Return the summed loss [] of a batch, its number of terms, a number or [], and its metrics.

        Raises:
            UsageError: the loss is something else, or has no gradient although gradients are computed.
        """
        found = self.loss(module, batch)
        if not isinstance(found, (tuple, list)) or len(found) not in (2, 3):
            raise UsageError(f"model.module: its loss() returns {_describe(found)}, not the sum of the losses of the "
                             f"batch and the number of its terms.\n  {SUM_AND_TERMS}")
        loss, terms, metrics = found if len(found) == 3 else (*found, dict[str, Any]())
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            raise UsageError(f"model.module: the loss of its loss() is {_describe(loss)}, not a sum."
                             f"\n  {SUM_AND_TERMS}")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise UsageError("model.module: the loss of its loss() has no gradient: it was detached, or uses no "
                             "parameter.\n  Without any term, return (0 * model(...).sum(), 0).")
        if not _is_number(terms):
            raise UsageError(f"model.module: the number of terms of its loss() is {_describe(terms)}."
                             f"\n  {SUM_AND_TERMS}")
        pairs = metrics.values() if isinstance(metrics, dict) else [None]
        if not all(isinstance(pair, (tuple, list)) and len(pair) == 2 and all(map(_is_number, pair)) for pair in pairs):
            raise UsageError("model.module: the third value of its loss() is no dict of metrics and their (sum, number "
                             "of terms).\n  Return such as {'accuracy': (correct.sum(), correct.numel())}.")
        return loss.view(()), _detach(terms), {str(name): [*map(_detach, pair)] for name, pair in metrics.items()}

    def build_empty(self) -> nn.Module:
        """Build the module without values, on the meta device if it can be built there."""
        try:
            with torch.device("meta"):
                return self.checked(self.model())
        except UsageError:
            raise
        except Exception:  # a module that reads values while it is built
            return self.build(0)

    def samples(self, split: str) -> Sequence[Any]:
        """Return the samples of "train" or "validation"; without validation samples, the training's."""
        chosen = self.data if split == "train" or self.validation is None else self.validation
        with drawing(0), explained(f"its {split} data"):
            return chosen() if callable(chosen) else chosen

    def name_blocks(self, module: nn.Module) -> tuple[str, ...]:
        """Return the names of the modules that ``parallel.recompute`` computes again: of the pipeline, or the blocks.

        Raises:
            UsageError: as `name_links`.
        """
        return self.name_links(module) if self.pipeline else self.blocks

    def name_links(self, module: nn.Module) -> tuple[str, ...]:
        """Return the names of the modules of the pipeline's chain.

        Raises:
            UsageError: one does not exist, or is named twice; or there is no list to take.
        """
        modules, found = dict(module.named_modules()), list[str]()
        lists = [name for name, each in modules.items() if isinstance(each, (nn.ModuleList, nn.Sequential))]
        for name in self._find_longest(modules, lists) if self.pipeline == "auto" else self.pipeline:
            if name not in modules:
                raise UsageError(f"model.module: its pipeline has {name!r}, which its model has not.\n  Its modules "
                                 f"are {', '.join(list(modules)[1:10])}, ...")
            parts = [f"{name}.{part}".lstrip(".") for part in modules[name]._modules]
            found += parts if name in lists else [name]
        for name in found:
            if found.count(name) > 1 or any(name.startswith(f"{other}.") for other in found):
                raise UsageError(f"model.module: its pipeline has {name!r} twice, or as a part of another."
                                 "\n  Leave one out.")
        return tuple(found)

    def _find_longest(self, modules: dict[str, nn.Module], lists: list[str]) -> list[str]:
        outer = [name for name in lists if not any(name.startswith(f"{each}.") for each in lists)]
        if "" in lists:  # the model itself
            return [""]
        if not outer:
            raise UsageError("model.module: its pipeline is 'auto', and its model has no ModuleList or Sequential.\n"
                             "  Give the names of modules that run one after the other.")
        return [max(outer, key=lambda name: len(modules[name]._modules))]

    def checked(self, module: object) -> nn.Module:
        """Return what ``model`` has returned.

        Raises:
            UsageError: it is no module, or has parameters or blocks that cannot be trained.
        """
        if not isinstance(module, nn.Module):
            raise UsageError(f"model.module: its model() returns {type(module).__name__}, not an nn.Module.")
        for name, parameter in module.named_parameters():
            if isinstance(parameter, UninitializedParameter):
                raise UsageError(f"model.module: {name} of its model has no shape yet.\n  Run a batch through a model "
                                 "with lazy modules in model(), before it returns.")
            if parameter.is_complex() and parameter.requires_grad:
                raise UsageError(f"model.module: {name} of its model is complex.\n  Keep its real and imaginary part, "
                                 "and use torch.view_as_complex in the forward.")
        self._check_blocks(dict(module.named_modules()))
        return module

    def _check_blocks(self, modules: dict[str, nn.Module]) -> None:
        for name in self.blocks:
            if name not in modules:
                raise UsageError(f"model.module: there is no block {name!r} in its model.\n  Its modules are "
                                 f"{', '.join(list(modules)[1:10])}, ...")
            block = modules[name]
            if isinstance(block, (nn.ModuleList, nn.ModuleDict)):
                parts = ", ".join(f"{name}.{part}" for part in block._modules)
                raise UsageError(f"model.module: its block {name!r} is a list of modules, without a forward."
                                 f"\n  Name the modules in it: {parts}.")
            outer = next((other for other in self.blocks if name.startswith(f"{other}.")), None)
            if outer is not None or self.blocks.count(name) > 1:
                why = "is named twice" if outer is None else f"is a part of block {outer!r}"
                raise UsageError(f"model.module: its block {name!r} {why}.\n  Leave one out.")


SUM_AND_TERMS = "Return (loss.sum(), number of terms), both of the batch, such as (loss.sum(), loss.numel())."


def _is_number(value: object) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Number)


def _detach(value: Any) -> Any:
    return value.detach().view(()) if isinstance(value, Tensor) else value


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"{len(value)} values" if isinstance(value, (tuple, list)) else f"{type(value).__name__} {value!r:.40}"


def generator_states() -> tuple[bytes, str, object]:
    """Return the states of the generators of torch's CPU, NumPy and Python."""
    of_numpy = json.dumps(np.random.get_state(legacy=False), default=lambda array: array.tobytes().hex())
    return torch.get_rng_state().numpy().tobytes(), of_numpy, random.getstate()


def seed_generators(seed: int) -> None:
    """Seed torch's generators of the CPU and of the CUDA devices in use.

    `torch.manual_seed` also queues a call for each accelerator not in use, with the Python stack as text, which is slow
    at each module of each micro-batch.
    """
    seed &= (1 << 63) - 1
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Seed the generators of torch's CPU, NumPy and Python in the context, and restore them after it."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed & (1 << 63) - 1)  # not CUDA's, whose state is not restored
    np.random.seed(seed % (1 << 32))
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


class OwnShape(ModelShape):
    """Shape of a model of one's own: the names and shapes of its parameters. Its layers are not known."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    @staticmethod
    def describe(own: OwnModel) -> OwnShape:
        """Return the shape of a definition's model."""
        module = own.build_empty()
        tensors = tuple((name, tuple(p.shape)) for name, p in module.named_parameters() if p.requires_grad)
        if not tensors:
            raise UsageError("model.module: its model has no parameter to train.")
        layers = max(1, len(own.name_links(module)))
        return OwnShape(family="gpt", layers=layers, hidden=1, heads=1, kv_heads=1, head_dim=1, ffn=1, vocab=2,
                        max_sequence=1, tied=False, tensors=tensors)

    def parameters(self) -> int:
        return sum(math.prod(shape) for _, shape in self.tensors)

    def mean_layer_matrices(self) -> float:
        """Return infinity: stages get equal numbers of modules, as the work beside them is not known."""
        return math.inf

    def flops_per_token(self, sequence_length: int) -> int:
        """Return 0: the FLOPs of the model are not known."""
        return 0


@cache
def load_own_model(reference: str) -> OwnModel:
    """Load a definition: ``FILE.py:NAME``, or a file that `save_own_model` wrote.

    Raises:
        UsageError: there is no such file or name, its code fails, or it is no `OwnModel`.
    """
    path, _, name = reference.partition(":")
    file = expanded(path, "model.module").absolute()
    try:
        with drawing(0):  # so that ranks have the same random data
            found = _load(file, name or "own")
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"model.module = '{reference}': its code fails: {explain(error)}.") from error
    if not isinstance(found, OwnModel):
        raise UsageError(f"model.module = '{reference}': it is {type(found).__name__}, not a shoal.OwnModel.")
    return found


def _load(file: Path, name: str) -> Any:
    if file.suffix != PICKLED:
        return execute_file(file, name, "model.module")
    try:
        with open_to_read(file) as opened:  # of any size, as it may hold the samples
            folders, found = cloudpickle.load(opened)
    except OSError as error:
        raise UsageError(f"model.module: {file} cannot be read: {error.strerror}.") from None
    except Exception:
        raise UsageError(f"model.module: {file} is damaged, or no run has written it.\n  Give FILE.py:NAME.") from None
    sys.path += [folder for folder in folders if folder not in sys.path]
    return cloudpickle.loads(found)


def execute_file(file: Path, name: str, option: str) -> Any:
    """Execute a Python file, and return what has a name in it.

    Raises:
        UsageError: there is no such file or name. What its code raises is not caught.
    """
    if not file.is_file() or file.suffix != ".py":
        raise UsageError(f"{option}: there is no Python file {file}.\n  Give FILE.py:NAME.")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None, "a file with the suffix .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    sys.path.append(str(file.parent))  # of modules beside it
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        near = did_you_mean(name, [each for each in vars(module) if not each.startswith("_")])
        raise UsageError(f"{option}: {file} has no {name!r}; {near}\n  Give FILE.py:NAME.")
    return getattr(module, name)


def save_own_model(own: OwnModel, file: Path) -> None:
    """Write a definition whose functions may be of a notebook, with the folders from which it imports.

    Modules that are not installed are written with it, so that a change of their files does not change the run.

    Raises:
        UsageError: naming the field that holds what cannot be written, such as a lock or an open file.
    """
    for function in vars(own).values():
        module = sys.modules.get(getattr(function, "__module__", None) or type(function).__module__)
        path = getattr(module, "__file__", None)
        if module is None or not path or module.__name__.startswith("shoal."):
            continue
        if "site-packages" not in path and not path.startswith(sys.base_prefix):
            cloudpickle.register_pickle_by_value(module)
    try:
        content = cloudpickle.dumps(([folder for folder in sys.path if folder], pickle_code(own)))
    except Exception as error:  # objects may raise anything
        name = next((name for name, value in vars(own).items() if not _can_be_pickled(value)), "definition")
        raise UsageError(
            f"model.module: its {name} cannot be sent to the ranks: {type(error).__name__}: {error}."
            "\n  Give a function that makes such objects, or uses them, on each rank."
        ) from None
    with open(file, "xb") as opened:
        opened.write(content)


def _can_be_pickled(value: object) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # objects may raise anything
        return False
    return True
