"""States cut at random over ranks, as tensor parallelism, ZeRO's flat ranges and replicas would cut them."""

import math
from pathlib import Path
from random import Random

import torch

from shoal.base.boxes import Box, Piece, flat_range
from shoal.engine.checkpoint.manifest import merge, write_manifest
from shoal.engine.checkpoint.write import State, plan_save, write_part

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


def random_values(rng: Random, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Whole tensors of random bits (so NaNs of all kinds too)."""
    values = {}
    for name, shape in shapes.items():
        dtype = rng.choice(DTYPES)
        if dtype == torch.bool:
            data = bytearray(rng.choices((0, 1), k=math.prod(shape)))
        else:
            data = bytearray(rng.randbytes(math.prod(shape) * dtype.itemsize))
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        values[name] = flat.reshape(shape)
    return values


def random_boxes(rng: Random, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that cover the shape once: first cut like a mesh, then each part in flat ranges."""
    parts = [Box.full(shape)]
    for _ in range(rng.randrange(3)):
        parts = [half for part in parts for half in _halves(rng, part)]
    boxes = []
    for part in parts:
        points = sorted(rng.randrange(part.numel + 1) for _ in range(rng.randrange(3)))
        for start, stop in zip([0, *points], [*points, part.numel], strict=True):
            boxes += [box.to_global(part) for _, box in flat_range(part.shape, start, stop)]
    return boxes


def _halves(rng: Random, box: Box) -> list[Box]:
    dims = [d for d, n in enumerate(box.shape) if n > 1]
    if not dims:
        return [box]
    dim = rng.choice(dims)
    at = rng.randrange(1, box.shape[dim])
    low, high, offset = list(box.shape), list(box.shape), list(box.offset)
    low[dim], high[dim] = at, box.shape[dim] - at
    offset[dim] += at
    return [Box(box.offset, tuple(low)), Box(tuple(offset), tuple(high))]


def cut(rng: Random, values: dict[str, torch.Tensor], ranks: int) -> list[State]:
    """Every rank's pieces of the values; some are also held, as equal copies, by ranks that do not save them."""
    states: list[State] = [{name: [] for name in values} for _ in range(ranks)]
    for name, whole in values.items():
        shape = tuple(whole.shape)
        for box in random_boxes(rng, shape) or [Box.full(shape)]:
            holders = rng.sample(range(ranks), rng.randrange(1, ranks + 1))
            for holder in holders:
                piece = Piece(shape, box, whole[box.slices].clone(), primary=holder == holders[0])
                states[holder][name].append(piece)
    return states


def blank(states: list[State]) -> list[State]:
    """The same pieces with other values in them."""
    for state in states:
        for pieces in state.values():
            for piece in pieces:
                bits = _bits(piece.tensor)
                piece.tensor = ((bits == 0).to(torch.uint8)).view(piece.tensor.dtype).reshape(piece.tensor.shape)
    return states


def write_checkpoint(path: Path, states: list[State], *, extra: dict | None = None, box_bytes: int = 64) -> Path:
    """What a `Checkpointer` does on all ranks, in one process."""
    path.mkdir(parents=True, exist_ok=True)
    parts = []
    for rank, state in enumerate(states):
        plan = plan_save(state, box_bytes)
        parts.append(write_part(path, rank, plan, plan.copy(torch.empty(plan.size, dtype=torch.uint8))))
    write_manifest(path, merge(1, extra or {}, parts))
    return path


def whole(name_to_tensor: dict[str, torch.Tensor]) -> State:
    """A state of one rank that holds everything."""
    return {n: [Piece(tuple(t.shape), Box.full(tuple(t.shape)), t)] for n, t in name_to_tensor.items()}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
