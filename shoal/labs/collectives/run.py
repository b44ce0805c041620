"""Descriptions executed by real processes, over point-to-point transfers of any torch.distributed backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.labs.collectives.description import VECTORS, Description, Message, even

Reduction = Callable[..., Tensor]
"""How arriving numbers are added to a rank's own: `torch.add`, `torch.mul`, `torch.minimum`, `torch.maximum`."""

PIECE_BYTES = 2 << 20  # of a message: while one piece is added, the next is on its way
MOST_PIECES = 4


def run_vector(
    description: Description, x: Tensor, group: dist.ProcessGroup, reduction: Reduction = torch.add, *,
    pieces: int | None = None,
) -> Tensor:  # fmt: skip
    """Broadcast, reduce or all-reduce contiguous ``x`` in place; a reduce leaves partial sums elsewhere.

    A large vector is cut into pieces. Each goes through the whole algorithm by itself, one step behind the piece before
    it, so that transfers and additions overlap.

    Args:
        x: of equal shape and dtype on every rank.
        pieces: how many; chosen by the size of the messages unless given. The same on every rank.

    Raises:
        ValueError: the description is of another collective or number of ranks.
    """
    if description.collective not in VECTORS:
        raise ValueError(f"{description.collective} moves blocks of given sizes: use run_blocks")
    flat = x.view(-1)
    if pieces is None:
        longest = max((len(message.blocks) for message in description.messages), default=0)
        bytes_sent = flat.numel() * flat.element_size() * longest / description.blocks
        pieces = min(MOST_PIECES, max(1, math.ceil(bytes_sent / PIECE_BYTES)))
    blocks = range(description.blocks)
    players = []
    for tag, part in enumerate(flat.split(even(flat.numel(), pieces))):
        memory = _Memory(part, blocks, even(part.numel(), len(blocks)))
        players.append(_Player(description, memory, group, reduction, tag))
    _play(players)
    return x


def run_blocks(
    description: Description, x: Tensor, sizes: Sequence[int], group: dist.ProcessGroup,
    reduction: Reduction = torch.add,
) -> Tensor:  # fmt: skip
    """Scatter, gather, all-gather, reduce-scatter or all-to-all with blocks of any sizes, empty ones too.

    Args:
        x: flat: the rank's blocks before (`Description.initial`), one after another. It is not changed.
        sizes: elements of each block; for an all-to-all those of all N x N. The same on every rank.

    Returns:
        Flat: the rank's blocks after (`Description.final`), one after another.

    Raises:
        ValueError: the description is of another collective or number of ranks, or ``sizes`` or ``x`` do not fit it.
    """
    if description.collective in VECTORS:
        raise ValueError(f"{description.collective} moves a vector that it cuts itself: use run_vector")
    if len(sizes) != description.blocks:
        raise ValueError(f"{len(sizes)} sizes for {description.blocks} blocks")
    rank = group.rank()
    given, wanted = description.initial(rank), description.final(rank)
    if x.dim() != 1 or x.numel() != sum(sizes[block] for block in given):
        raise ValueError(f"an input of shape {tuple(x.shape)} for blocks of {[sizes[b] for b in given]} elements")
    received = {block for message in description.messages if message.target == rank for block in message.blocks}
    held = sorted(received.union(given))
    memory = _Memory(x.new_empty(sum(sizes[block] for block in held)), held, [sizes[block] for block in held])
    memory.store(given, x)
    _play([_Player(description, memory, group, reduction)])
    return memory.load(wanted)


class _Memory:
    """A flat tensor, and where in it each block lies."""

    def __init__(self, flat: Tensor, blocks: Sequence[int], sizes: Sequence[int]):
        self.flat = flat
        self.place: dict[int, tuple[int, int]] = {}
        start = 0
        for block, size in zip(blocks, sizes, strict=True):
            self.place[block] = (start, start + size)
            start += size

    def views(self, blocks: Sequence[int]) -> list[Tensor]:
        """The memory of some blocks in their order, neighbours as one; none for empty blocks."""
        spans: list[list[int]] = []
        for start, stop in (self.place[block] for block in blocks):
            if start == stop:
                continue
            if spans and spans[-1][1] == start:
                spans[-1][1] = stop
            else:
                spans.append([start, stop])
        return [self.flat[start:stop] for start, stop in spans]

    def load(self, blocks: Sequence[int]) -> Tensor:
        """The blocks in one piece: a view where they are neighbours."""
        views = self.views(blocks)
        return views[0] if len(views) == 1 else torch.cat(views) if views else self.flat[:0]

    def store(self, blocks: Sequence[int], values: Tensor, reduction: Reduction | None = None) -> None:
        """Write the blocks from one piece, or reduce it into them."""
        views = self.views(blocks)
        for view, part in zip(views, values.split([view.numel() for view in views]) if views else (), strict=True):
            if reduction is None:
                view.copy_(part)
            else:
                reduction(view, part, out=view)


class _Player:
    """One rank's part of a description, on one memory.

    Args:
        tag: tells apart the messages of several players between the same ranks.
    """

    def __init__(
        self, description: Description, memory: _Memory, group: dist.ProcessGroup, reduction: Reduction, tag: int = 0
    ):
        if description.ranks != group.size():
            raise ValueError(f"a description for {description.ranks} ranks in a group of {group.size()}")
        self.memory, self.group, self.reduction, self.tag = memory, group, reduction, tag
        rank = group.rank()
        self.rounds = [(_of(rank, round_, "source"), _of(rank, round_, "target")) for round_ in description.rounds]
        self._works: list[dist.Work] = []
        self._arriving: tuple[Message, Tensor] | None = None
        self._scratch = memory.flat[:0]

    def post(self, number: int) -> None:
        """Start this rank's messages of a round."""
        send, receive = self.rounds[number]
        transfers = []
        if receive and (views := self.memory.views(receive.blocks)):
            # What is stored in one piece goes right to its place.
            direct = not receive.reduce and len(views) == 1
            target = views[0] if direct else self._buffer(sum(view.numel() for view in views))
            self._arriving = None if direct else (receive, target)
            transfers.append(dist.P2POp(dist.irecv, target, group=self.group, tag=self.tag, group_peer=receive.source))
        if send and (values := self.memory.load(send.blocks)).numel():
            transfers.append(dist.P2POp(dist.isend, values, group=self.group, tag=self.tag, group_peer=send.target))
        self._works = dist.batch_isend_irecv(transfers) if transfers else []

    def finish(self) -> None:
        """Until they are done, also what is to be added."""
        for work in self._works:
            work.wait()
        if self._arriving is not None:
            message, values = self._arriving
            self._arriving = None
            self.memory.store(message.blocks, values, self.reduction if message.reduce else None)

    def _buffer(self, numel: int) -> Tensor:
        if self._scratch.numel() < numel:
            self._scratch = self.memory.flat.new_empty(numel)
        return self._scratch[:numel]


def _of(rank: int, messages: Sequence[Message], end: str) -> Message | None:
    return next((message for message in messages if getattr(message, end) == rank), None)


def _play(players: list[_Player]) -> None:
    """Round after round; while one player adds what has arrived, the others' messages are on their way."""
    rounds = len(players[0].rounds)
    for number in range(rounds):
        for player in players:
            player.finish()
            player.post(number)
    for player in players:
        player.finish()
