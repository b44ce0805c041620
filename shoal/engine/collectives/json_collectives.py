"""Collectives of small JSON values. torch's object collectives unpickle peer data, which can execute code."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

HostGroup = dist.ProcessGroup | None
"""A process group with gloo for host memory, or None for a single process."""


def world() -> HostGroup:
    """Return the group of all ranks."""
    return dist.group.WORLD if dist.is_initialized() else None


def get_rank(group: HostGroup) -> int:
    """Return this process's rank in the group."""
    return dist.get_rank(group) if group is not None else 0


def get_size(group: HostGroup) -> int:
    """Return the number of ranks in the group."""
    return dist.get_world_size(group) if group is not None else 1


def gather(value: Any, group: HostGroup) -> list[Any]:
    """Return every rank's value, in rank order, on rank 0; an empty list on other ranks."""
    if group is None:
        return [value]
    padded, sizes = _pad(_encode(value), group)
    parts = [torch.empty_like(padded) for _ in sizes] if get_rank(group) == 0 else []
    dist.gather(padded, parts or None, group=group, group_dst=0)
    return _decode(parts, sizes) if parts else []


def all_gather(value: Any, group: HostGroup) -> list[Any]:
    """Return every rank's value, in rank order, on every rank."""
    if group is None:
        return [value]
    padded, sizes = _pad(_encode(value), group)
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return _decode(parts, sizes)


def broadcast(value: Any, group: HostGroup) -> Any:
    """Return rank 0's value on every rank."""
    if group is None:
        return value
    data = _encode(value)
    size = torch.tensor([data.numel()])
    dist.broadcast(size, group=group, group_src=0)
    if get_rank(group) != 0:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=0)
    return json.loads(bytes(data.numpy()))


def _encode(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _pad(data: torch.Tensor, group: HostGroup) -> tuple[torch.Tensor, list[int]]:
    """Pad a rank's bytes to the longest rank's; return them with the length of each rank's."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(get_size(group))]
    dist.all_gather(sizes, torch.tensor([data.numel()]), group=group)
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
    padded[: data.numel()] = data
    return padded, [int(size) for size in sizes]


def _decode(parts: list[torch.Tensor], sizes: list[int]) -> list[Any]:
    return [json.loads(bytes(part[:size].numpy())) for part, size in zip(parts, sizes, strict=True)]
