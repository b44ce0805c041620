"""Execute descriptions on real processes, over point-to-point transfers of any torch.distributed backend."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.labs.collectives.description import VECTORS, Description, even

PIECE_BYTES = 2 << 20  # largest message of a piece; while one piece is added, the next is in flight
MOST_PIECES = 4


def run_vector(
    description: Description, x: Tensor, group: dist.ProcessGroup, *, pieces: int | None = None
) -> Tensor:
    """Broadcast, reduce or all-reduce contiguous ``x`` in place; a reduce leaves partial sums elsewhere.

    A large vector is cut into pieces. Each runs the algorithm independently, one step after the piece before it, so
    that transfers and additions overlap.

    Args:
        x: of equal shape and dtype on every rank.
        pieces: number of pieces, the same on every rank (default: by the size of the messages).

    Raises:
        ValueError: the description is of another collective or number of ranks.
    """
    if description.collective not in VECTORS:
        raise ValueError(f"{description.collective} moves blocks of given sizes; use run_blocks")
    flat = x.view(-1)
    if description.copies:
        copies = _BlockBuffer(flat.repeat(group.size()), range(group.size()), [flat.numel()] * group.size())
        _interleave([_execute(description, copies, group)])
        flat.copy_(copies.load((group.rank(),)))
        return x
    if pieces is None:
        longest = max((len(message.blocks) for message in description.messages), default=0)
        bytes_sent = flat.numel() * flat.element_size() * longest / description.blocks
        pieces = min(MOST_PIECES, max(1, math.ceil(bytes_sent / PIECE_BYTES)))
    blocks = range(description.blocks)
    _interleave(
        _execute(description, _BlockBuffer(part, blocks, even(part.numel(), len(blocks))), group, tag)
        for tag, part in enumerate(flat.split(even(flat.numel(), pieces)))
    )
    return x


def run_blocks(description: Description, x: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Scatter, gather, all-gather, reduce-scatter or all-to-all with blocks of any sizes, empty ones too.

    Args:
        x: the rank's input blocks (`Description.initial`), concatenated. It is not changed.
        sizes: elements of each block (N x N of them for an all-to-all), the same on every rank.

    Returns:
        The rank's output blocks (`Description.final`), concatenated.

    Raises:
        ValueError: the description is of another collective or number of ranks, or ``sizes`` or ``x`` do not fit it.
    """
    if description.collective in VECTORS:
        raise ValueError(f"{description.collective} moves a vector that it cuts itself; use run_vector")
    if len(sizes) != description.blocks:
        raise ValueError(f"{len(sizes)} sizes for {description.blocks} blocks")
    rank = group.rank()
    given, wanted = description.initial(rank), description.final(rank)
    if x.dim() != 1 or x.numel() != sum(sizes[block] for block in given):
        raise ValueError(f"an input of shape {tuple(x.shape)} for blocks of {[sizes[b] for b in given]} elements")
    received = {block for message in description.messages if message.target == rank for block in message.blocks}
    held = sorted(received.union(given))
    buffer = _BlockBuffer(x.new_empty(sum(sizes[block] for block in held)), held, [sizes[block] for block in held])
    buffer.store(given, x)
    _interleave([_execute(description, buffer, group)])
    return buffer.load(wanted)


class _BlockBuffer:
    """A flat tensor with the position of each block in it."""

    def __init__(self, flat: Tensor, blocks: Sequence[int], sizes: Sequence[int]):
        self.flat = flat
        self.spans: dict[int, tuple[int, int]] = {}
        start = 0
        for block, size in zip(blocks, sizes, strict=True):
            self.spans[block] = (start, start + size)
            start += size

    def views(self, blocks: Sequence[int]) -> list[Tensor]:
        """Return views in the order of the blocks: one for adjacent blocks, none for empty ones."""
        spans: list[list[int]] = []
        for start, stop in (self.spans[block] for block in blocks):
            if start == stop:
                continue
            if spans and spans[-1][1] == start:
                spans[-1][1] = stop
            else:
                spans.append([start, stop])
        return [self.flat[start:stop] for start, stop in spans]

    def load(self, blocks: Sequence[int]) -> Tensor:
        """Return the blocks as one flat tensor: a view if they are adjacent, else a copy."""
        views = self.views(blocks)
        return views[0] if len(views) == 1 else torch.cat(views) if views else self.flat[:0]

    def store(self, blocks: Sequence[int], values: Tensor, *, add: bool = False) -> None:
        """Write the blocks from one flat tensor, or add it to them."""
        views = self.views(blocks)
        for view, part in zip(views, values.split([view.numel() for view in views]) if views else (), strict=True):
            if add:
                view.add_(part)
            else:
                view.copy_(part)


def _execute(
    description: Description, buffer: _BlockBuffer, group: dist.ProcessGroup, tag: int = 0
) -> Iterator[None]:
    """Execute one rank's part of a description, and yield in each round while its messages are in flight.

    Args:
        tag: distinguishes the messages of several buffers between the same ranks.

    Raises:
        ValueError: the group has another number of ranks.
    """
    if description.ranks != group.size():
        raise ValueError(f"a description for {description.ranks} ranks in a group of {group.size()}")
    rank, scratch = group.rank(), buffer.flat[:0]
    for messages in description.rounds:
        send = next((message for message in messages if message.source == rank), None)
        receive = next((message for message in messages if message.target == rank), None)
        transfers, arrived = [], None
        if receive and (views := buffer.views(receive.blocks)):
            target = views[0]
            if receive.reduce or len(views) > 1:  # else the message is received in place
                numel = sum(view.numel() for view in views)
                if scratch.numel() < numel:
                    scratch = buffer.flat.new_empty(numel)
                target = arrived = scratch[:numel]
            transfers.append(dist.P2POp(dist.irecv, target, group=group, tag=tag, group_peer=receive.source))
        if send and (values := buffer.load(send.blocks)).numel():
            transfers.append(dist.P2POp(dist.isend, values, group=group, tag=tag, group_peer=send.target))
        works = dist.batch_isend_irecv(transfers) if transfers else []
        yield
        for work in works:
            work.wait()
        if receive and arrived is not None:
            buffer.store(receive.blocks, arrived, add=receive.reduce)


def _interleave(executions: Iterable[Iterator[None]]) -> None:
    """Advance all executions round by round: while one adds what arrived, the others' messages are in flight."""
    for _ in zip_longest(*executions):
        pass
