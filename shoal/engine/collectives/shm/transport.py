"""Shared-memory transport: collectives and transfers between the ranks of one host.

Each rank has a ring buffer that only it writes and all others read. Collectives go through the rings in pieces: a rank
*posts* a piece into its ring and increments its written counter. It *takes* pieces from all rings once they are written
and increments its consumed counter, which frees the space. All ranks run the same collectives of a group in the same
order (as with any backend), so a piece has the same position in each ring and needs no header. Pipeline neighbours
have a separate ring per direction. Buffers in *common memory* (`SharedGroup.map_common`) are not posted but read
in place.

A started collective posts as much as fits into the ring; the rest is done at the next wait of this process
(`progress`). Sums are bitwise equal on all ranks: sums of more than two numbers are computed by one rank, or by the
same operation on the same numbers everywhere.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from mmap import PAGESIZE

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.engine.collectives.shm.progress import MOVED, Lane, Operation, Progress, Steps
from shoal.engine.collectives.shm.region import LINE, Region, alive

CAPACITY = 4 * 2**20  # bytes of a rank's ring
PIECE = 2**20  # bytes posted at once: with its part of the ring it fits in a core's cache
SMALL = 32 * 2**10  # bytes up to which more than two ranks sum everything themselves, waiting once instead of twice
BLOCK = 2**18  # elements of common memory summed at once
PAIR_CAPACITY = 8 * 2**20  # bytes that a sender can be ahead of the receiver

# Counters of each rank, followed by the counters of each ordered pair.
WRITTEN, CONSUMED, REDUCED, LEFT, PROCESS = range(5)
PER_RANK = 5
SENT, TAKEN = range(2)
PER_PAIR = 2

REDUCTIONS: dict[dist.ReduceOp.RedOpType, tuple[Callable, Callable]] = {
    dist.ReduceOp.SUM: (torch.add, lambda x, out: torch.sum(x, 0, dtype=x.dtype, out=out)),
    dist.ReduceOp.MAX: (torch.maximum, lambda x, out: torch.amax(x, 0, out=out)),
    dist.ReduceOp.MIN: (torch.minimum, lambda x, out: torch.amin(x, 0, out=out)),
}
"""Supported reductions: of two tensors, and along dim 0 of one."""


class SharedGroup:
    """Shared-memory transport of the ranks of a group.

    Args:
        region: a new region of the size given by `SharedGroup.layout`.
        ranks: global ranks of the members, for messages.
    """

    def __init__(self, region: Region, ranks: list[int], index: int, progress: Progress):
        self.ranks, self.index, self.size, self.progress = ranks, index, len(ranks), progress
        self.other = 1 - index  # the peer if the group has two ranks
        self._counters, self._data = region.counters, region.data
        self._places = [[self._counter(rank, counter) for rank in range(self.size)] for counter in range(PER_RANK)]
        self._typed: dict[torch.dtype, Tensor] = {}
        self._takes, self._posts = Lane(self), Lane(self)
        self._pairs: dict[tuple[int, int], Lane] = {}
        # Rows of common memory by the address of this rank's row: one per rank, or a single row shared by all.
        self._common: dict[int, Tensor] = {}
        self._forth = True  # direction of the next sum over common memory, forward or backward
        self._posted = self._taken = 0  # positions in the rings, in bytes since creation
        self._counters[self._counter(index, PROCESS)] = os.getpid()
        weakref.finalize(self, self._counters.__setitem__, self._counter(index, LEFT), 1)

    @staticmethod
    def layout(size: int) -> tuple[int, int]:
        """Return the number of counters and the bytes of the region of a group of ``size`` ranks."""
        return PER_RANK * size + PER_PAIR * size**2, CAPACITY * size + PAIR_CAPACITY * size**2

    def _counter(self, rank: int, counter: int) -> int:
        return (rank * PER_RANK + counter) * Region.STEP

    def _pair_counter(self, source: int, target: int, counter: int) -> int:
        return (PER_RANK * self.size + (source * self.size + target) * PER_PAIR + counter) * Region.STEP

    def describe_end(self, rank: int) -> str:
        """Return how a member ended, or "" if it is alive."""
        process = self._counters[self._counter(rank, PROCESS)]
        if not alive(process):
            return f"rank {self.ranks[rank]} (process {process}) has ended"
        return f"rank {self.ranks[rank]} has left the group" if self._counters[self._counter(rank, LEFT)] else ""

    # ---- common memory -----------------------------------------------------------------------------------------

    def common_bytes(self, numel: int, dtype: torch.dtype, rows: int) -> int:
        """Return the bytes of a region with ``rows`` page-aligned rows of ``numel`` elements."""
        return rows * -(-numel * dtype.itemsize // PAGESIZE) * PAGESIZE

    def map_common(self, region: Region, numel: int, dtype: torch.dtype, rows: int) -> Tensor:
        """Return this rank's row of a new region of `common_bytes`, or the row shared by all.

        Collectives on a full row read the other rows in place. A shared row shows every rank's writes: gathering it
        only waits until all ranks have written, and summing it is impossible.
        """
        stride = self.common_bytes(numel, dtype, rows) // rows
        mine = region.part(dtype, (self.index if rows > 1 else 0) * stride, numel)
        self._common[mine.data_ptr()] = region.data.view(dtype).view(rows, -1)[:, :numel]
        weakref.finalize(mine, self._common.pop, mine.data_ptr())
        return mine

    def _rows(self, x: Tensor) -> Tensor | None:
        """Return the rows [rows, numel] of common memory if ``x`` is a full row of it."""
        rows = self._common.get(x.data_ptr())
        return rows if rows is not None and rows.dtype == x.dtype and rows.shape[1] == x.numel() else None

    def _rows_to_sum(self, x: Tensor) -> Tensor | None:
        rows = self._rows(x)
        if rows is not None and len(rows) < self.size:
            raise ValueError(f"a sum of {list(x.shape)} over ranks {self.ranks}, to all of which it is the same memory")
        return rows

    # ---- public operations -------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Operation:
        """Start reducing contiguous ``x`` in place."""
        flat = x.detach().view(-1)
        if op == dist.ReduceOp.SUM and (rows := self._rows_to_sum(flat)) is not None:
            return self._start("all-reduce", x, self._arrive(), self._sum_everywhere(rows))
        pieces = self._pieces(flat.numel(), flat.element_size())
        pair, many = REDUCTIONS[op]
        take = self._take_other(flat, flat, pieces, pair) if self.size == 2 else self._take_all(flat, pieces, many)
        return self._start("all-reduce", x, self._post(flat, pieces), take)

    def all_gather(self, out: Tensor, part: Tensor) -> Operation:
        """Start gathering flat ``part`` of every rank into flat ``out``; it may be this rank's slice of it."""
        out, part = out.detach().view(self.size, -1), part.detach()
        pieces = self._pieces(part.numel(), part.element_size())
        if out[self.index].data_ptr() != part.data_ptr():
            out[self.index].copy_(part)
        if (rows := self._rows(out)) is not None:
            rows = rows.unflatten(1, (self.size, -1))
            take = self._copy_common(rows) if len(rows) > 1 else self._meet()
            return self._start("all-gather", part, self._arrive(), take)
        return self._start("all-gather", part, self._post(part, pieces), self._take_rows(out, pieces))

    def reduce_scatter(self, part: Tensor, full: Tensor) -> Operation:
        """Start summing flat ``full`` into each rank's flat ``part``, which may be its slice of ``full``."""
        part, full = part.detach(), full.detach().view(self.size, -1)
        if (rows := self._rows_to_sum(full)) is not None:
            column = rows.unflatten(1, (self.size, -1))[:, self.index]
            return self._start("reduce-scatter", full, self._arrive(), self._sum_common(column, part))
        if self.size == 2:  # each needs half of the other's data
            pieces = self._pieces(part.numel(), part.element_size())
            take = self._take_other(part, full[self.index], pieces, torch.add)
            return self._start("reduce-scatter", full, self._post(full[self.other], pieces), take)
        pieces = self._pieces(part.numel(), part.element_size() * self.size)
        return self._start(
            "reduce-scatter", full, self._post(full, pieces), self._take_column(part, full, pieces)
        )

    def send(self, x: Tensor, to: int) -> Operation:
        """Start sending contiguous ``x`` to a member; do not modify it before completion."""
        return self._transfer("send", x, self.index, to)

    def receive(self, x: Tensor, source: int) -> Operation:
        """Start receiving contiguous ``x`` from a member, in the order of its sends."""
        return self._transfer("receive", x, source, self.index)

    def _start(self, name: str, x: Tensor, post: Steps, take: Steps) -> Operation:
        operation = Operation(f"{name} of {list(x.shape)} over ranks {self.ranks}", self.progress)
        # Takes run first: the piece is still in the cache, and taking frees space for others.
        self.progress.add(self._takes, operation, take)
        self.progress.add(self._posts, operation, post)
        self.progress.drive(self._posts)
        return operation

    def _transfer(self, name: str, x: Tensor, source: int, target: int) -> Operation:
        lane = self._pairs.setdefault((source, target), Lane(self))
        what = f"{name} of {list(x.shape)} from rank {self.ranks[source]} to rank {self.ranks[target]}"
        operation = Operation(what, self.progress)
        data = x.detach().view(-1).view(torch.uint8)
        self.progress.add(lane, operation, self._copy(data, source, target, sending=name == "send"))
        self.progress.drive(lane)
        return operation

    # ---- rings -------------------------------------------------------------------------------------------------

    def _pieces(self, numel: int, bytes_each: int) -> list[tuple[int, int]]:
        """Split ``numel`` elements of ``bytes_each`` bytes in the ring into (start, count) pieces.

        Counts are multiples of the number of ranks, except for a small remainder.
        """
        most = max(1, PIECE // bytes_each // self.size) * self.size
        cuts = [(start, min(most, numel - start)) for start in range(0, numel, most)]
        if self.size > 2 and cuts and cuts[-1][1] % self.size and cuts[-1][1] > self.size:
            start, count = cuts.pop()
            rest = count % self.size
            cuts += [(start, count - rest), (start + count - rest, rest)]
        return cuts

    @staticmethod
    def _place(position: int, length: int) -> int:
        """Return the position of the next ``length`` bytes; pieces never wrap around the end of the ring."""
        left = CAPACITY - position % CAPACITY
        return position if length <= left else position + left

    def _ring(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._typed:
            self._typed[dtype] = self._data.view(dtype)
        return self._typed[dtype]

    def _ring_at(self, dtype: torch.dtype, position: int, shape: tuple[int, ...], rank: int) -> Tensor:
        ring = self._ring(dtype)
        strides = (1,) if len(shape) == 1 else (shape[1], 1)
        return ring.as_strided(shape, strides, (rank * CAPACITY + position % CAPACITY) // ring.element_size())

    def _rings_at(self, dtype: torch.dtype, position: int, numel: int, step: int = 0, offset: int = 0) -> Tensor:
        """View all ranks' rings at a position: [size, numel]; rank r's starts ``offset + r * step`` elements later."""
        ring = self._ring(dtype)
        size = ring.element_size()
        return ring.as_strided(
            (self.size, numel), (CAPACITY // size + step, 1), position % CAPACITY // size + offset
        )

    def _wait_counters(self, counter: int, value: int) -> Steps:
        """Wait until every member's counter reaches ``value``, including this rank's, whose steps use two lanes."""
        for rank, at in enumerate(self._places[counter]):
            while self._counters[at] < value:
                yield rank

    def _wait_free(self, length: int) -> Steps:
        """Wait until ``length`` bytes at the next ring position are free."""
        self._posted = self._place(self._posted, length)
        yield from self._wait_counters(CONSUMED, self._posted + length - CAPACITY)

    def _count_written(self, length: int) -> int:
        self._posted += -(-length // LINE) * LINE
        self._counters[self._counter(self.index, WRITTEN)] = self._posted
        return MOVED

    def _wait_written(self, length: int) -> Steps:
        """Wait until all ranks have posted the next piece."""
        self._taken = self._place(self._taken, length)
        yield from self._wait_counters(WRITTEN, self._taken + length)

    def _count_consumed(self, length: int) -> int:
        self._taken += -(-length // LINE) * LINE
        self._counters[self._counter(self.index, CONSUMED)] = self._taken
        return MOVED

    # ---- steps -------------------------------------------------------------------------------------------------

    def _post(self, x: Tensor, pieces: list[tuple[int, int]]) -> Steps:
        """Write [n] to the ring, or [size, n] with one row for each rank."""
        for start, count in pieces:
            piece = x.narrow(-1, start, count)
            yield from self._wait_free(piece.nbytes)
            self._ring_at(x.dtype, self._posted, piece.shape, self.index).copy_(piece)
            yield self._count_written(piece.nbytes)

    def _take_other(self, out: Tensor, own: Tensor, pieces: list[tuple[int, int]], reduce: Callable) -> Steps:
        """Reduce this rank's data with the pieces posted by the other rank."""
        for start, count in pieces:
            length = count * own.element_size()
            yield from self._wait_written(length)
            theirs = self._ring_at(own.dtype, self._taken, (count,), self.other)
            reduce(own[start : start + count], theirs, out=out[start : start + count])
            yield self._count_consumed(length)

    def _take_all(self, x: Tensor, pieces: list[tuple[int, int]], reduce: Callable) -> Steps:
        """Reduce all ranks' pieces; of a large piece each rank reduces an equal part into its ring, then all copy."""
        for start, count in pieces:
            length = count * x.element_size()
            yield from self._wait_written(length)
            piece, at = x[start : start + count], self._taken
            if length <= SMALL or count % self.size:
                reduce(self._rings_at(x.dtype, at, count), piece)
            else:
                part = count // self.size
                own = piece[self.index * part :][:part]
                reduce(self._rings_at(x.dtype, at, part, offset=self.index * part), own)
                self._ring_at(x.dtype, at + self.index * part * x.element_size(), (part,), self.index).copy_(own)
                self._counters[self._counter(self.index, REDUCED)] = at + length
                yield from self._wait_counters(REDUCED, at + length)
                piece.view(self.size, part).copy_(self._rings_at(x.dtype, at, part, step=part))
            yield self._count_consumed(length)

    def _take_rows(self, out: Tensor, pieces: list[tuple[int, int]]) -> Steps:
        for start, count in pieces:
            length = count * out.element_size()
            yield from self._wait_written(length)
            if self.size == 2:
                row = self._ring_at(out.dtype, self._taken, (count,), self.other)
                out[self.other, start : start + count].copy_(row)
            else:
                out[:, start : start + count].copy_(self._rings_at(out.dtype, self._taken, count))
            yield self._count_consumed(length)

    def _take_column(self, part: Tensor, full: Tensor, pieces: list[tuple[int, int]]) -> Steps:
        for start, count in pieces:
            length = count * full.element_size() * self.size
            yield from self._wait_written(length)
            column = self._rings_at(full.dtype, self._taken, count, offset=self.index * count)
            torch.sum(column, 0, dtype=part.dtype, out=part[start : start + count])
            yield self._count_consumed(length)

    # Collectives on common memory: all ranks arrive (each posts an empty line), read each other's rows, and leave. The
    # collective completes when no other rank reads this rank's row, so it may be overwritten as after any other.

    def _arrive(self) -> Steps:
        yield from self._wait_free(LINE)
        yield self._count_written(LINE)

    def _meet(self) -> Steps:
        """Wait until all ranks have written their parts of the shared row."""
        yield from self._wait_written(LINE)
        yield self._count_consumed(LINE)

    def _leave(self) -> Steps:
        yield self._count_consumed(LINE)
        yield from self._wait_counters(CONSUMED, self._taken)

    def _sum_common(self, rows: Tensor, out: Tensor) -> Steps:
        yield from self._wait_written(LINE)
        self._sum(rows, out)
        yield from self._leave()

    def _copy_common(self, rows: Tensor) -> Steps:
        """Copy rows: [size, size, n], where rank r has filled [r, r]."""
        yield from self._wait_written(LINE)
        for rank in range(self.size):
            if rank != self.index:
                rows[self.index, rank].copy_(rows[rank, rank])
        yield from self._leave()

    def _sum_everywhere(self, rows: Tensor) -> Steps:
        """Sum an equal part per rank and write it to all rows, which are in the cache after reading.

        The direction alternates: for rows as large as the cache, the end of the previous sum is still cached.
        """
        yield from self._wait_written(LINE)
        each = -(-rows.shape[1] // self.size // LINE) * LINE
        blocks = rows[:, self.index * each : (self.index + 1) * each].split(BLOCK, 1)
        self._forth = not self._forth
        for block in blocks if self._forth else reversed(blocks):
            if self.size == 2:
                torch.add(block[0], block[1], out=block[0])
                block[1].copy_(block[0])
            else:
                block.copy_(torch.sum(block, 0, dtype=block.dtype))
        yield from self._leave()

    def _sum(self, rows: Tensor, out: Tensor) -> None:
        """Sum [size, n] into ``out`` [n], which may be one of the rows."""
        if self.size == 2:
            torch.add(rows[0], rows[1], out=out)
            return
        for block, part in zip(rows.split(BLOCK, 1), out.split(BLOCK), strict=True):
            part.copy_(torch.sum(block, 0, dtype=out.dtype))  # out= would first clear the buffer

    def _copy(self, x: Tensor, source: int, target: int, *, sending: bool) -> Steps:
        """Copy bytes into the ring of an ordered pair, or from it."""
        sent, taken = (self._pair_counter(source, target, counter) for counter in (SENT, TAKEN))
        own, peer, most = (sent, target, PIECE) if sending else (taken, source, PAIR_CAPACITY)
        start = 0
        while start < x.numel():
            position, waiting = self._counters[own], self._counters[sent] - self._counters[taken]
            available = PAIR_CAPACITY - waiting if sending else waiting
            if not available:
                yield peer
                continue
            count = min(x.numel() - start, available, PAIR_CAPACITY - position % PAIR_CAPACITY, most)
            part, ring = x[start : start + count], self._pair(source, target, position, count)
            (ring if sending else part).copy_(part if sending else ring)
            self._counters[own] = position + count
            start += count
            yield MOVED

    def _pair(self, source: int, target: int, position: int, count: int) -> Tensor:
        """Return a view of the ring of an ordered pair at a position."""
        begin = CAPACITY * self.size + PAIR_CAPACITY * (source * self.size + target) + position % PAIR_CAPACITY
        return self._data[begin : begin + count]
