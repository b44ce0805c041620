"""Tensors that autograd saves, as entries of lists; the input of products, and blocks of unfused attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.planning.cost.micro_batch import EightBits, MicroBatch
from shoal.spec.compatibility.sizes import joined_layers

_MAX_BLOCKS, _MIN_ROWS = 4, 256  # of unfused attention (`shoal.engine.models.attention`)


class Saved(NamedTuple):
    """One saved tensor."""

    what: str  # name
    shape: str  # shape in letters
    bytes: int  # total bytes on one rank


def total(saved: Iterable[Saved]) -> int:
    return sum([tensor.bytes for tensor in saved])


def multiplied(
    run: MicroBatch, what: str, letters: str, width: int, products: Sequence[str], *, needed: bool = False,
    tokens: int | None = None, parts: int = 1,
) -> list[Saved]:  # fmt: skip
    """Return the saved input of products with several matrices: itself, or its codes if they are in 8 or 4 bits.

    Args:
        width: elements per token.
        products: the linear layers.
        needed: another operation also saves the input.
        tokens: of the input, if not all of the micro-batch on the rank.
        parts: ranks that each keep as many of the codes.
    """
    n, eight, saved = run.tokens if tokens is None else tokens, run.eight, []
    coded = [eight is not None and eight.takes(name) for name in products]
    if needed or not all(coded):
        saved.append(Saved(what, letters, run.itemsize * n * width))
    if eight is not None and any(coded):
        bits, size = (4, 1) if eight.packed else (8, run.exact)
        saved.append(Saved(f"{what}, in {bits} bits", letters, eight.codes(n * width) // parts))
        saved.append(Saved(f"{what}, scales", "", size * eight.scales(n, width)))
    return saved


def entered(run: MicroBatch, what: str, products: Sequence[str]) -> list[Saved]:
    """Return the saved input, of hidden width, of the products at the start of a block.

    With sequence parallelism it is this rank's part of it or of its codes if backward gathers them again, else all.
    """
    again = gathers_again(run, products)
    if again and find_format(run, products):
        return multiplied(run, what, "[h/t, b s]", run.hidden_local, products, parts=run.layout.tp)
    letters, tokens = ("[b, s/y, h/x]", run.tokens_between) if again else ("[b, s, h/x]", run.tokens)
    return multiplied(run, what, letters, run.hidden_local, products, tokens=tokens)


def into_block(run: MicroBatch, block: str) -> list[str]:
    """Return the linear layers at the start of a feed-forward block."""
    return [f"{block}.{name}" for name in (("gate", "up") if run.gated else ("up",))]


def find_format(run: MicroBatch, products: Sequence[str]) -> EightBits | None:
    """Return how one of some linear layers is in 8 or 4 bits; None if none is."""
    return run.eight if run.eight is not None and any(map(run.eight.takes, products)) else None


def gathers_again(run: MicroBatch, products: Sequence[str] = ()) -> bool:
    """Return whether backward gathers the input of products at the start of a block again (`GatheredEntry`).

    Not what a complete recomputation of the layer has just gathered, and codes only of one product. Without products:
    of the output matrix.
    """
    layout = run.layout
    if not layout.sequence_parallel or layout.recompute == "full":
        return False
    if eight := find_format(run, products):
        names = tuple(name.rpartition(".")[2] for name in products)
        one = len(names) == 1 or (names in joined_layers(run.shape) and all(map(eight.takes, products)))
        return one and run.shape.hidden % layout.tp == 0
    return bool(products) or layout.tp_x == 1


def scores(s: int, window: int | None = None) -> int:
    """Return the scores per head that unfused attention computes: s s, except what is masked for all of a block.

    >>> scores(256), scores(1024) / 1024**2
    (65536, 0.625)
    """
    return sum(rows * seen for rows, seen in blocks(s, window))


def blocks(s: int, window: int | None = None, before: int = 0) -> list[tuple[int, int]]:
    """Return (queries of a block, keys that they attend to) of each block of unfused attention.

    Args:
        before: earlier tokens that the s queries also see.
    """
    rows, t = max(_MIN_ROWS, -(-s // _MAX_BLOCKS)), before + s
    found = []
    for start in range(0, s, rows):
        n = min(rows, s - start)
        seen = before + start + n
        found.append((n, min(seen, n + window - 1) if window and window < t else seen))
    return found
