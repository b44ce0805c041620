"""Loss of a trained model on a text, on any layout."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass

from shoal.base.errors import UsageError
from shoal.base.terminal import progress_bar
from shoal.engine.data.batches import open_complete
from shoal.spec.config import DataConfig, RunConfig
from shoal.training.inference.source import ModelSource, load_model


@dataclass(frozen=True)
class Evaluation:
    """Loss of a model on a text.

    Attributes:
        loss: mean negative log-likelihood [nats per token].
        perplexity: exp(loss).
        bits_per_byte: loss per byte of the text, loss / ln 2 x tokens / bytes of the full text (Gao et al. 2020, "The
            Pile", section 3.1). Unlike the loss it compares models with different tokenizers.
        tokens: predicted tokens, with ends of documents.
        documents, bytes: size of the text. The bytes, and the loss per byte, are None for a text that is stored as ids.
            Conversations have no loss per byte, since only a part of them counts.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    documents: int
    bytes: int | None


def choose_text(
    source: ModelSource, data: tuple[str, ...], sequence_length: int | None, field: str | None = None,
    chat: bool | None = None,
) -> DataConfig:
    """Return the data section of an evaluation: the given files, or the documents that a run held out.

    Args:
        data: files, folders or globs; () is the run's own validation split.
        sequence_length: tokens per sequence (default: the run's).
        field: field of the files with the text (default: the run's).
        chat: whether the files have conversations (default: the run's).

    Raises:
        UsageError: no text is given and the model has none of its own, or the sequences are too long for it.
    """
    config, shape = source.config.data, source.shape
    length = sequence_length or config.sequence_length
    if shape.family == "gpt" and length > shape.max_sequence:
        raise UsageError(f"--sequence-length {length}: the model has positions for {shape.max_sequence} tokens.")
    if not data and (not source.is_run or config.reads == "synthetic"):
        raise UsageError("this model comes without a text.\n  Name one: --data PATH.")
    given = {name: value for name, value in (("field", field), ("chat", chat)) if value is not None}
    if given and not data:
        raise UsageError(
            f"--{next(iter(given))}: the run's own text is read as in training.\n  Name another: --data PATH."
        )
    text = config.select_files(data) if data else config
    return text.model_copy(update={"sequence_length": length, "sampler": "even"} | given)


def evaluate_on_rank(source: ModelSource, config: RunConfig, sequences: int | None) -> Evaluation:
    """Load a model on this rank of the config's layout, and evaluate it on the config's data. Collective."""
    samples = open_complete(config.data)
    model = load_model(source, config)
    with progress_bar("evaluating") if model.mesh.rank == 0 else nullcontext() as show:
        found = model.sum_complete(samples, sequences, show)
    text, loss = samples.contents, found.mean
    perplexity = math.exp(loss) if loss < math.log(1e300) else math.inf
    bits = loss / math.log(2) * samples.tokens / text.bytes if text.bytes and not config.data.chat else None
    return Evaluation(loss, perplexity, bits, found.tokens, text.documents, text.bytes)
