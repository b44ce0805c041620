"""A stage of a pipeline of one's own modules: what it computes of a chain, what it gets and what it sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from shoal.base.errors import UsageError
from shoal.engine.models.initial import stream_key
from shoal.engine.own.chain import Chain, Crossing, get_input, set_input
from shoal.engine.own.definition import OwnModel, seed_generators


class _Cut(BaseException):
    """End of a stage's part of a forward, with the input of the next module."""

    def __init__(self, x: Tensor):
        super().__init__()
        self.x = x


class StageLinks:
    """The modules of a chain as one stage computes them; see the module's docstring.

    Args:
        module: the full module, of which the parameters of others are freed.
        dtype, device: of the freed parameters, which are zeros without memory.

    Attributes:
        absent: parameters that the stage does not use.
        received: what the stage before has sent (`Chain.crossings`) for the micro-batch that runs forward, or backward,
            which may compute it again.
    """

    def __init__(self, chain: Chain, part: range, module: nn.Module, dtype: torch.dtype, device: torch.device):
        self.chain, self.part = chain, part
        self.received: Sequence[Tensor] = ()
        self._sent: dict[int, Tensor] | None = None  # outside of a forward
        self.absent = {
            name for name, p in module.named_parameters() if p.requires_grad and not chain.uses(name, part)
        }
        for name in self.absent:
            full = module.get_parameter(name)
            empty = nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(full.shape), requires_grad=False)
            for each in module.modules():
                for key, held in each._parameters.items():
                    if held is full:
                        each._parameters[key] = empty
        for i, name in enumerate(chain.names):
            link = module.get_submodule(name)
            if i < part.start:
                link.forward = self._passing(i)
        if part.start:
            first = module.get_submodule(chain.names[part.start])
            first.register_forward_pre_hook(self._receive, with_kwargs=True, prepend=True)
        if part.stop < len(chain.names):
            after = module.get_submodule(chain.names[part.stop])
            after.register_forward_pre_hook(self._end, with_kwargs=True, prepend=True)
        for name in {name for crossing in (*self.takes, *self.gives) for name, _ in crossing.places}:
            module.get_submodule(name).register_forward_hook(partial(self._exchange, name))

    @property
    def is_last(self) -> bool:
        return self.part.stop == len(self.chain.names)

    @property
    def takes(self) -> tuple[Crossing, ...]:
        """What the stage gets from the one before."""
        return self.chain.crossings[self.part.start] if self.part.start else ()

    @property
    def gives(self) -> tuple[Crossing, ...]:
        """What the stage sends to the next."""
        return () if self.is_last else self.chain.crossings[self.part.stop]

    def keeps(self, name: str) -> bool:
        """Return whether the stage saves a buffer or a parameter that is not trained."""
        place = self.chain.place(name)
        return place in self.part or (place < 0 and not self.part.start)

    def run(self, loss: Callable[[], Any], received: Sequence[Tensor]) -> Any:
        """Return the loss, or on an earlier stage the tensors for the next one.

        Raises:
            UsageError: a tensor has another shape than in the first batch.
        """
        self.received, self._sent = received, (found := dict[int, Tensor]())
        try:
            return loss()
        except _Cut as cut:
            sent = [cut.x, *(found[i] for i in range(1, len(self.gives)))]
        finally:
            self._sent = None
        for x, crossing in zip(sent, self.gives, strict=True):
            if (tuple(x.shape), x.dtype) != (crossing.shape, crossing.dtype):
                what = "gets" if x is sent[0] else "needs, from an earlier module,"
                raise UsageError(f"model.module: {self.chain.names[self.part.stop]!r} of its pipeline {what} "
                                 f"{list(x.shape)} of {x.dtype}, and of the first batch {list(crossing.shape)} of "
                                 f"{crossing.dtype}.\n  Make batches of one size, such as by padding in collate.")
        return sent

    def _passing(self, i: int) -> Callable[..., Any]:
        shape, dtype, structure = self.chain.outputs[i]

        def passing(*args: Any, **kwargs: Any) -> Any:
            zeros = torch.zeros(shape, dtype=dtype, device=get_input(args, kwargs).device)
            return tree_unflatten([zeros, *[None] * (structure.num_leaves - 1)], structure)

        return passing

    def _exchange(self, name: str, _: nn.Module, args: Any, output: Any) -> Any:
        """Replace tensors in a module's output by received ones, and note the ones to send."""
        leaves, structure = tree_flatten(output)
        for tensor, crossing in zip(self.received, self.takes, strict=False):
            for place, i in crossing.places:
                if place == name:
                    leaves[i] = tensor
        sent = self._sent
        for number, crossing in enumerate(self.gives if sent is not None else ()):
            for place, i in crossing.places:
                if place == name and sent is not None:
                    sent[number] = leaves[i]
        return tree_unflatten(leaves, structure)

    def _receive(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        return set_input(args, kwargs, self.received[0]) if self.received else None

    def _end(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        raise _Cut(get_input(args, kwargs))


class LinkSeeds:
    """Seeds of torch's generators at each module of a chain, so that a stage draws what one device would.

    Attributes:
        first: index of the first sample of the micro-batch that runs forward or backward.
    """

    def __init__(self, own: OwnModel, module: nn.Module, seed: int):
        self.seed, self.first = seed, 0
        for i, name in enumerate(own.name_links(module)):
            module.get_submodule(name).register_forward_pre_hook(lambda _, args, i=i: self._draw(i))

    def _draw(self, i: int) -> None:
        seed_generators(stream_key(self.seed, f"batch {self.first} module {i}"))
