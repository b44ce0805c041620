"""Replacements of torch's embeddings, and of the loss, unsplit or split over tensor-parallel ranks.

    `EmbeddingTable`            unsplit; gradients go directly to their buffers (`GradSink`)
    `VocabularyEmbedding`       rank r holds the r-th part of the token ids
    `SequenceEmbedding`         unsplit; looks up this rank's part of the positions
    `VocabularyLoss`            cross-entropy of logits, which stay split
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engine.collectives.ops import all_gather
from shoal.engine.models.loss import IGNORE, CrossEntropy, SummedCrossEntropy
from shoal.engine.parallel.linear import TensorParallel, describe_part, keep_rows
from shoal.engine.parallel.placement import ParamPlacement
from shoal.engine.parallel.weight_grad import EmbeddingFunction, GradSink


class EmbeddingTable(nn.Embedding):
    """Embedding table, taken from the module that it replaces."""

    at: TensorParallel | None = None

    def __init__(self, unsplit: nn.Embedding, sink: GradSink):
        super(nn.Embedding, self).__init__()
        self.num_embeddings, self.embedding_dim, self.sink = unsplit.num_embeddings, unsplit.embedding_dim, sink
        self.weight = unsplit.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids: [..] -> [.., h]."""
        if self.sink.parameters is None:
            return F.embedding(ids, self.weight)
        return EmbeddingFunction.apply(self.sink, ids, self.weight)

    def extra_repr(self) -> str:
        """Return ``257/4, 64, tp=4``."""
        sizes = zip((self.num_embeddings, self.embedding_dim), self.weight.shape, strict=True)
        return ", ".join(describe_part(*size) for size in sizes) + (f", tp={self.at.size}" if self.at else "")


class VocabularyEmbedding(EmbeddingTable):
    """Embedding split by token id: each rank looks up its own ids, returns zeros for others, and the ranks sum."""

    at: TensorParallel

    def __init__(self, unsplit: nn.Embedding, name: str, at: TensorParallel):
        super().__init__(unsplit, at.sink)
        self.at = at
        self.placements = [keep_rows(self, name, "weight", at, at.size)]

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids: [b, s] -> this rank's part of [b, s, h]."""
        box = self.placements[0].box
        ids = ids - box.offset[0]
        foreign = (ids < 0) | (ids >= box.shape[0])
        rows = super().forward(ids.masked_fill(foreign, 0)).masked_fill(foreign.unsqueeze(-1), 0)
        return self.at.reduce_hidden(rows)


class SequenceEmbedding(EmbeddingTable):
    """Position embedding that, with sequence parallelism, looks up this rank's part of the sequence only."""

    at: TensorParallel

    def __init__(self, unsplit: nn.Embedding, name: str, at: TensorParallel):
        super().__init__(unsplit, at.sink)
        self.at, self.placements = at, list[ParamPlacement]()

    def forward(self, ids: Tensor) -> Tensor:
        """Look up positions: [s] -> [s, h] or [s/tp, h]."""
        y = self.at.y
        return super().forward(ids.chunk(y.size())[y.rank()] if self.at.sequence_parallel else ids)


class VocabularyLoss(CrossEntropy):
    """Cross-entropy of logits split by token id."""

    def __init__(self, unsplit: nn.Module, name: str, at: TensorParallel):
        super().__init__()
        self.at, self.placements = at, list[ParamPlacement]()
        columns = at.shape.vocabulary_rows(at.size)
        self.first = at.rank * columns
        self.columns = min(columns, max(0, at.shape.vocab - self.first))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss [nats] of logits [b, s, v/tp] and targets [b, s]."""
        return SummedCrossEntropy.apply(
            logits, targets - self.first, targets != IGNORE, self.columns,
            lambda x: all_gather(x.unsqueeze(0), self.at.group), self.rows_for(targets),
        )
