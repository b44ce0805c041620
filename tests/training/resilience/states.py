"""A small state that a run keeps in host memory and goes on from."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from unittest import mock

import torch
import torch.distributed as dist

from shoal.engine.checkpoint import Checkpointer
from shoal.training.resilience.memory_checkpoint import InMemoryCheckpointer, RankTopology
from shoal.training.resilience.restore import Restored, restore
from tests.engine.checkpoint.cuts import blank, cut, same

TENSORS = {
    "model.w": ((7, 5), torch.float32),
    "model.b": ((6,), torch.bfloat16),
    "optimizer.m": ((3, 4, 2), torch.float64),
    "count": ((), torch.int64),
}


def values_of(step: int) -> dict[str, torch.Tensor]:
    """Random bits, others for each step."""
    rng = torch.Generator().manual_seed(step)
    return {
        name: torch.randint(0, 256, (*shape, dtype.itemsize), generator=rng, dtype=torch.uint8).view(dtype).view(shape)
        for name, (shape, dtype) in TENSORS.items()
    }


def pieces_of(step: int, cut_seed: int, rank: int, world: int):
    return cut(Random(cut_seed), values_of(step), world)[rank]


def here() -> tuple[int, int, dist.ProcessGroup | None]:
    """This rank, their number, and a group of them."""
    if not dist.is_initialized():
        return 0, 1, None
    world = dist.get_world_size()
    return dist.get_rank(), world, dist.new_group(backend="gloo") if world > 1 else None


def keep(homes: list[Path], steps: list[int], cut_seed: int, node_ranks: int = 0, from_save=None) -> list[str]:
    """A run that keeps the states of some steps, and ends without a word. Ranks with other homes are on other hosts."""
    rank, world, group = here()
    said = []
    with imagine_hosts(homes, rank, world) as home:
        memory = InMemoryCheckpointer(
            home, home, group=group, places=RankTopology.collect(group, node_ranks), keep=from_save, report=said.append
        )
    for step in steps:
        memory.save(step, pieces_of(step, cut_seed, rank, world), {"step": step})
    memory.wait()
    return said


def go_on(
    homes: list[Path], disk: Path, cut_seed: int, before: int | None = None
) -> tuple[Restored | None, list[str], bool]:
    """What a run that starts anew finds; whether every bit of it is right."""
    rank, world, group = here()
    state = blank([pieces_of(0, cut_seed, rank, world)])[0]
    with imagine_hosts(homes, rank, world) as home:
        found, notes = restore(disk, home, state, group=group, model=None, before=before)
    if found is None:
        return None, notes, True
    expected = pieces_of(found.step, cut_seed, rank, world)
    right = all(
        same(piece.tensor, wanted.tensor)
        for name, pieces in state.items()
        for piece, wanted in zip(pieces, expected[name], strict=True)
    )
    return found, notes, right and found.extra == {"step": found.step}


@contextmanager
def imagine_hosts(homes: list[Path], rank: int, world: int) -> Iterator[Path]:
    """With several homes: this rank believes itself on another host than some of the others."""
    place = rank * len(homes) // world
    with mock.patch.object(socket, "gethostname", lambda: f"host-{place}"):
        yield homes[place]


def on_disk(folder: Path, steps: list[int], cut_seed: int) -> None:
    rank, world, group = here()
    checkpointer = Checkpointer(folder, group=group, keep=9, asynchronous=False)
    for step in steps:
        checkpointer.save(step, pieces_of(step, cut_seed, rank, world), {"step": step})
    checkpointer.close()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 16
    path.write_bytes(data)
