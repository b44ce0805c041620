"""Assignment of the tokens of a sequence to context-parallel ranks.

Under a causal mask the work grows along the sequence. Each ring position therefore takes a chunk from the front and its
mirror image from the back (zig-zag: Dubey et al. 2024, "The Llama 3 Herd of Models", section 3.3.2), or every n-th
token (Brandon et al. 2023, "Striped Attention"). Ranks that exchange tokens for heads at one ring position share its
tokens evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from shoal.pipeline.sequence_slices import even_slices
from shoal.spec.layout import ContextOrder, Layout

Chunks = tuple[range, ...]
"""Tokens of a rank in order: contiguous or strided ranges, none of them empty."""


def zig_zag(tokens: int, positions: int, multiple: int = 1) -> list[Chunks]:
    """Assign chunks i and 2 positions - 1 - i, of 2 positions equal chunks, to position i.

    >>> zig_zag(16, 2)
    [(range(0, 4), range(12, 16)), (range(4, 12),)]
    """
    starts = (0, *accumulate(even_slices(tokens, 2 * positions, multiple)))
    chunks = [range(start, stop) for start, stop in pairwise(starts)]
    return [join_ranges((chunks[position], chunks[-1 - position])) for position in range(positions)]


def striped(tokens: int, positions: int, multiple: int = 1) -> list[Chunks]:
    """Assign tokens i, i + positions, ... to position i, so each position sees keys of every other.

    If the tokens of a rank must be a multiple of a number, the remaining tokens form a contiguous range for the first
    positions.

    >>> striped(8, 2)
    [(range(0, 8, 2),), (range(1, 8, 2),)]
    """
    even = tokens // (positions * multiple) * positions * multiple
    rest = range(even, tokens)
    more = [rest[i * multiple : (i + 1) * multiple] for i in range(positions)]
    return [join_ranges((range(position, even, positions), more[position])) for position in range(positions)]


def contiguous(tokens: int, positions: int, multiple: int = 1) -> list[Chunks]:
    """Assign the i-th contiguous part to position i; the last position has nearly twice the mean work.

    >>> contiguous(8, 2)
    [(range(0, 4),), (range(4, 8),)]
    """
    starts = (0, *accumulate(even_slices(tokens, positions, multiple)))
    return [join_ranges((range(start, stop),)) for start, stop in pairwise(starts)]


ORDERS: dict[ContextOrder, Callable[[int, int, int], list[Chunks]]] = {
    "zig-zag": zig_zag, "striped": striped, "contiguous": contiguous,
}  # fmt: skip


def join_ranges(chunks: Sequence[range]) -> Chunks:
    """Merge adjacent ranges, keeping tokens and order.

    >>> join_ranges((range(0, 4), range(4, 6), range(6, 6), range(9, 10)))
    (range(0, 6), range(9, 10))
    """
    found: list[range] = []
    for chunk in chunks:
        if found and chunk and found[-1].step == chunk.step and found[-1][-1] + chunk.step == chunk[0]:
            found[-1] = range(found[-1].start, chunk.stop, chunk.step)
        elif chunk:
            found.append(chunk)
    return tuple(found)


def split_chunks(chunks: Chunks, lengths: Sequence[int]) -> list[Chunks]:
    """Split the tokens into consecutive parts of the given lengths.

    >>> split_chunks((range(0, 4), range(12, 16)), (3, 5))
    [(range(0, 3),), (range(3, 4), range(12, 16))]
    """
    parts, rest = [], list(chunks)
    for length in lengths:
        part: list[range] = []
        while length:
            chunk = rest.pop(0)
            part.append(chunk[:length])
            if len(chunk) > length:
                rest.insert(0, chunk[length:])
            length -= len(part[-1])
        parts.append(join_ranges(part))
    return parts


@dataclass(frozen=True)
class TokenAssignment:
    """Assignment of the tokens of a sequence to context-parallel ranks, per slice.

    Attributes:
        by_slice: for each slice and rank (ulysses varies fastest), its tokens as positions in the full sequence.
    """

    ring: int
    ulysses: int
    by_slice: tuple[tuple[Chunks, ...], ...]

    def chunks(self, rank: int, slices: range | None = None) -> Chunks:
        """Return the tokens of a rank in some slices (default: all), in its order."""
        chosen = self.by_slice if slices is None else [self.by_slice[i] for i in slices]
        return join_ranges([chunk for ranks in chosen for chunk in ranks[rank]])

    def ring_chunks(self, position: int, slices: range) -> Chunks:
        """Return the tokens of all ranks at a ring position, rank by rank."""
        return join_ranges([chunk for rank in self.ranks(position) for chunk in self.chunks(rank, slices)])

    def ring_lengths(self, position: int, slices: range) -> list[int]:
        """Return the number of tokens of each rank at a ring position."""
        return [count_tokens(self.chunks(rank, slices)) for rank in self.ranks(position)]

    def ranks(self, position: int) -> range:
        return range(position * self.ulysses, (position + 1) * self.ulysses)

    def lengths(self, rank: int) -> list[int]:
        return [count_tokens(ranks[rank]) for ranks in self.by_slice]

    @property
    def tokens(self) -> int:
        """Number of tokens in a full sequence."""
        return sum(count_tokens(chunks) for ranks in self.by_slice for chunks in ranks)

    @cached_property
    def fullest(self) -> int:
        """Largest number of tokens on a rank."""
        return max(sum(self.lengths(rank)) for rank in range(self.ring * self.ulysses))


def count_tokens(chunks: Chunks) -> int:
    return sum(map(len, chunks))


def assign_tokens(layout: Layout, sequence_length: int, slices: Sequence[int] = ()) -> TokenAssignment:
    """Return the token assignment of a layout for sequences of a length, separately for slices of the given lengths."""
    held, start = [], 0
    for length in slices or (sequence_length,):
        ranks: list[Chunks] = []
        for position in ORDERS[layout.cp_order](length, layout.cp_ring, layout.sequence_shards):
            shares = even_slices(count_tokens(position), layout.ulysses, layout.sequence_shards)
            ranks += [
                tuple(range(chunk.start + start, chunk.stop + start, chunk.step) for chunk in share)
                for share in split_chunks(position, shares)
            ]
        held.append(tuple(ranks))
        start += length
    return TokenAssignment(layout.cp_ring, layout.ulysses, tuple(held))
