"""Generation: continue sequences token by token, with a key/value cache, on all ranks of a layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.base.errors import UsageError
from shoal.engine.models.cache import Slice
from shoal.training.step.model_state import ModelState

MOST_ROWS = 32  # sequences that are continued together


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and where a text ends.

    Attributes:
        max_tokens: maximum number of tokens to add.
        temperature: divides the logits; 0 takes the most likely token.
        top_p: draw among the most likely tokens whose probabilities sum to this (Holtzman et al. 2020, "The Curious
            Case of Neural Text Degeneration", section 3.1); 1 keeps all.
        top_k: draw among this many most likely tokens (Fan et al. 2018); 0 keeps all.
        stop: texts that end a continuation, which does not include them.
        seed: random seed of the first sequence; the next ones count up, so that each is drawn as if it were alone.
    """

    max_tokens: int = 200
    temperature: float = 0.8
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise UsageError("--stop '': an empty text would end every continuation at once.\n  Leave it out.")


def generate(
    model: ModelState,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    window: int,
    take: Callable[[int, int], bool],
) -> None:
    """Continue sequences token by token. Collective.

    All sequences are computed together from the length of the shortest on; a longer one reads its own next token
    instead of drawing it (as the reference code of Touvron et al. 2023, "LLaMA"). So no sequence is padded, and each
    gets the tokens that it gets alone.

    Args:
        prompts: ids to continue, at least one in each. Only the last ``window`` count.
        window: maximum context length. When it is full, its second half is recomputed as the new context.
        take: called with the index of a sequence and its next id; returns whether to continue that sequence. It must
            decide the same on all ranks.
    """
    for first in range(0, len(prompts), MOST_ROWS):
        _generate(model, prompts, range(first, min(first + MOST_ROWS, len(prompts))), sampling, window, take)


def _generate(
    model: ModelState, prompts: Sequence[Sequence[int]], rows: range, sampling: Sampling, window: int,
    take: Callable[[int, int], bool],
) -> None:
    texts = [list(prompts[row])[-window:] for row in rows]
    generators = [torch.Generator().manual_seed(sampling.seed + row) for row in rows]
    left = [sampling.max_tokens] * len(rows)
    length = min(map(len, texts))
    seen, new = Slice(), slice(0, length)
    while any(left):
        if seen.stop + new.stop - new.start > window:
            seen, new = Slice(), slice(length - max(1, window // 2), length)
        seen = Slice(seen)
        logits = model.logits(torch.tensor([text[new] for text in texts], device=model.mesh.device), seen)[:, -1]
        drawn = [i for i, text in enumerate(texts) if len(text) == length and left[i]]
        if drawn:
            likely = logits.double().cpu()
            ids = torch.zeros(len(texts), dtype=torch.float64)
            for i in drawn:
                ids[i] = draw(likely[i], sampling, generators[i])
            ids = model.share(ids).cpu()
        for i, text in enumerate(texts):
            if i in drawn:
                text.append(int(ids[i]))
                left[i] = left[i] - 1 if take(rows[i], text[-1]) else 0
            elif len(text) == length:  # it has ended, and is computed on only beside the others
                text.append(0)
        length += 1
        new = slice(length - 1, length)


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw an id from float64 logits [v] on the CPU."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = (logits - logits.max()) / sampling.temperature  # finite for any temperature
    if 0 < sampling.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    likely = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered, ids = likely.sort(descending=True, stable=True)
        before = ordered.cumsum(0) - ordered  # 0 for the most likely, which is always kept
        likely[ids[before >= sampling.top_p]] = 0
    return int(torch.multinomial(likely, 1, generator=generator))
