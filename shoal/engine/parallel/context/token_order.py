"""Assignment of the tokens of a sequence to context-parallel ranks.

Under a causal mask the work grows along the sequence: the last tokens see eight times as many keys as those after the
first eighth. Equal contiguous parts would leave the first rank idle most of the time. Each ring position therefore
takes a chunk from the front and its mirror image from the back (zig-zag: Dubey et al. 2024, "The Llama 3 Herd of
Models", section 3.3.2), or every n-th token (Brandon et al. 2023, "Striped Attention").

Ranks that exchange tokens for heads at one ring position share its tokens evenly. Their order does not matter,
because each sees all tokens of the position in attention.
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


def zig_zag(tokens: int, places: int, multiple: int = 1) -> list[Chunks]:
    """Assign chunks i and 2 places - 1 - i, of 2 places equal chunks, to position i.

    >>> zig_zag(16, 2)
    [(range(0, 4), range(12, 16)), (range(4, 12),)]
    """
    starts = (0, *accumulate(even_slices(tokens, 2 * places, multiple)))
    chunks = [range(start, stop) for start, stop in pairwise(starts)]
    return [joined((chunks[place], chunks[-1 - place])) for place in range(places)]


def striped(tokens: int, places: int, multiple: int = 1) -> list[Chunks]:
    """Assign tokens i, i + places, ... to position i, so each position sees keys of every other.

    If the tokens of a rank must be a multiple of a number, the remaining tokens form a contiguous range for the first
    positions.

    >>> striped(8, 2)
    [(range(0, 8, 2),), (range(1, 8, 2),)]
    """
    even = tokens // (places * multiple) * places * multiple
    rest = range(even, tokens)
    more = [rest[i * multiple : (i + 1) * multiple] for i in range(places)]
    return [joined((range(place, even, places), more[place])) for place in range(places)]


def contiguous(tokens: int, places: int, multiple: int = 1) -> list[Chunks]:
    """Assign the i-th contiguous part to position i; the last position has nearly twice the mean work.

    >>> contiguous(8, 2)
    [(range(0, 4),), (range(4, 8),)]
    """
    starts = (0, *accumulate(even_slices(tokens, places, multiple)))
    return [joined((range(start, stop),)) for start, stop in pairwise(starts)]


ORDERS: dict[ContextOrder, Callable[[int, int, int], list[Chunks]]] = {
    "zig-zag": zig_zag, "striped": striped, "contiguous": contiguous,
}  # fmt: skip


def joined(chunks: Sequence[range]) -> Chunks:
    """Merge adjacent ranges, keeping tokens and order.

    >>> joined((range(0, 4), range(4, 6), range(6, 6), range(9, 10)))
    (range(0, 6), range(9, 10))
    """
    found: list[range] = []
    for chunk in chunks:
        if found and chunk and found[-1].step == chunk.step and found[-1][-1] + chunk.step == chunk[0]:
            found[-1] = range(found[-1].start, chunk.stop, chunk.step)
        elif chunk:
            found.append(chunk)
    return tuple(found)


def cut(chunks: Chunks, lengths: Sequence[int]) -> list[Chunks]:
    """Split the tokens into consecutive parts of the given lengths.

    >>> cut((range(0, 4), range(12, 16)), (3, 5))
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
        parts.append(joined(part))
    return parts


@dataclass(frozen=True)
class TokenAssignment:
    """Assignment of the tokens of a sequence to context-parallel ranks, per slice.

    Attributes:
        ring: number of ring positions.
        ulysses: ranks per position.
        held: for each slice and rank (ulysses varies fastest), its tokens as positions in the full sequence.
    """

    ring: int
    ulysses: int
    held: tuple[tuple[Chunks, ...], ...]

    def chunks(self, rank: int, slices: range | None = None) -> Chunks:
        """Return the tokens of a rank in some slices (default: all), in its order."""
        chosen = self.held if slices is None else [self.held[i] for i in slices]
        return joined([chunk for ranks in chosen for chunk in ranks[rank]])

    def place_chunks(self, place: int, slices: range) -> Chunks:
        """Return the tokens of all ranks at a ring position, rank by rank."""
        return joined([chunk for rank in self.ranks(place) for chunk in self.chunks(rank, slices)])

    def place_lengths(self, place: int, slices: range) -> list[int]:
        """Return the number of tokens of each rank at a ring position."""
        return [count(self.chunks(rank, slices)) for rank in self.ranks(place)]

    def ranks(self, place: int) -> range:
        """Return the ranks at a ring position."""
        return range(place * self.ulysses, (place + 1) * self.ulysses)

    def lengths(self, rank: int) -> list[int]:
        """Return the number of tokens of a rank in each slice."""
        return [count(ranks[rank]) for ranks in self.held]

    @property
    def tokens(self) -> int:
        """Number of tokens in a full sequence."""
        return sum(count(chunks) for ranks in self.held for chunks in ranks)

    @cached_property
    def fullest(self) -> int:
        """Largest number of tokens on a rank."""
        return max(sum(self.lengths(rank)) for rank in range(self.ring * self.ulysses))


def count(chunks: Chunks) -> int:
    """Return the number of tokens in chunks."""
    return sum(map(len, chunks))


def spread(layout: Layout, sequence_length: int, slices: Sequence[int] = ()) -> TokenAssignment:
    """Return the token assignment of a layout for sequences of a length.

    Args:
        slices: tokens of each slice if sequences are cut into slices; each slice is assigned separately.
    """
    held, start = [], 0
    for length in slices or (sequence_length,):
        ranks: list[Chunks] = []
        for place in ORDERS[layout.cp_order](length, layout.ring, layout.token_multiple):
            shares = even_slices(count(place), layout.ulysses, layout.token_multiple)
            ranks += [
                tuple(range(chunk.start + start, chunk.stop + start, chunk.step) for chunk in share)
                for share in cut(place, shares)
            ]
        held.append(tuple(ranks))
        start += length
    return TokenAssignment(layout.ring, layout.ulysses, tuple(held))
