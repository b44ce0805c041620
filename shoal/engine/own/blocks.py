"""Blocks of a model of one's own, which ZeRO-3 gathers one after the other, and their order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from shoal.base.errors import UsageError
from shoal.engine.parallel.zero.zero3_hooks import PrefetchHooks
from shoal.engine.parallel.zero.zero_engine import ShardedParameters

REMEDY = "Name modules that run once in each forward, in this order, or leave blocks out."


def group_parameters(module: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """Return the groups of parameters that are adjacent: of each block, then the rest; without blocks, of each module.

    Parameters that a module outside of the blocks has too belong to the rest.
    """
    if not blocks:
        return [list(each.parameters(recurse=False)) for each in module.modules()]
    inside = {each for block in blocks for each in block.modules()}
    outside = {p for each in module.modules() if each not in inside for p in each.parameters(recurse=False)}
    return [*([p for p in block.parameters() if p not in outside] for block in blocks), list(module.parameters())]


def recompute_modules(modules: Iterable[nn.Module]) -> None:
    """Make each module keep its inputs alone in a forward, and compute again in backward (Chen et al. 2016).

    Its hooks do not run again. It gets no cache of keys and values (transformers), which would grow by both forwards.
    """

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(lambda value: None if _is_cache(value) else value, (args, kwargs))
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    for each in modules:
        each.forward = partial(run, each.forward)


def _is_cache(value: object) -> bool:
    return type(value).__module__ == "transformers.cache_utils"


class Blocks:
    """The blocks of a module, in the order of their forward.

    All ranks gather and reduce the blocks in one order, so each forward has to run each block once, in this order. The
    parameters of a block have no values outside of its forward, and reading them there ends the process.

    Args:
        module: with its parameters in buckets.
        groups: groups of parameters, of `group_parameters`.

    Attributes:
        rest: buckets of the parameters outside of the blocks.
    """

    def __init__(
        self, names: Sequence[str], module: nn.Module, groups: list[list[nn.Parameter]], parameters: ShardedParameters
    ):
        self.names, self._entered, self._running, self._watched = names, 0, -1, False
        modules = [module.get_submodule(name) for name in names]
        self.owners: dict[nn.Parameter, set[int]] = defaultdict(set)
        for i, group in enumerate(groups[:-1]):
            for parameter in group:
                self.owners[parameter].add(i)
        for i, block in enumerate(modules):
            block.register_forward_pre_hook(lambda _, args, i=i: self._enter(i))  # before the hook that gathers
            block.register_forward_hook(lambda *_: self._leave())
        layout = parameters.mesh.layout
        units = zip([[block] for block in modules], groups[:-1], strict=True)
        keep = 0 if layout.reshard_after_forward else None
        self._hooks = PrefetchHooks(units, parameters, ahead=layout.prefetch, keep=keep)
        self.rest = [each for each in parameters.buckets if all(each not in held for held in self._hooks.buckets)]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Check the forward in the context; those after it, until the next, are recomputation.

        Raises:
            UsageError: a block does not run once and in order; or, in the first forward, a parameter of a block is
                used outside of it.
        """
        self._entered, self._hooks.recomputing = 0, False
        with nullcontext() if self._watched else _Watch(self):
            yield
        self._watched = self._hooks.recomputing = True
        if self._entered < len(self.names):
            raise UsageError(f"model.module: its block {self.names[self._entered]!r} does not run in the forward."
                             f"\n  {REMEDY}")

    def _enter(self, block: int) -> None:
        if self._hooks.recomputing:
            return
        if block != self._entered:
            after = f"after {self.names[self._entered - 1]!r}" if self._entered else "first"
            raise UsageError(f"model.module: its block {self.names[block]!r} runs {after} in the forward.\n  {REMEDY}")
        self._entered, self._running = block + 1, block

    def _leave(self) -> None:
        self._running = -1

    def look(self, value: object) -> None:
        """Check an argument of an operator."""
        if isinstance(value, nn.Parameter) and self._running not in (owners := self.owners.get(value, {self._running})):
            raise UsageError(f"model.module: a parameter of its block {self.names[min(owners)]!r}, of shape "
                             f"{list(value.shape)}, is used outside of the block's forward.\n  {REMEDY}")


class _Watch(TorchFunctionMode):
    """Show the arguments of each operator to `Blocks`, but not the reads of attributes such as ``shape``."""

    def __init__(self, blocks: Blocks):
        self.blocks = blocks

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") != "__get__":
            for value in tree_leaves((args, kwargs)):
                self.blocks.look(value)
        return func(*args, **(kwargs or {}))
