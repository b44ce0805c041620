"""Check that ranks which should hold the same parameters do: compare hashes, and name those that differ from most.

A flipped bit in one replica's memory does not show in the loss at once, and data parallelism keeps it for good: each
replica adds the same update to what is no longer the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from shoal.base.boxes import Box
from shoal.engine.checkpoint.manifest import key
from shoal.engine.collectives.json_collectives import Group, broadcast, gather
from shoal.training.step.engine import Engine

CHUNK = 1 << 20  # elements that are hashed at once: the most that is allocated for it
NAMED = 4  # ranks and parameters in a message


class ReplicasDiffer(RuntimeError):
    """Ranks hold different bits of what should be the same.

    Attributes:
        ranks: that differ from the majority; all that are involved, where there is none.
    """

    def __init__(self, message: str, ranks: list[int]):
        super().__init__(message)
        self.ranks = ranks


@lru_cache(maxsize=2)
def _factors(device: torch.device) -> Tensor:
    """An odd number for each place: int64 [CHUNK]."""
    numbers = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**62), 2**62, (CHUNK,), generator=numbers) * 2 + 1).to(device)


def hash_of(x: Tensor) -> Tensor:
    """64 bits of a tensor's bits and their places, on its device: int64 [].

    The sum, modulo 2^64, of each element's bits times an odd number of its place. So it does not depend on the order of
    summation, and any change of a single element changes it: times an odd number, no difference becomes 0.
    """
    flat = x.detach().reshape(-1)
    bits = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for number, part in enumerate(bits.split(CHUNK)):
        total = total * 3 + (part.long() * _factors(x.device)[: part.numel()]).sum() + number
    return total


def held(engine: Engine) -> Iterator[tuple[str, Box, str, Tensor]]:
    """Every parameter on this rank, as (name, box, kind, values): what is computed with, and what is updated."""
    for stage in engine.stages:
        for bucket in stage.parameters.buckets:
            if bucket.keep_full:
                for slot in bucket.slots:
                    yield slot.split.name, slot.split.box, "", slot.parameter.data.reshape(-1)[: slot.split.box.numel]
    for name, pieces in engine.parameters.weights().items():
        for piece in pieces:
            yield name, piece.box, " (what the optimizer updates)", piece.tensor


def compare(engine: Engine, step: int, group: Group) -> None:
    """Compare what replicas hold. Collective.

    Args:
        step: optimizer steps done, for the message.
        group: of all ranks, in which nothing else is under way.

    Raises:
        ReplicasDiffer: on every rank alike, naming the ranks that differ and the first parameter.
    """
    named = {f"{key(name, box)}{kind}": hash_of(values) for name, box, kind, values in held(engine)}
    hashes = torch.stack(list(named.values())).tolist() if named else []
    every = gather([list(zip(named, hashes, strict=True)), engine.mesh.describe()], group)
    verdict = broadcast(judge([told for told, _ in every]) if every else None, group)
    if verdict is None:
        return
    places = broadcast([place for _, place in every], group)
    raise ReplicasDiffer(f"after step {step}: {_describe(verdict, places)}", verdict["ranks"])


def judge(every: list[list[tuple[str, int]]]) -> dict | None:
    """What differs, if anything.

    Args:
        every: of each rank, the name and hash of each thing it holds, in the order of the model.

    Returns:
        JSON values: "ranks" that are out of line, "names" of what they differ in, "agreed", how many have the first of
        these alike.

    >>> judge([[("w", 1), ("v", 5)], [("w", 1), ("v", 5)], [("w", 2), ("v", 5)]])
    {'ranks': [2], 'names': ['w'], 'agreed': 2}
    """
    holders: dict[str, dict[int, int]] = {}
    for rank, told in enumerate(every):
        for name, value in told:
            holders.setdefault(name, {})[rank] = value
    ranks: set[int] = set()
    majorities: dict[str, int] = {}  # of each parameter in which ranks differ; 0 where there is none
    for name, values in holders.items():
        value, agreed = Counter(values.values()).most_common(1)[0]
        if agreed < len(values):
            majorities[name] = agreed if agreed > len(values) / 2 else 0
            ranks |= {rank for rank, mine in values.items() if mine != value or not majorities[name]}
    if not ranks:
        return None
    return {"ranks": sorted(ranks), "names": list(majorities), "agreed": next(iter(majorities.values()))}


def _describe(verdict: dict, places: list[str]) -> str:
    ranks, names = verdict["ranks"], verdict["names"]
    who = " and ".join(places[rank] for rank in ranks[:NAMED])
    who += f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    what = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    if verdict["agreed"]:
        return (
            f"{who} {'differs' if len(ranks) == 1 else 'differ'} from the {verdict['agreed']} other replicas in {what}."
        )
    return f"{who} hold different values of {what}, and no majority tells which are right."
