"""Check that replicas hold equal parameters: compare hashes and name the ranks that differ from the majority.

A flipped bit in one replica's memory does not show in the loss immediately, and data parallelism never removes it: each
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
from shoal.engine.collectives.json_collectives import HostGroup, broadcast, gather
from shoal.training.step.engine import Engine

CHUNK = 1 << 20  # elements hashed together, which bounds the temporary memory
NAMED = 4  # maximum number of ranks and parameters named in a message


class SilentFailure(RuntimeError):
    """Error for values that should be equal but have different bits.

    Attributes:
        event: name of the event: "replicas differ" or "silent corruption".
        ranks: faulty ranks; all ranks concerned if the values do not show which.
    """

    def __init__(self, message: str, event: str, ranks: list[int]):
        super().__init__(message)
        self.event, self.ranks = event, ranks


@lru_cache(maxsize=2)
def _factors(device: torch.device) -> Tensor:
    """Return an odd factor for each position: int64 [CHUNK]."""
    numbers = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**62), 2**62, (CHUNK,), generator=numbers) * 2 + 1).to(device)


def hash_bits(x: Tensor) -> Tensor:
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


def _parameters(engine: Engine) -> Iterator[tuple[str, Box, str, Tensor]]:
    """Yield every parameter on this rank as (name, box, kind, values): computing copies and optimizer masters."""
    for stage in engine.stages:
        for bucket in stage.parameters.buckets:
            if bucket.keep_full:
                for slot in bucket.slots:
                    box = slot.placement.box
                    yield slot.placement.name, box, "", slot.parameter.data.reshape(-1)[: box.numel]
    for name, pieces in engine.parameters.weights().items():
        for piece in pieces:
            yield name, piece.box, " (optimizer copy)", piece.tensor


def compare_replicas(engine: Engine, step: int, group: HostGroup) -> None:
    """Compare the parameters of replicas. Collective.

    Args:
        group: group of all ranks, without pending operations.

    Raises:
        SilentFailure: on every rank, naming the ranks that differ and the first parameter.
    """
    named = {f"{key(name, box)}{kind}": hash_bits(values) for name, box, kind, values in _parameters(engine)}
    hashes = torch.stack(list(named.values())).tolist() if named else []
    every = gather([list(zip(named, hashes, strict=True)), engine.mesh.describe()], group)
    verdict = broadcast(find_differences([hashes for hashes, _ in every]) if every else None, group)
    if verdict is None:
        return
    names = broadcast([name for _, name in every], group)
    raise SilentFailure(f"after step {step}: {_describe(verdict, names)}", "replicas differ", verdict["ranks"])


def find_differences(every: list[list[tuple[str, int]]]) -> dict | None:
    """Find differences; None if all ranks agree.

    Args:
        every: for each rank, name and hash of each of its parameters, in the order of the model.

    Returns:
        JSON values: "ranks" outside the majority, "names" of the differing parameters, "agreed", the number of ranks in
        the majority for the first of these.

    >>> find_differences([[("w", 1), ("v", 5)], [("w", 1), ("v", 5)], [("w", 2), ("v", 5)]])
    {'ranks': [2], 'names': ['w'], 'agreed': 2}
    """
    holders: dict[str, dict[int, int]] = {}
    for rank, hashes in enumerate(every):
        for name, value in hashes:
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


def _describe(verdict: dict, descriptions: list[str]) -> str:
    ranks, names = verdict["ranks"], verdict["names"]
    who = " and ".join(descriptions[rank] for rank in ranks[:NAMED])
    who += f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    what = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    if verdict["agreed"]:
        return (
            f"{who} {'differs' if len(ranks) == 1 else 'differ'} from the {verdict['agreed']} other replicas in {what}."
        )
    return f"{who} hold different values of {what}, and no majority shows which are right."
