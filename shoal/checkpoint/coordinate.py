"""Small JSON values between ranks, over a process group that is used for nothing else."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None
"""A gloo process group, or None where there is a single process."""


def rank_of(group: Group) -> int:
    """This process's rank in the group."""
    return dist.get_rank(group) if group is not None else 0


def size_of(group: Group) -> int:
    """Ranks in the group."""
    return dist.get_world_size(group) if group is not None else 1


def gather(value: Any, group: Group) -> list[Any]:
    """Every rank's value, in rank order, on rank 0; an empty list on the others. JSON, as pickle would run code."""
    if group is None:
        return [value]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(size_of(group))]
    dist.all_gather(sizes, torch.tensor([data.numel()]), group=group)
    longest = int(max(sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: data.numel()] = data
    root = rank_of(group) == 0
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes] if root else None
    dist.gather(padded, parts, group=group, group_dst=0)
    return [json.loads(bytes(part[:n].numpy())) for part, n in zip(parts, sizes, strict=True)] if parts else []


def broadcast(value: Any, group: Group) -> Any:
    """Rank 0's value, on every rank."""
    if group is None:
        return value
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([data.numel()])
    dist.broadcast(size, group=group, group_src=0)
    if rank_of(group) != 0:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=0)
    return json.loads(bytes(data.numpy()))
