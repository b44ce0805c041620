"""Batches by global sample index, the same on every layout and after every resume."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
import xxhash

from shoal.base.errors import UsageError
from shoal.engine.data.mixture import Blend
from shoal.engine.data.open_stream import open_stream
from shoal.engine.data.order import SampleOrder
from shoal.engine.data.token_stream import SPLITS, Split, Stream
from shoal.engine.data.tokenizer import load_tokenizer
from shoal.engine.models.loss import IGNORE
from shoal.engine.streams import to_device
from shoal.spec.config import DataConfig, MixtureSource

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """n sequences of s tokens.

    Attributes:
        tokens: input of the model, ``[n, s]`` int64.
        targets: next tokens, or `IGNORE`, ``[n, s]`` int64.
        documents: index in the sequence of each token's document, from 0, ``[n, s]`` int32; only if attention and loss
            stay inside documents.
        samples: global sample index of each sequence, ``[n]`` int64; None if nothing is drawn by it.
        sources: number of the source of each sequence in a mixture, ``[n]`` int64; None without a mixture.
        sequences, labels, further: see `Transformer.forward`.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor | None = None
    samples: torch.Tensor | None = None
    sources: torch.Tensor | None = None
    sequences: float = 1
    labels: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    further: torch.Tensor | None = None

    def unmasked(self) -> int:
        """Return the number of targets that count in the loss."""
        return int((self.targets != IGNORE).sum())

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device, without waiting; documents stay on the host, where masks are made from them."""
        samples, sources = (None if x is None else to_device(x, device) for x in (self.samples, self.sources))
        return replace(
            self, tokens=to_device(self.tokens, device), targets=to_device(self.targets, device), samples=samples,
            sources=sources,
        )


class Dataset(Protocol):
    """One split, read by global sample index.

    Attributes:
        vocab_size: upper bound (exclusive) of all tokens.
        samples: sequences in one epoch.
        fingerprint: key of the content; equal fingerprints hold the same text with the same tokenisation.
    """

    vocab_size: int
    samples: int
    fingerprint: str

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the sequences at these indices, which start at 0 and continue across epochs without end."""
        ...


class PackedDataset:
    """Sequences of s tokens cut from the packed stream of documents; sample j starts at token ``j x s``.

    Raises:
        UsageError: the split is shorter than one sequence, or has no token to learn; or a shard is damaged.
    """

    def __init__(self, stream: Stream, order_seed: int, *, sequence_length: int, document_mask: bool) -> None:
        """Set up the order. With ``document_mask`` attention and loss stay inside documents."""
        contents = stream.contents
        self.vocab_size, self.fingerprint = contents.vocab_size, contents.fingerprint
        self.samples = (len(stream) - 1) // sequence_length  # the last sequence needs one more target
        if not contents.documents and contents.left_out:
            raise UsageError(
                f"data: the {stream.split} split of {contents.corpus} has no documents. Left out:\n"
                + "\n".join(contents.left_out) + "\n  Give other text, or change the setting that leaves it out."
            )
        if self.samples < 1:
            raise UsageError(
                f"data: the {stream.split} split of {contents.corpus} has {len(stream)} tokens in "
                f"{contents.documents} documents; one sequence needs data.sequence_length + 1 = {sequence_length + 1}."
                "\n  Give more text, a shorter data.sequence_length, or another data.validation_fraction."
            )
        if len(stream) == contents.documents and contents.bytes:  # each token is an end of document
            raise UsageError(
                f"data: every label of {contents.corpus} is masked: its {contents.documents} documents have "
                f"{contents.bytes} bytes of text, but no token in this tokenizer.\n  Use another data.tokenizer; "
                "'bytes' encodes every text."
            )
        self._stream, self._length, self._document_mask = stream, sequence_length, document_mask
        self._order = SampleOrder(self.samples, order_seed)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the sequences at these indices: a pure function of (corpus, seed, index)."""
        starts = (self._order(indices) * self._length).tolist()
        return _read_sequences(self._stream, starts, self._length, indices, document_mask=self._document_mask)


class CompleteDataset:
    """All tokens of a stream of documents in their order, for evaluation: sequence j starts at token ``j x s``.

    The last sequence may be shorter, and every sequence after it is empty: what is missing has no targets.

    Args:
        document_mask: whether attention and loss stay inside documents.
        samples: number of sequences (default: all).

    Raises:
        UsageError: the stream has nothing to predict; or a shard is damaged.
    """

    def __init__(
        self, stream: Stream, *, sequence_length: int, document_mask: bool, samples: int | None = None
    ) -> None:
        self.contents = stream.contents
        self.vocab_size, self.fingerprint = self.contents.vocab_size, self.contents.fingerprint
        if len(stream) < 2:
            raise UsageError(f"data: the {stream.split} split of {self.contents.corpus} has {len(stream)} tokens; a "
                             "loss needs 2.\n  Give more text.")
        complete = -(-(len(stream) - 1) // sequence_length)
        self.tokens, self.samples = len(stream), complete if samples is None else min(samples, complete)
        self._stream, self._length, self._document_mask = stream, sequence_length, document_mask

    def first(self, samples: int) -> CompleteDataset:
        """Return the data set of the first sequences."""
        return CompleteDataset(
            self._stream, sequence_length=self._length, document_mask=self._document_mask, samples=samples
        )

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the sequences at these indices; from index `samples` on they have no targets."""
        starts = [index * self._length if index < self.samples else self.tokens for index in indices]
        return _read_sequences(self._stream, starts, self._length, indices, document_mask=self._document_mask)


class MixtureDataset:
    """Sequences of several datasets, mixed by weight; each sequence is of one of them.

    Args:
        sources: their weights, limits of epochs and schedules.
        seed: seed of the order in which sources follow each other.
        sequence_length: s, tokens of a sample.
    """

    def __init__(
        self, datasets: dict[str, Dataset], sources: dict[str, MixtureSource], seed: int, sequence_length: int
    ) -> None:
        self.datasets = list(datasets.values())
        limits = {name: round(sources[name].epochs * d.samples) or None for name, d in datasets.items()}
        later = {
            name: {math.ceil(tokens / sequence_length): weight for tokens, weight in source.schedule}
            for name, source in sources.items()
        }
        self.blend = Blend({name: source.weight for name, source in sources.items()}, limits, seed, later)
        self.vocab_size = max(dataset.vocab_size for dataset in self.datasets)
        self.samples = sum(dataset.samples for dataset in self.datasets)
        settings = {name: [each.weight, each.epochs, *each.schedule] for name, each in sources.items()}
        parts = [" ".join(map(str, (name, d.fingerprint, *settings[name]))) for name, d in datasets.items()]
        self.fingerprint = xxhash.xxh3_128_hexdigest(" ".join(["mixture", *parts]).encode())

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the sequences at these indices: a pure function of (datasets, weights, seed, index)."""
        sources, samples = self.blend(indices)
        places, batches = [], []
        for source in np.unique(sources):
            places.append(np.flatnonzero(sources == source))
            batches.append(self.datasets[source].batch(samples[places[-1]].tolist()))
        back = torch.from_numpy(np.argsort(np.concatenate(places)))
        documents = [batch.documents for batch in batches if batch.documents is not None]
        return Batch(
            torch.cat([batch.tokens for batch in batches])[back], torch.cat([batch.targets for batch in batches])[back],
            torch.cat(documents)[back] if documents else None, torch.tensor(indices, dtype=torch.int64),
            torch.from_numpy(sources),
        )


MANY_PASSES = 4
"""Passes over a text up to which repeated text is nearly as good as new (Muennighoff et al. 2023)."""


def describe_repeats(dataset: Dataset, samples: int) -> Iterator[str]:
    """Yield a line for the text, or each source of a mixture, that a run reads more than `MANY_PASSES` times.

    Args:
        samples: sequences of the run.
    """
    passes: dict[str, float] = {}
    if isinstance(dataset, MixtureDataset):
        drawn, sizes = dataset.blend.drawn(samples), (each.samples for each in dataset.datasets)
        passes = {name: count / size for (name, count), size in zip(drawn.items(), sizes, strict=True)}
    elif isinstance(dataset, PackedDataset):
        passes = {"its text": samples / dataset.samples}
    yield from (f"the run reads {what} {times:,.1f} times" for what, times in passes.items() if times > MANY_PASSES)


class SyntheticDataset:
    """Random tokens with a strongly varying masked fraction of each sequence, for comparing layouts.

    The fraction is drawn per sample from a U-shaped beta distribution, so that the counts of unmasked tokens differ
    strongly between ranks; at least one target of each sample counts.
    """

    samples = 1 << 20
    """Nominal length of an epoch; samples never repeat."""

    def __init__(
        self, vocab_size: int, sequence_length: int, seed: int, masked: float = 0.3, *, documents: bool = False
    ) -> None:
        """Set up the generator. ``masked`` is the mean fraction of masked targets, 0 for none; ``documents`` also
        packs random documents."""
        if not 0 <= masked < 1:
            raise UsageError(f"masked = {masked}: give a fraction of at least 0 and below 1.")
        if vocab_size < 2:
            raise UsageError(f"vocab_size = {vocab_size}: at least 2 are needed to predict anything.")
        self.vocab_size = vocab_size
        self.fingerprint = f"synthetic, {masked:g} masked{', documents' if documents else ''}"
        self._length, self._seed, self._masked = sequence_length, seed, masked
        self._end = vocab_size - 1 if documents else None

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the sequences at these indices: a pure function of (seed, index)."""
        windows = np.empty((len(indices), self._length + 1), dtype=np.int64)
        masks = np.zeros((len(indices), self._length), dtype=bool)
        for row, index in enumerate(indices):
            random = np.random.default_rng((self._seed, index))
            windows[row] = random.integers(0, self.vocab_size, self._length + 1)
            kept = int(random.integers(self._length))  # this target always counts
            if self._end is not None:
                windows[row, random.random(self._length + 1) < 4 / self._length] = self._end
                windows[row, kept] = random.integers(0, self._end)
            if self._masked:
                masks[row] = random.random(self._length) < random.beta(self._masked, 1 - self._masked)
            masks[row, kept] = False
        ends = None if self._end is None else windows[:, :-1] == self._end
        batch = _next_token(windows, ends, indices)
        batch.targets[torch.from_numpy(masks)] = IGNORE
        return batch


def _read_sequences(
    stream: Stream, starts: Sequence[int], s: int, indices: Sequence[int], *, document_mask: bool
) -> Batch:
    """Return the s tokens of a stream from each start on; what is missing after its end has no targets."""
    windows, ends = np.zeros((len(starts), s + 1), dtype=np.int64), np.ones((len(starts), s), dtype=bool)
    places = [(row, start, max(0, min(s, len(stream) - 1 - start))) for row, start in enumerate(starts)]
    for row, start, n in places:  # n targets
        if n:
            windows[row, : n + 1] = stream.read(start, start + n + 1)
            if document_mask:
                ends[row, :n] = stream.ends(windows[row, :n], start)
    batch = _next_token(windows, ends if document_mask else None, indices)
    for row, start, n in places:
        batch.targets[row, n:] = IGNORE
        if n and (counted := stream.counted(start + 1, start + 1 + n)) is not None:
            batch.targets[row, :n][torch.from_numpy(~counted)] = IGNORE
    return batch


def _next_token(windows: np.ndarray, ends: np.ndarray | None, indices: Sequence[int]) -> Batch:
    """Split windows ``[n, s + 1]`` into tokens and next tokens; with the ends of documents ``[n, s]``, number these.

    The end token belongs to its document. The first token of the next document is never a target.
    """
    tokens, targets = windows[:, :-1].copy(), windows[:, 1:].copy()
    samples = torch.tensor(indices, dtype=torch.int64)
    if ends is None:
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), samples=samples)
    targets[ends] = IGNORE
    documents = (np.cumsum(ends, axis=1) - ends).astype(np.int32)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(documents), samples)


def open_dataset(config: DataConfig, *, seed: int, split: Split, progress: bool = False) -> Dataset:
    """Open one split of the corpus of ``config``; tokenise it first if it is not in the cache.

    Args:
        seed: random seed of the sample order. Validation has one fixed order, so that runs with different seeds are
            scored on the same sequences.

    Raises:
        UsageError: naming the invalid input.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    if config.reads == "synthetic":
        split_seed = len(SPLITS) * seed + SPLITS.index(split)
        vocab, documents = tokenizer.vocab_size, config.document_mask
        return SyntheticDataset(vocab, config.sequence_length, split_seed, documents=documents)
    seed = seed if split == "train" else 0
    packed: dict[str, Dataset] = {}
    for name, source in config.sources().items():
        stream = open_stream(source, tokenizer, split, progress=progress)
        packed[name] = PackedDataset(
            stream, seed, sequence_length=config.sequence_length, document_mask=config.document_mask
        )
    if not config.mixture:
        return packed[""]
    sources = config.mixture if split == "train" else {n: each.constant() for n, each in config.mixture.items()}
    return MixtureDataset(packed, sources, seed, config.sequence_length)


def open_complete(config: DataConfig, *, progress: bool = False) -> CompleteDataset:
    """Open all validation documents of ``config`` in their order; tokenise the corpus first if it is not in the cache.

    Raises:
        UsageError: naming the invalid input.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    return CompleteDataset(
        open_stream(config, tokenizer, "validation", progress=progress), sequence_length=config.sequence_length,
        document_mask=config.document_mask,
    )


class Prefetcher(Generic[T]):
    """Items by number, prefetched one ahead. Each must be a pure function of its number.

    The thread ends with this object, or with the program.

    >>> squares = Prefetcher(lambda number: number**2, stop=5)
    >>> squares(2), squares(3)  # 3 is computed meanwhile
    (4, 9)

    Args:
        make: computes an item; calls do not overlap.
        stop: the first number that is not prefetched.
    """

    def __init__(self, make: Callable[[int], T], stop: int):
        self._make, self._stop = make, stop
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-ahead")
        self._made: dict[int, Future[T]] = {}

    def __call__(self, number: int) -> T:
        """Return item ``number`` and start to compute the next one. Errors from computing the item are raised here."""
        item = self._made.pop(number, None) or self._thread.submit(self._make, number)
        following = number + 1
        started = self._made.pop(following, None)
        for other in self._made.values():
            other.cancel()
        self._made = {}
        if following < self._stop:
            self._made[following] = started or self._thread.submit(self._make, following)
        return item.result()
