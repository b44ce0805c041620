"""Labels besides the next token: drawn from the model's own distribution, or of later tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.engine.models.initial import stream_key, uniform
from shoal.engine.models.loss import IGNORE
from shoal.engine.streams import to_device

ELSEWHERE = -1
"""Label that belongs to another rank's ids; it counts in the loss."""


def label_key(seed: int, step: int) -> int:
    return stream_key(seed, f"labels.{step}")


def draw_labels(
    logits: Tensor, key: int, index: Tensor, *,
    start: int = 0, part: int = 0, gather: Callable[[Tensor], Tensor] = lambda x: x.unsqueeze(0),
) -> Tensor:
    """Draw one label per token by inverse transform of a uniform number of (key, index).

    Logits are unsplit, or split over ranks by token id.

    Args:
        logits: [b, s, n] of n consecutive ids; n may be 0 if other parts exist.
        index: [b, s] int64 token numbers, the same on any layout.
        start: the first id.
        part: index of this part of the ids.
        gather: stacks a tensor of all parts, in order: [b, s] -> [parts, b, s].

    Returns:
        [b, s] ids, or `ELSEWHERE` where the label is in another part.
    """
    logits = logits.detach()
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    sums = gather(torch.logsumexp(logits, -1)) if logits.shape[-1] else gather(logits.new_full(index.shape, -torch.inf))
    ends = sums.double().softmax(0).cumsum(0)  # [parts, b, s]
    ends.masked_fill_(ends >= ends[-1], 1.0)  # rounding must not leave the last non-empty part below 1
    begin = ends[part - 1] if part else torch.zeros_like(ends[0])
    number = uniform(key, index)
    mine = (begin <= number) & (number < ends[part])
    if not logits.shape[-1]:
        return torch.full_like(index, ELSEWHERE)
    cumulative = logits.softmax(-1).cumsum(-1)  # [b, s, n]
    inside = ((number - begin) / (ends[part] - begin).clamp(min=torch.finfo(torch.float64).tiny)).clamp(0, 1)
    target = inside.to(cumulative.dtype).unsqueeze(-1) * cumulative[..., -1:]
    ids = torch.searchsorted(cumulative, target).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return torch.where(mine, start + ids, ELSEWHERE)


def look_further(tokens: Tensor, targets: Tensor, documents: Tensor | None, depth: int) -> Tensor:
    """Return inputs and targets of the modules of multi-token prediction, [depth, 2, b, s]: of k places later.

    A module has no target where the sequence or the document ends before.

    Args:
        tokens, targets, documents: of complete sequences, as in `Transformer.forward`.

    >>> look_further(torch.tensor([[5, 6, 7]]), torch.tensor([[6, 7, 8]]), None, 1)[0, :, 0].tolist()
    [[6, 7, 0], [7, 8, -100]]
    """
    found = []
    for k in range(1, depth + 1):
        after = 0, min(k, tokens.shape[1])
        later, wanted = F.pad(tokens[:, k:], after), F.pad(targets[:, k:], after, value=IGNORE)
        if documents is not None:
            inside = F.pad(documents[:, k:] == documents[:, :-k], after)
            wanted = wanted.masked_fill(~to_device(inside, wanted.device), IGNORE)
        found.append(torch.stack((later, wanted)))
    return torch.stack(found)
