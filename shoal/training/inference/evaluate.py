"""Loss of a trained model on a text, on any layout."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from shoal.base.errors import UsageError
from shoal.base.terminal import progress_bar
from shoal.engine.data.batches import CompleteDataset, open_complete
from shoal.spec.config import DataConfig, RunConfig
from shoal.training.inference.source import ModelSource, load_model
from shoal.training.step.model_state import SummedLoss


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
        sources: of a mixture, the evaluation of each source by name; the other attributes are of all their tokens.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    documents: int
    bytes: int | None
    sources: dict[str, Evaluation] = field(default_factory=dict)


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
    """Load a model on this rank of the config's layout, and evaluate it on the config's data. Collective.

    Args:
        sequences: only this many from the start of the text, or of each source of a mixture.
    """
    parts = config.data.sources()
    texts = {name: open_complete(part) for name, part in parts.items()}
    model = load_model(source, config)
    with progress_bar("evaluating") if model.mesh.rank == 0 else nullcontext() as show:
        losses = {name: model.sum_complete(samples, sequences, show) for name, samples in texts.items()}
    found = {name: _evaluate([loss], [texts[name]], chat=parts[name].chat) for name, loss in losses.items()}
    if not config.data.mixture:
        return found[""]
    chat = any(part.chat for part in parts.values())
    return replace(_evaluate([*losses.values()], [*texts.values()], chat=chat), sources=found)


def _evaluate(losses: list[SummedLoss], texts: list[CompleteDataset], *, chat: bool) -> Evaluation:
    """Return the evaluation of all tokens of some texts."""
    contents = [text.contents for text in texts]
    loss = sum(each.nats for each in losses) / max(1, tokens := sum(each.tokens for each in losses))
    perplexity = math.exp(loss) if loss < math.log(1e300) else math.inf
    size = sum(text.bytes for text in contents if text.bytes) if all(text.bytes for text in contents) else None
    nats = sum(each.mean * text.tokens for each, text in zip(losses, texts, strict=True))
    bits = nats / math.log(2) / size if size and not chat else None
    return Evaluation(loss, perplexity, bits, tokens, sum(text.documents for text in contents), size)
