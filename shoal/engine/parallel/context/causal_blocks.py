"""Decompose causal attention between token chunks into full and causal blocks of scores.

A kernel computes a rectangle of scores, or a causal square, and a pair of chunks (`token_order`) is fully visible,
invisible, or cut by a diagonal. Only blocks that contain a document boundary, or the oldest tokens of a window,
therefore need a mask, or lengths and a diagonal if the kernel takes these. All of it is computed on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from shoal.engine.models.segments import Segments
from shoal.engine.parallel.context.token_order import Chunks, count_tokens
from shoal.engine.streams import to_device

ROWS = 512  # queries per block at document boundaries: fewer skip more keys, but small products are slow


@dataclass(frozen=True)
class ScoreBlock:
    """Rectangle of attention scores.

    Attributes:
        rows, columns: ranges of queries and of keys.
        causal: whether query i sees the first i + 1 keys only; requires equal numbers of queries and keys.
        masked: whether documents hide some of the remaining scores.
        segments: these documents, if the kernel takes lengths.
        since: query i sees keys from the (i + since)-th of the block on, because of a window; None if it sees all.
    """

    rows: slice
    columns: slice
    causal: bool = False
    masked: bool = False
    segments: Segments | None = field(default=None, repr=False, compare=False)
    since: int | None = None

    @property
    def window(self) -> int | None:
        """Number of the block's last keys that the last query sees; None without a window."""
        return None if self.since is None else self.sides[1] - self.sides[0] - self.since + 1

    @property
    def sides(self) -> tuple[int, int]:
        """Numbers of queries and of keys."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    @property
    def scores(self) -> int:
        """Number of computed scores, ignoring documents and windows."""
        n, t = self.sides
        return n * (n + 1) // 2 if self.causal else n * t


@lru_cache(maxsize=1024)
def split_scores(queries: Chunks, keys: Chunks, window: int | None = None) -> list[ScoreBlock]:
    """Return blocks that cover every visible score once.

    Args:
        window: tokens that a query sees, its own included; None for all up to its own.

    >>> early, late = range(0, 4), range(12, 16)  # the first of two positions; the second has the tokens in between
    >>> split_scores((early, late), (early, late))
    [ScoreBlock(rows=slice(0, 8, None), columns=slice(0, 8, None), causal=True, masked=False, since=None)]
    >>> split_scores((early, late), (range(4, 12),))
    [ScoreBlock(rows=slice(4, 8, None), columns=slice(0, 8, None), causal=False, masked=False, since=None)]
    >>> split_scores((range(4, 12),), (early, late), window=3)
    [ScoreBlock(rows=slice(0, 2, None), columns=slice(2, 4, None), causal=False, masked=False, since=0)]
    """
    if window is not None and max(some[-1] for some in queries) - min(some[0] for some in keys) < window:
        window = None  # it hides nothing
    if window is None and queries == keys and all(a[-1] < b[0] for a, b in pairwise(queries)):
        return [ScoreBlock(slice(0, count_tokens(queries)), slice(0, count_tokens(keys)), causal=True)]
    found: list[ScoreBlock] = []
    for row, some in zip(_starts(queries), queries, strict=True):
        mine = [
            replace(block, rows=_shift(block.rows, row), columns=_shift(block.columns, column))
            for column, others in zip(_starts(keys), keys, strict=True)
            for uncut in _split_chunk_pair(some, others)
            for block in (_cut_window(uncut, some, others, window) if window else (uncut,))
        ]
        found += _merge(mine, along="columns")
    return _merge(found, along="rows")


def _starts(chunks: Chunks) -> tuple[int, ...]:
    return (0, *accumulate(map(len, chunks[:-1])))


def _shift(some: slice, by: int) -> slice:
    return slice(some.start + by, some.stop + by)


def _split_chunk_pair(queries: range, keys: range) -> Iterator[ScoreBlock]:
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


def _cut_window(block: ScoreBlock, queries: range, keys: range, window: int) -> Iterator[ScoreBlock]:
    """Yield a block of two chunks without the rows and columns that a window hides completely."""
    apart = queries.step != keys.step  # no diagonal
    for start in range(block.rows.start, block.rows.stop) if apart else (block.rows.start,):
        part = replace(block, rows=slice(start, start + 1)) if apart else block
        # Query i sees key j where j >= i + since.
        kept = cut_since(part, -((window - 1 - queries[start] + keys[block.columns.start]) // keys.step))
        if kept is not None:
            yield kept


def take_part(block: ScoreBlock, rows: slice, columns: slice) -> ScoreBlock | None:
    """Return what queries see in some rows and columns of a block, counted from its first ones; None if nothing."""
    part = replace(block, rows=_shift(rows, block.rows.start), columns=_shift(columns, block.columns.start))
    return part if block.since is None else cut_since(part, block.since + rows.start - columns.start)


def cut_since(block: ScoreBlock, since: int) -> ScoreBlock | None:
    """Return the part of a block that queries see if the i-th sees keys from the (i + since)-th on; None if empty."""
    n, t = block.sides
    if block.causal and since > 0:
        return None
    if not block.causal:  # a causal square stays square
        before, rows = max(0, since), min(n, t - since)
        if rows <= 0:
            return None
        block = replace(block, rows=slice(block.rows.start, block.rows.start + rows),
                        columns=slice(block.columns.start + before, block.columns.stop))  # fmt: skip
        n, since = rows, since - before
    return replace(block, since=since if since + n > 1 else None)


def _merge(blocks: Sequence[ScoreBlock], along: Literal["rows", "columns"]) -> list[ScoreBlock]:
    """Join rectangles that are adjacent along one side and equal on the other."""
    across = "rows" if along == "columns" else "columns"
    merged: list[ScoreBlock] = []
    for block in blocks:
        last, side = merged[-1] if merged else block, getattr(block, along)
        adjacent = getattr(last, along).stop == side.start and getattr(last, across) == getattr(block, across)
        cut = block.causal or last.causal or block.since is not None or last.since is not None
        if adjacent and not cut:
            joined = slice(getattr(last, along).start, side.stop)
            merged[-1] = replace(last, rows=joined) if along == "rows" else replace(last, columns=joined)
        else:
            merged.append(block)
    return merged


class CausalBlocks:
    """Visible scores between the queries of one ring position and the keys of every position, in one forward pass.

    Args:
        queries: tokens of this position, in its order.
        keys: tokens of each position.
        documents: [b, sequence length] document of each token, if attention stays inside documents.
        device: where attention is computed.
        by_lengths: whether its kernel takes `Segments`, and a window.
        window: tokens that a query sees, its own included; None for all.
    """

    def __init__(
        self, queries: Chunks, keys: Sequence[Chunks], documents: Tensor | None,
        device: torch.device | None = None, *, by_lengths: bool = False, window: int | None = None,
    ):
        self.queries, self.keys, self.window = queries, tuple(keys), window
        self.documents = None if documents is None else documents.cpu()
        self.device, self.by_lengths = device or torch.device("cpu"), by_lengths
        self.key_lengths = [count_tokens(chunks) for chunks in keys]
        self._blocks: dict[int, list[ScoreBlock]] = {}
        self._documents: dict[int, Tensor] = {}  # of the keys of each position, and of the queries at -1

    def blocks(self, position: int) -> list[ScoreBlock]:
        """Return the blocks to compute with the keys of a position, without blocks whose documents differ."""
        if position not in self._blocks:
            found = split_scores(self.queries, self.keys[position], self.window)
            if self.documents is not None:
                split = self._cut_by_lengths if self.by_lengths else self._split_documents
                found = [seen for block in found for seen in split(block, position)]
            self._blocks[position] = found
        return self._blocks[position]

    def only_block(self) -> ScoreBlock | None:
        """Return the block of all scores if there is one: one position, with its tokens in order."""
        blocks = self.blocks(0) if len(self.keys) == 1 else []
        everything = slice(0, self.key_lengths[0])
        return next((block for block in blocks if block.causal and block.rows == everything), None)

    def mask(self, block: ScoreBlock, position: int) -> Tensor | Segments | None:
        """Return the mask [b or 1, 1, n, t] bool of a masked block, or its documents; None for other blocks.

        The window is in the mask, unless the kernel takes it.
        """
        if block.segments is not None or not (block.masked or (block.since is not None and not self.by_lengths)):
            return block.segments
        seen = torch.ones(1, *block.sides, dtype=torch.bool)
        if block.masked:
            queries, keys = self._documents_in(block, position)
            seen = queries.unsqueeze(2) == keys.unsqueeze(1)
        seen = seen.tril() if block.causal else seen
        return to_device((seen if block.since is None else seen.triu(block.since)).unsqueeze(1), self.device)

    def _cut_by_lengths(self, block: ScoreBlock, position: int) -> Iterator[ScoreBlock]:
        """Yield the part of a block that contains pairs from the same document, with its documents as segments."""
        queries, keys = (x.numpy() for x in self._documents_in(block, position))
        rows = np.flatnonzero(np.any([np.isin(a, b) for a, b in zip(queries, keys, strict=True)], axis=0)).tolist()
        columns = np.flatnonzero(np.any([np.isin(b, a) for a, b in zip(queries, keys, strict=True)], axis=0)).tolist()
        if not rows:
            return
        if not block.causal:  # a causal square stays square
            kept = take_part(block, slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1))
            if kept is None:
                return
            block = kept
        if self._is_one_document(block, position):
            yield block
            return
        if block.since is not None and not block.causal:  # one diagonal does not fit several documents
            yield from self._split_documents(block, position)
            return
        each = zip(*(x.numpy() for x in self._documents_in(block, position)), strict=True)
        lengths = [_document_lengths(*of_sequence, causal=block.causal) for of_sequence in each]
        if not all(lengths):
            yield from self._split_documents(block, position)
            return
        found = [pair for of_sequence in lengths for pair in of_sequence]
        yield replace(block, masked=True, segments=Segments.from_lengths(found, self.device))

    def _split_documents(self, block: ScoreBlock, position: int) -> Iterator[ScoreBlock]:
        """Yield the parts of a block that contain pairs from the same document."""
        if self._is_one_document(block, position):
            yield block
            return
        for part in _split_rows(block):
            queries, keys = self._documents_in(part, position)  # [b, n], [b, t]
            first, last = queries.amin(1, keepdim=True), queries.amax(1, keepdim=True)
            columns = ((keys >= first) & (keys <= last)).any(0).nonzero().view(-1).tolist()
            kept: ScoreBlock | None = part if columns else None
            if columns and not part.causal:  # a causal square stays square
                kept = take_part(part, slice(0, part.sides[0]), slice(columns[0], columns[-1] + 1))
            if kept is not None:
                yield replace(kept, masked=not self._is_one_document(kept, position))

    def _is_one_document(self, block: ScoreBlock, position: int) -> bool:
        """Return whether all queries and keys of a block are in one document, in every sequence."""
        queries, keys = self._documents_in(block, position)
        one = queries[:, :1]
        return bool((queries == one).all() and (keys == one).all())

    def _documents_in(self, block: ScoreBlock, position: int) -> tuple[Tensor, Tensor]:
        """Return the documents of a block's queries and keys."""
        assert self.documents is not None
        for at, chunks in ((-1, self.queries), (position, self.keys[position])):
            if at not in self._documents:
                places = np.concatenate([np.arange(c.start, c.stop, c.step) for c in chunks])  # real in dry runs too
                self._documents[at] = self.documents[:, torch.from_numpy(places)]
        return self._documents[-1][:, block.rows], self._documents[position][:, block.columns]


def token_positions(chunks: Chunks, device: torch.device) -> Tensor:
    """Return the positions of the tokens in their sequence: [tokens] int64."""
    return torch.cat([torch.arange(c.start, c.stop, c.step, device=device) for c in chunks])


def _split_rows(block: ScoreBlock) -> Iterator[ScoreBlock]:
    """Split a block into blocks of at most `ROWS` queries."""
    for start in range(block.rows.start, block.rows.stop, ROWS):
        rows = slice(start, min(start + ROWS, block.rows.stop))
        own = slice(start - block.rows.start, rows.stop - block.rows.start)
        if not block.causal:
            parts = [take_part(block, own, slice(0, block.sides[1]))]
        else:
            before = take_part(replace(block, causal=False), own, slice(0, own.start)) if own.start else None
            parts = [before, take_part(block, own, own)]
        yield from (part for part in parts if part is not None)


def _document_lengths(queries: np.ndarray, keys: np.ndarray, *, causal: bool) -> list[tuple[int, int]]:
    """Return the numbers of queries and keys of each document in a block of one sequence, for `Segments`.

    With ``causal``, keys that no query of their document sees become a segment without queries.

    Args:
        queries, keys: [n] and [t] document numbers.

    Returns:
        The lengths; none if documents are not in ascending order, or a causal mask is not at the lower right of one.
    """
    if (np.diff(queries) < 0).any() or (np.diff(keys) < 0).any():
        return []
    found: list[tuple[int, int]] = []
    for document in np.union1d(queries, keys):
        (start, stop), (first, last) = (
            np.searchsorted(x, (document, document + 1)).tolist() for x in (queries, keys)
        )
        used = last - first
        if causal and start < stop and first < last:
            if last < stop:
                return []
            used = max(0, stop - first)
        found.append((stop - start, used))
        if used < last - first:
            found.append((0, last - first - used))
    return found
