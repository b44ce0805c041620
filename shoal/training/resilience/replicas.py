"""Check that replicas hold equal parameters: compare hashes and name the ranks that differ from the majority.

A flipped bit in one replica's memory does not show in the loss at once, and data parallelism never removes it: each
replica adds the same update to different weights.
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

CHUNK = 1 << 20  # elements hashed at once, which bounds the temporary memory
NAMED = 4  # maximum number of ranks and parameters named in a message


class ReplicasDiffer(RuntimeError):
    """Error for ranks whose parameters should be equal but have different bits.

    Attributes:
        ranks: ranks that differ from the majority; all ranks concerned if no majority exists.
    """

    def __init__(self, message: str, ranks: list[int]):
        super().__init__(message)
        self.ranks = ranks


@lru_cache(maxsize=2)
def _factors(device: torch.device) -> Tensor:
    """Return an odd factor for each position: int64 [CHUNK]."""
    numbers = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**62), 2**62, (CHUNK,), generator=numbers) * 2 + 1).to(device)


def hash_of(x: Tensor) -> Tensor:
    """Hash the bits and positions of a tensor's elements on its device: int64 [].

    The sum, modulo 2^64, of each element's bits times an odd factor of its position. It does not depend on the order of
    summation, and any change of a single element changes it, as an odd factor maps no difference to 0.
    """
    flat = x.detach().reshape(-1)
    bits = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for number, part in enumerate(bits.split(CHUNK)):
        total = total * 3 + (part.long() * _factors(x.device)[: part.numel()]).sum() + number
    return total


def held(engine: Engine) -> Iterator[tuple[str, Box, str, Tensor]]:
    """Yield every parameter on this rank as (name, box, kind, values): computing copies and optimizer masters."""
    for stage in engine.stages:
        for bucket in stage.parameters.buckets:
            if bucket.keep_full:
                for slot in bucket.slots:
                    box = slot.placement.box
                    yield slot.placement.name, box, "", slot.parameter.data.reshape(-1)[: box.numel]
    for name, pieces in engine.parameters.weights().items():
        for piece in pieces:
            yield name, piece.box, " (what the optimizer updates)", piece.tensor


def compare(engine: Engine, step: int, group: Group) -> None:
    """Compare the parameters of replicas. Collective.

    Args:
        step: optimizer steps done, for the message.
        group: group of all ranks, without pending operations.

    Raises:
        ReplicasDiffer: on every rank, naming the ranks that differ and the first parameter.
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
    """Find differences; None if all ranks agree.

    Args:
        every: for each rank, name and hash of each of its parameters, in the order of the model.

    Returns:
        JSON values: "ranks" outside the majority, "names" of the differing parameters, "agreed", the number of ranks in
        the majority for the first of these.

    >>> judge([[("w", 1), ("v", 5)], [("w", 1), ("v", 5)], [("w", 2), ("v", 5)]])
    {'ranks': [2], 'names': ['w'], 'agreed': 2}
    """
    holders: dict[str, dict[int, int]] = {}
    for rank, told in enumerate(every):
        for name, value in told:
            holders.setdefault(name, {})[rank] = value
    ranks: set[int] = set()
    majorities: dict[str, int] = {}  # by parameter that differs; 0 without a majority
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
