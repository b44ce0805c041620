"""Which tokens of a sequence each context-parallel rank has.

Under a causal mask the last tokens of a sequence see eight times what those after the first eighth see. Runs of equal
length would leave the rank of the first tokens idle most of the time. So each place of the ring takes a chunk from the
front and its mirror image from the back (zig-zag: Dubey et al. 2024, "The Llama 3 Herd of Models", section 3.3.2), or
every n-th token (Brandon et al. 2023, "Striped Attention").

The ranks that exchange tokens for heads at one place of the ring share its tokens evenly; there order is all the same,
since each of them sees all of the place's tokens in attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from shoal.pipeline.sequence_slices import even_slices
from shoal.spec.layout import ContextOrder, Layout

Chunks = tuple[range, ...]
"""Tokens in the order in which a rank has them: runs, or every n-th token of one. None is empty."""


def zig_zag(tokens: int, places: int, multiple: int = 1) -> list[Chunks]:
    """Place i has chunks i and 2 places - 1 - i of twice as many as there are places.

    >>> zig_zag(16, 2)
    [(range(0, 4), range(12, 16)), (range(4, 12),)]
    """
    starts = (0, *accumulate(even_slices(tokens, 2 * places, multiple)))
    chunks = [range(start, stop) for start, stop in pairwise(starts)]
    return [joined((chunks[place], chunks[-1 - place])) for place in range(places)]


def striped(tokens: int, places: int, multiple: int = 1) -> list[Chunks]:
    """Place i has tokens i, i + places, ...: every one of them sees keys of every place.

    Where the tokens of a rank are a multiple of something, those left over are a run for the first places.

    >>> striped(8, 2)
    [(range(0, 8, 2),), (range(1, 8, 2),)]
    """
    even = tokens // (places * multiple) * places * multiple
    rest = range(even, tokens)
    more = [rest[i * multiple : (i + 1) * multiple] for i in range(places)]
    return [joined((range(place, even, places), more[place])) for place in range(places)]


def contiguous(tokens: int, places: int, multiple: int = 1) -> list[Chunks]:
    """Place i has the i-th run: the last place has nearly twice the mean of the work.

    >>> contiguous(8, 2)
    [(range(0, 4),), (range(4, 8),)]
    """
    starts = (0, *accumulate(even_slices(tokens, places, multiple)))
    return [joined((range(start, stop),)) for start, stop in pairwise(starts)]


ORDERS: dict[ContextOrder, Callable[[int, int, int], list[Chunks]]] = {
    "zig-zag": zig_zag, "striped": striped, "contiguous": contiguous,
}  # fmt: skip


def joined(chunks: Sequence[range]) -> Chunks:
    """The same tokens in the same order, in as few chunks as can be.

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
    """The tokens in consecutive parts of these lengths.

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
    """How sequences are spread over the context-parallel ranks, slice by slice where they are cut into slices.

    Attributes:
        ring: places of the ring.
        ulysses: ranks at each place.
        held: for each slice and each rank (ulysses the faster), its tokens, counted in the whole sequence.
    """

    ring: int
    ulysses: int
    held: tuple[tuple[Chunks, ...], ...]

    def chunks(self, rank: int, slices: range | None = None) -> Chunks:
        """The tokens of a rank in some slices (default: all), in its order."""
        chosen = self.held if slices is None else [self.held[i] for i in slices]
        return joined([chunk for ranks in chosen for chunk in ranks[rank]])

    def place_chunks(self, place: int, slices: range) -> Chunks:
        """The tokens of all ranks at a place of the ring, one rank's after the other's."""
        return joined([chunk for rank in self.ranks(place) for chunk in self.chunks(rank, slices)])

    def place_lengths(self, place: int, slices: range) -> list[int]:
        """How many tokens each of them has."""
        return [count(self.chunks(rank, slices)) for rank in self.ranks(place)]

    def ranks(self, place: int) -> range:
        """Those at a place of the ring."""
        return range(place * self.ulysses, (place + 1) * self.ulysses)

    def lengths(self, rank: int) -> list[int]:
        """How many tokens of each slice a rank has."""
        return [count(ranks[rank]) for ranks in self.held]

    @property
    def tokens(self) -> int:
        """Of a whole sequence."""
        return sum(count(chunks) for ranks in self.held for chunks in ranks)

    @cached_property
    def fullest(self) -> int:
        """The most tokens that a rank has."""
        return max(sum(self.lengths(rank)) for rank in range(self.ring * self.ulysses))


def count(chunks: Chunks) -> int:
    """How many tokens these are."""
    return sum(map(len, chunks))


def spread(layout: Layout, sequence_length: int, slices: Sequence[int] = ()) -> TokenAssignment:
    """How a layout spreads sequences of this length.

    Args:
        slices: tokens of each slice that the sequences are cut into, if they are; each is spread by itself.
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
