"""Detect silent data corruption: compute a step twice and compare the bits of every value.

A device that occasionally computes wrong numbers (Hochschild et al. 2021, "Cores that don't count") raises no error,
and finite wrong numbers pass every other check. The step is rerun without its update: on the same rank, which finds
intermittent faults, or with each replica's samples on the next replica, which also finds a device that is always wrong.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.engine.collectives.json_collectives import HostGroup, broadcast, gather
from shoal.engine.device import reproducible
from shoal.training.nonfinite_locator import ValueWatch, When
from shoal.training.resilience.replicas import SilentFailure, hash_bits
from shoal.training.step.engine import Engine

Where = Literal["same", "replica"]
Trace = list[tuple[When, str, int]]
"""Sort key, description and hash of each value of a step."""


def reexecute(engine: Engine, step: int, group: HostGroup, where: Where = "same") -> None:
    """Compute a step twice, without its update, and compare. Collective.

    Args:
        step: step whose samples are used (0 is the first), with the current weights.
        group: group of all ranks, without pending operations.
        where: "same" repeats on the same rank, "replica" on the next data-parallel replica.

    Raises:
        SilentFailure: on every rank, with the first differing value and the faulty rank, or two ranks if either may
            be wrong.
    """
    mesh = engine.mesh
    replicas = mesh.ranks("dp")
    shift = 1 if where == "replica" else 0
    partner = replicas[(mesh.index("dp") + shift) % len(replicas)]
    results = gather([trace(engine, step), trace(engine, step, shift), partner, mesh.describe()], group)
    verdict = broadcast(find_faulty_ranks(results) if results else None, group)
    if verdict is not None:
        message = f"step {step}, computed twice, gave two results: {verdict['where']}."
        raise SilentFailure(message, "silent corruption", verdict["ranks"])


def trace(engine: Engine, step: int, shift: int = 0) -> Trace:
    """Run a step without its update, with the samples of replica + ``shift``, and hash its values on this rank.

    Both traces are watched, so both compute products apart that training joins on CUDA (`ValueWatch`).
    """
    seen: list[tuple[When, str]] = []
    hashes: list[Tensor] = []

    def see(when: When, what: str, value: Tensor) -> None:
        seen.append((when, what))
        hashes.append(hash_bits(value))

    watch, prefetched = ValueWatch(engine, see), engine.get_batches
    engine.replica_offset, engine.get_batches = shift, engine.make_batches
    try:
        with reproducible(engine.mesh.device):
            watch.run(engine, step)
    finally:
        engine.replica_offset, engine.get_batches = 0, prefetched
    values = torch.stack(hashes).tolist() if hashes else []
    return [(when, what, value) for (when, what), value in zip(seen, values, strict=True)]


def find_faulty_ranks(results: list[list[Any]]) -> dict[str, Any] | None:
    """Determine the ranks with a wrong result; None if all results agree.

    Args:
        results: for each rank: first trace, second trace, rank of the second trace's samples, description.
    """
    differ = []
    for rank, (_, second, partner, _) in enumerate(results):
        for (when, what, first_hash), (_, _, second_hash) in zip(results[partner][0], second, strict=True):
            if first_hash != second_hash:
                differ.append((tuple(when), what, sorted({rank, partner})))
                break
    if not differ:
        return None
    _, what, suspects = min(differ, key=lambda d: d[0])
    # With three or more replicas, a rank that is always wrong differs from both neighbours, and they only from it.
    counted = Counter(rank for _, _, pair in differ for rank in pair if len(pair) > 1)
    most = max((counted[rank] for rank in suspects), default=0)
    if most > 1:
        suspects = [rank for rank in suspects if counted[rank] == most]
    names = " or ".join(results[rank][3] for rank in suspects)
    return {"where": f"{names}, {what}", "ranks": suspects}
