"""Decompose causal attention between token chunks into full and causal blocks of scores.

A kernel computes a rectangle of scores, or a causal square. Queries and keys come in chunks
(`shoal.engine.parallel.context.token_order`), and a pair of chunks is fully visible, invisible, or cut by a diagonal.
Causality therefore needs no mask; only blocks that contain a document boundary do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from shoal.engine.parallel.context.token_order import Chunks, count

ROWS = 512  # queries per block at document boundaries: fewer skip more keys, but small products are slow

Side = Literal["rows", "columns"]


@dataclass(frozen=True)
class ScoreBlock:
    """Rectangle of attention scores.

    Attributes:
        rows: range of queries.
        columns: range of keys.
        causal: whether query i sees the first i + 1 keys only; requires equal numbers of queries and keys.
        masked: whether documents hide some of the remaining scores.
    """

    rows: slice
    columns: slice
    causal: bool = False
    masked: bool = False

    @property
    def scores(self) -> int:
        """Number of computed scores, ignoring documents."""
        n, t = self.rows.stop - self.rows.start, self.columns.stop - self.columns.start
        return n * (n + 1) // 2 if self.causal else n * t


def pieces(queries: Chunks, keys: Chunks) -> list[ScoreBlock]:
    """Return blocks that cover every visible score once.

    >>> early, late = range(0, 4), range(12, 16)  # the first of two places; the second has what is between
    >>> pieces((early, late), (early, late))
    [ScoreBlock(rows=slice(0, 8, None), columns=slice(0, 8, None), causal=True, masked=False)]
    >>> pieces((early, late), (range(4, 12),))
    [ScoreBlock(rows=slice(4, 8, None), columns=slice(0, 8, None), causal=False, masked=False)]
    >>> pieces((range(4, 12),), (early, late))
    [ScoreBlock(rows=slice(0, 8, None), columns=slice(0, 4, None), causal=False, masked=False)]
    """
    if queries == keys and all(a[-1] < b[0] for a, b in pairwise(queries)):
        return [ScoreBlock(slice(0, count(queries)), slice(0, count(keys)), causal=True)]
    found = []
    for row, some in zip(_starts(queries), queries, strict=True):
        mine: list[ScoreBlock] = []
        for column, others in zip(_starts(keys), keys, strict=True):
            for piece in _of_chunks(some, others):
                mine.append(replace(piece, rows=_moved(piece.rows, row), columns=_moved(piece.columns, column)))
        found += _merged(mine, "rows", "columns")
    return _merged(found, "columns", "rows")


def _starts(chunks: Chunks) -> tuple[int, ...]:
    return (0, *accumulate(map(len, chunks[:-1])))


def _moved(some: slice, by: int) -> slice:
    return slice(some.start + by, some.stop + by)


def _of_chunks(queries: range, keys: range) -> Iterator[ScoreBlock]:
    """Yield the blocks of two chunks: query i sees key j where keys[j] <= queries[i]."""
    n, t = len(queries), len(keys)
    if keys[-1] <= queries[0]:
        yield ScoreBlock(slice(0, n), slice(0, t))
    elif keys[0] > queries[-1]:
        return
    elif queries.step != keys.step:  # remainders of stripes: one block per query
        for i, query in enumerate(queries):
            seen = sum(key <= query for key in keys)
            if seen:
                yield ScoreBlock(slice(i, i + 1), slice(0, seen))
    else:
        ahead = (queries[0] - keys[0]) // queries.step  # query i sees keys up to i + ahead
        first, before = max(0, -ahead), max(0, ahead)
        side = min(n - first, t - before)
        if before:
            yield ScoreBlock(slice(first, n), slice(0, before))
        yield ScoreBlock(slice(first, first + side), slice(before, before + side), causal=True)
        if first + side < n:
            yield ScoreBlock(slice(first + side, n), slice(before, before + side))


def _merged(found: Sequence[ScoreBlock], same: Side, along: Side) -> list[ScoreBlock]:
    """Join rectangles that are adjacent along one side and equal on the other."""
    merged: list[ScoreBlock] = []
    for piece in found:
        last = merged[-1] if merged else None
        if (
            last and not (piece.causal or last.causal)
            and getattr(last, same) == getattr(piece, same) and getattr(last, along).stop == getattr(piece, along).start
        ):
            joined = slice(getattr(last, along).start, getattr(piece, along).stop)
            merged[-1] = replace(last, rows=joined) if along == "rows" else replace(last, columns=joined)
        else:
            merged.append(piece)
    return merged


class CausalBlocks:
    """Visible scores between the queries of one ring position and the keys of every position, in one forward pass.

    Args:
        queries: tokens of this position, in its order.
        keys: tokens of each position.
        documents: [b, sequence length] document of each token, if attention stays inside documents.
    """

    def __init__(self, queries: Chunks, keys: Sequence[Chunks], documents: Tensor | None):
        self.queries, self.keys, self.documents = queries, tuple(keys), documents
        self._pieces: dict[int, list[ScoreBlock]] = {}
        self._of_keys: dict[int, Tensor] = {}

    def pieces(self, place: int) -> list[ScoreBlock]:
        """Return the blocks to compute with the keys of a position, without blocks whose documents differ."""
        if place not in self._pieces:
            found = pieces(self.queries, self.keys[place])
            if self.documents is not None:
                found = [seen for piece in found for seen in self._inside(piece, place)]
            self._pieces[place] = found
        return self._pieces[place]

    def mask(self, piece: ScoreBlock, place: int) -> Tensor | None:
        """Return the mask [b, 1, n, t] bool of a masked block, True where allowed; None for other blocks."""
        if not piece.masked:
            return None
        of_queries, of_keys = self._documents_of(piece, place)
        same = of_queries.unsqueeze(2) == of_keys.unsqueeze(1)
        return (same.tril() if piece.causal else same).unsqueeze(1)

    def _inside(self, piece: ScoreBlock, place: int) -> Iterator[ScoreBlock]:
        """Yield the parts of a block that contain pairs from the same document."""
        if self._in_one(piece, place):
            yield piece
            return
        for part in _rows_of(piece):
            of_queries, of_keys = self._documents_of(part, place)  # [b, n], [b, t]
            first, last = of_queries.amin(1, keepdim=True), of_queries.amax(1, keepdim=True)
            columns = ((of_keys >= first) & (of_keys <= last)).any(0).nonzero().view(-1).tolist()
            if columns and not part.causal:  # a causal square stays square
                start = part.columns.start
                part = replace(part, columns=slice(start + columns[0], start + columns[-1] + 1))
            if columns:
                yield replace(part, masked=not self._in_one(part, place))

    def _in_one(self, piece: ScoreBlock, place: int) -> bool:
        """Return whether all queries and keys of a block are in one document, in every sequence."""
        of_queries, of_keys = self._documents_of(piece, place)
        one = of_queries[:, :1]
        return bool((of_queries == one).all() and (of_keys == one).all())

    def _documents_of(self, piece: ScoreBlock, place: int) -> tuple[Tensor, Tensor]:
        if place not in self._of_keys:
            self._of_keys[place] = self._at(self.keys[place])
        return self._of_queries[:, piece.rows], self._of_keys[place][:, piece.columns]

    @cached_property
    def _of_queries(self) -> Tensor:
        return self._at(self.queries)

    def _at(self, chunks: Chunks) -> Tensor:
        assert self.documents is not None
        return self.documents[:, places_of(chunks, self.documents.device)]


def places_of(chunks: Chunks, device: torch.device) -> Tensor:
    """Return the positions of the tokens in their sequence: [tokens] int64."""
    return torch.cat([torch.arange(c.start, c.stop, c.step, device=device) for c in chunks])


def _rows_of(piece: ScoreBlock) -> Iterator[ScoreBlock]:
    """Split a block into blocks of at most `ROWS` queries."""
    for start in range(piece.rows.start, piece.rows.stop, ROWS):
        rows = slice(start, min(start + ROWS, piece.rows.stop))
        if not piece.causal:
            yield replace(piece, rows=rows)
            continue
        first = piece.columns.start + start - piece.rows.start
        if first > piece.columns.start:
            yield ScoreBlock(rows, slice(piece.columns.start, first))
        yield ScoreBlock(rows, slice(first, first + rows.stop - rows.start), causal=True)
