"""Collectives of small JSON values. torch's object collectives unpickle peer data, which can execute code."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

HostGroup = dist.ProcessGroup | None
"""A process group with gloo for host memory, or None for a single process."""

SIZE, FIRST = 8, 2048  # bytes of a value's length, and of the first message, which holds a short value completely


def world() -> HostGroup:
    return dist.group.WORLD if dist.is_initialized() else None


def get_rank(group: HostGroup) -> int:
    return dist.get_rank(group) if group is not None else 0


def get_size(group: HostGroup) -> int:
    return dist.get_world_size(group) if group is not None else 1


def gather(value: Any, group: HostGroup) -> list[Any]:
    """Return every rank's value, in rank order, on rank 0; an empty list on other ranks."""
    return _collect(value, group, everywhere=False)


def all_gather(value: Any, group: HostGroup) -> list[Any]:
    """Return every rank's value, in rank order, on every rank."""
    return _collect(value, group, everywhere=True)


def _collect(value: Any, group: HostGroup, *, everywhere: bool) -> list[Any]:
    if group is None:
        return [value]
    data, receives = _encode(value), everywhere or get_rank(group) == 0
    own = _first_message(data)
    parts = [torch.empty_like(own) for _ in range(get_size(group))]
    dist.all_gather(parts, own, group=group)
    sizes = [_read_size(each) for each in parts]
    parts = [each[SIZE:] for each in parts]
    if max(sizes) > FIRST - SIZE:
        padded = _pad(data, max(sizes))
        parts = [torch.empty_like(padded) for _ in sizes] if receives else []
        if everywhere:
            dist.all_gather(parts, padded, group=group)
        else:
            dist.gather(padded, parts or None, group=group, group_dst=0)
    return [json.loads(bytes(part[:size].numpy())) for part, size in zip(parts, sizes, strict=True)] if receives else []


def broadcast(value: Any, group: HostGroup) -> Any:
    """Return rank 0's value on every rank."""
    if group is None:
        return value
    data = _encode(value)
    first = _first_message(data)
    dist.broadcast(first, group=group, group_src=0)
    size = _read_size(first)
    if size <= FIRST - SIZE:
        data = first[SIZE : SIZE + size]
    else:
        if get_rank(group) != 0:
            data = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(data, group=group, group_src=0)
    return json.loads(bytes(data.numpy()))


def _encode(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _first_message(data: torch.Tensor) -> torch.Tensor:
    """Return the length of a rank's bytes and their beginning, uint8 [FIRST]."""
    length = torch.tensor([data.numel()]).view(torch.uint8)
    return _pad(torch.cat([length, data[: FIRST - SIZE]]), FIRST)


def _read_size(message: torch.Tensor) -> int:
    return int(message[:SIZE].view(torch.int64))


def _pad(data: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(data, (0, size - data.numel()))
