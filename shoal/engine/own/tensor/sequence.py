"""Sequence parallelism of any module: between the layers that a table splits, a rank has a part of the tokens.

The layers of the module (`SEQUENCE_PARALLEL`, or the modules of the list that holds split layers) compute tokens one by
one, but for the modules in them that hold split layers, such as attention. Those gather the tokens of all ranks at
their entry, and a layer split by input sums its output and leaves each rank its tokens. Adjacent layers pass the parts
on; the first takes its part of the tokens, and the last gathers them. Gradients of parameters between are summed, and
of other inputs of a layer, such as the conditioning of a diffusion transformer.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from shoal.base.errors import UsageError
from shoal.engine.own.tensor.layers import InputSplitLinear, OutputSplitLinear, SplitRanks

SEQUENCE_PARALLEL = "sequence_parallel"
"""Style of a layer whose ranks have a part of the tokens."""

PARTIAL = "replicated_with_grad_allreduce"


def split_sequence(
    module: nn.Module, rules: Mapping[str, str], ranks: SplitRanks, edges: Collection[str]
) -> list[str]:
    """Split the tokens between the split layers of a module, in place.

    Args:
        rules: style of each module and parameter that a table names; the table is applied already.
        edges: names of modules that start a stage of a pipeline, which gets all tokens.

    Returns:
        Names of parameters whose gradients are partial sums then.

    Raises:
        UsageError: the table names no layers, or one that has split layers itself and not in a module of it.
    """
    names, summed = find_layers(module, rules), list[str]()
    for name in names:
        summed += _split_layer(module, name, rules, ranks)
    runs = list(_find_runs(module, names, edges))
    for name in names:
        enter = ranks.split_tokens if any(name == first for first, _ in runs) else _keep
        _hook_inputs(module, name, enter, lambda x, _: ranks.enter_each(x))
    for _, last in runs:
        module.get_submodule(last).register_forward_hook(partial(_change_output, ranks.gather_tokens))
    return summed


def find_layers(module: nn.Module, rules: Mapping[str, str]) -> list[str]:
    """Return the names of the layers: those that rules name, or all modules of lists that hold a "rowwise" layer.

    Raises:
        UsageError: there is none, or one is in another.
    """
    names = [name for name, style in rules.items() if style == SEQUENCE_PARALLEL]
    for name, style in rules.items() if not names else ():
        parts = name.split(".")
        owners = (".".join(parts[:i]) for i in range(1, len(parts)))
        outer = next((each for each in owners if isinstance(module.get_submodule(each), nn.ModuleList)), None)
        if style == "rowwise" and outer is not None:
            found = [f"{outer}.{part}" for part in module.get_submodule(outer)._modules]
            names += [each for each in found if each not in names]
    if not names:
        raise UsageError("parallel.sequence_parallel with model.module, which has no list of layers with a 'rowwise' "
                         f"one.\n  Name its layers {SEQUENCE_PARALLEL!r} in tensor_parallel.")
    for name in names:
        if around := [each for each in names if name.startswith(f"{each}.")]:
            raise UsageError(f"model.module: tensor_parallel has {SEQUENCE_PARALLEL!r} for {name!r}, which is a part "
                             f"of {around[0]!r}.\n  Leave one out.")
    return names


def _split_layer(module: nn.Module, name: str, rules: Mapping[str, str], ranks: SplitRanks) -> list[str]:
    """Gather tokens in a layer where its split layers need all; return the parameters that see a part."""
    entries, full, leaving = set[str](), set[str](), list[str]()
    modules = dict(module.named_modules())
    for rule, style in rules.items():
        layer, owner = modules.get(rule), rule.rpartition(".")[0]
        if not rule.startswith(f"{name}.") or style == PARTIAL:
            continue
        if isinstance(layer, OutputSplitLinear) and not layer.full:
            entries.add(owner)
        elif isinstance(layer, InputSplitLinear) and not layer.full:
            leaving.append(rule)
        else:  # of others, the module around computes with all tokens, from its input to its output
            full.add(owner)
    full |= {entry for entry in entries if any(_is_in(each, (entry,)) for each in full)}
    if name in entries | full:
        raise UsageError(f"parallel.sequence_parallel: {name} holds layers that tensor_parallel splits, beside what "
                         "computes a part of the tokens.\n  Put attention, and the feed-forward layers, into a module "
                         f"each, or name other modules {SEQUENCE_PARALLEL!r}.")
    for each in full:
        if not _is_in(each, full - {each}):
            _hook_inputs(module, each, ranks.gather_tokens, ranks.enter_full)
            module.get_submodule(each).register_forward_hook(partial(_change_output, ranks.split_tokens))
    for each in entries:
        if not _is_in(each, full | entries - {each}):
            _hook_inputs(module, each, partial(ranks.gather_tokens, entered=True), ranks.enter_full)
    for each in leaving:
        modules[each].scatters = not _is_in(each, full)
    biases = [f"{each}.bias" for each in leaving if not _is_in(each, full)]
    return [
        each for each in (f"{name}.{part}" for part, p in modules[name].named_parameters() if p.requires_grad)
        if each in biases or not _is_in(each, entries | full | set(leaving))
    ]


def _is_in(name: str, outer: Collection[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in outer)


def _find_runs(module: nn.Module, names: list[str], edges: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the first and the last of each run of layers that follow each other in a list."""
    run: list[str] = []
    for name in names:
        if run and (name != _find_next(module, run[-1]) or name in edges):
            yield run[0], run[-1]
            run = []
        run.append(name)
    yield run[0], run[-1]


def _find_next(module: nn.Module, name: str) -> str | None:
    """Return the name of the module that follows in a list."""
    outer, _, part = name.rpartition(".")
    owner = module.get_submodule(outer)
    parts = list(owner._modules)
    after = parts[parts.index(part) + 1 :] if isinstance(owner, (nn.ModuleList, nn.Sequential)) else []
    return f"{outer}.{after[0]}".lstrip(".") if after else None


def _keep(x: Tensor) -> Tensor:
    return x


def _hook_inputs(
    module: nn.Module, name: str, change: Callable[[Tensor], Tensor], others: Callable[[Any, Tensor], Any]
) -> None:
    """Change the first tensor of floats that a module is called with, and others, given them and the first."""

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        first = next((x for x in values if isinstance(x, Tensor) and x.is_floating_point()), None)
        if first is None:
            return None
        return _map((args, kwargs), lambda x: change(x) if x is first else others(x, first))

    module.get_submodule(name).register_forward_pre_hook(enter, with_kwargs=True)


def _map(values: Any, change: Callable[[Any], Any]) -> Any:
    """Change what is in tuples, lists and dicts, but not in other containers, which a module may keep."""
    if type(values) in (tuple, list):
        return type(values)(_map(each, change) for each in values)
    return {key: _map(each, change) for key, each in values.items()} if type(values) is dict else change(values)


def _change_output(change: Callable[[Tensor], Tensor], _: nn.Module, args: Any, output: Any) -> Any:
    """Change a module's output, or the first of them."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)
