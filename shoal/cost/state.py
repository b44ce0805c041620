"""Bytes that stay on a rank from step to step: parameters, gradients and optimizer states, to the byte.

What `shoal.parallel` builds on a rank is counted here without building it: which parameters its stages hold, how tensor
parallelism splits them, how they fill buckets, and where the equal cuts of ZeRO fall in these. With P parameters on N
ranks, in bf16 with fp32 Adam, that is (Rajbhandari et al. 2020, figure 1; see `zero_bytes`)

    stage 0: 16 P    stage 1: 4 P + 12 P/N    stage 2: 2 P + 14 P/N    stage 3: 16 P/N

in the paper's accounting. Shoal keeps gradients in fp32, 18 P for stage 0; and with stage 3 no shard in bf16 beside the
one in fp32, 16 P/N again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from shoal.catalog import ModelShape
from shoal.layout import Layout
from shoal.pieces import Box, flat_range
from shoal.precision.formats import Formats

ALIGN = 64  # elements: what shards are rounded up to (`shoal.parallel.bucket`)
STATES = {  # per element
    "sgd": 0, "momentum": 1, "adagrad": 1, "adam": 2, "adamw": 2, "radam": 2, "sage": 3, "sophia-g": 2, "sophia-h": 2,
}  # fmt: skip
BLOCK, SMALLEST = 256, 4096  # adam8bit: elements of one scale, and of the smallest parameter that is quantised


@dataclass(frozen=True)
class StagePart:
    """What a pipeline stage keeps of the model.

    Attributes:
        layers: their numbers.
        first, last: whether it has the embedding, or the final norm and the head.
        shared: whether a tied embedding is shared with another stage.
    """

    layers: range
    first: bool = True
    last: bool = True
    shared: bool = False


@dataclass(frozen=True)
class Held:
    """One parameter on one rank.

    Attributes:
        name: in the model.
        whole: its shape.
        box: the part that is here.
        allocated: elements, padding included.
        partial: the mesh axis over which its gradient is a partial sum, if any.
        copies: how many tensor-parallel ranks hold this very part.
        alone: it has a bucket by itself.
        expert: it lies over ranks as experts do.
    """

    name: str
    whole: tuple[int, ...]
    box: Box
    allocated: int
    partial: str = ""
    copies: int = 1
    alone: bool = False
    expert: bool = False


Unit = list[Held]
"""What is gathered at once: the embedding, a layer, the final norm and the head."""
SPLITTING = ("tp", "sequence_parallel", "ep", "etp")  # all that `units_of` reads of a layout


class Members(NamedTuple):
    """Parameters of one unit that share a bucket, with their sums.

    Attributes:
        held: the parameters.
        allocated, elements: of all, with and without padding.
        expert: whether they are experts', all of them.
    """

    held: tuple[Held, ...]
    allocated: int
    elements: int
    expert: bool

    @staticmethod
    def of(held: Iterable[Held]) -> Members:
        """Summed."""
        held = tuple(held)
        return Members(held, sum(h.allocated for h in held), sum(h.box.numel for h in held), held[0].expert)


Bucket = list[Members]
Grouped = tuple[Bucket, Bucket]  # of a unit: what has a bucket by itself, and the rest


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank.

    Attributes:
        parameters: whole and master, between steps (`HeldParameters.bytes`).
        gradients: likewise.
        optimizer: of its states (`Rule.bytes`).
        gathered: ZeRO-3: of whole parameters at the worst time: a unit and those gathered ahead, or all.
        whole_gradients: ZeRO-2 and 3: of whole gradients at the worst time, two neighbouring buckets.
        elements: parameters that are here, padding left out.
        experts: of these, those of experts.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    whole_gradients: int
    elements: int
    experts: int = 0


def units_of(
    shape: ModelShape, layout: Layout, part: StagePart, tp_index: int = 0, ep_index: int = 0, etp_index: int = 0
) -> list[Unit]:
    """The parameters of a stage on one tensor-parallel rank, in forward order."""
    h, bias = shape.hidden, shape.family == "gpt"
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tp, group = layout.tp, min(layout.tp, shape.kv_heads)
    summed = "tp" if tp > 1 and layout.sequence_parallel else ""

    def whole(name: str, *size: int) -> Held:
        return Held(name, size, Box.whole(size), math.prod(size), summed, tp)

    def rows(name: str, *size: int, parts: int = tp, alone: bool = False) -> Held:
        copies, each = tp // parts, -(-size[0] // parts)
        start = min(tp_index // copies * each, size[0])
        box = Box((start, *(0 for _ in size[1:])), (min(each, size[0] - start), *size[1:]))
        partial = f"tp/{copies}" if copies > 1 else ""
        return Held(name, size, box, each * math.prod(size[1:]), partial, copies, alone)

    def columns(name: str, out: int, width: int) -> Held:
        part = width // tp
        return Held(name, (out, width), Box((0, tp_index * part), (out, part)), out * part)

    def norm(name: str) -> Iterator[Held]:
        yield whole(f"{name}.weight", h)
        if bias:
            yield whole(f"{name}.bias", h)

    def into(name: str, size: int, parts: int = tp) -> Iterator[Held]:  # column-parallel
        yield rows(f"{name}.weight", size, h, parts=parts)
        if bias:
            yield rows(f"{name}.bias", size, parts=parts)

    def out_of(name: str, size: int) -> Iterator[Held]:  # row-parallel
        yield columns(f"{name}.weight", h, size)
        if bias:
            yield whole(f"{name}.bias", h)

    def layer(i: int) -> Iterator[Held]:
        if shape.skips(i):
            width = shape.depths.predictor
            yield whole(f"layers.{i}.depth.router", h)
            yield whole(f"layers.{i}.depth.predictor_up", width, h)
            yield whole(f"layers.{i}.depth.predictor_down", width)
        yield from norm(f"layers.{i}.attention_norm")
        yield from into(f"layers.{i}.attention.q", q)
        yield from into(f"layers.{i}.attention.k", kv, group)
        yield from into(f"layers.{i}.attention.v", kv, group)
        yield from out_of(f"layers.{i}.attention.out", q)
        yield from norm(f"layers.{i}.mlp_norm")
        if not shape.sparse(i):
            yield from block(f"layers.{i}.mlp", shape.ffn)
            return
        experts, name = shape.experts, f"layers.{i}.mlp"
        for part in ("weight", "noise") if experts.gate == "noisy-top-k" else ("weight",):
            size = (experts.count, h)
            partial = "tp" if tp > 1 else ""  # each rank scores its own tokens
            yield Held(f"{name}.router.{part}", size, Box.whole(size), math.prod(size), partial, tp)
        count, width = experts.count // layout.ep, experts.ffn // layout.expert_tensor
        for part in ("up", "down") if bias else ("gate", "up", "down"):
            down = part == "down"
            size = (experts.count, h, experts.ffn) if down else (experts.count, experts.ffn, h)
            offset = (ep_index * count, 0, etp_index * width) if down else (ep_index * count, etp_index * width, 0)
            box = Box(offset, (count, h, width) if down else (count, width, h))
            yield Held(f"{name}.experts.{part}", size, box, box.numel, expert=True)
        if experts.shared:
            yield from block(f"{name}.shared", experts.shared * experts.ffn)

    def block(name: str, width: int) -> Iterator[Held]:
        for part in ("up",) if bias else ("gate", "up"):
            yield from into(f"{name}.{part}", width)
        yield from out_of(f"{name}.down", width)

    units = []
    if part.first:
        embed = [rows("embed.token.weight", shape.vocab, h, alone=part.shared)]
        units.append(embed + ([whole("embed.position.weight", shape.max_sequence, h)] if bias else []))
    units += [list(layer(i)) for i in part.layers]
    if part.last:
        last = list(norm("norm"))
        if not shape.tied:
            last.append(rows("head.weight", shape.vocab, h))
        elif part.shared:
            last.append(rows("embed.token.weight", shape.vocab, h, alone=True))
        units.append(last)
    return units


@lru_cache(maxsize=4096)
def _members(shape: ModelShape, splitting: tuple, part: StagePart, *index: int) -> list[Grouped]:
    """Of each unit, those that have a bucket by themselves, and the others; counted once for all stages of ZeRO."""
    layout = Layout.model_construct(**dict(zip(SPLITTING, splitting, strict=True)))
    found = []
    for unit in units_of(shape, layout, part, *index):
        together: dict[bool, list[Held]] = {}
        for held in unit:
            if not held.alone:
                together.setdefault(held.expert, []).append(held)
        found.append(([Members.of([held]) for held in unit if held.alone], [*map(Members.of, together.values())]))
    return found


def state_bytes(
    shape: ModelShape, layout: Layout, policy: Formats, optimizer: str, parts: Sequence[StagePart],
    *, tp_index: int = 0, shard_index: int = 0, expert_index: tuple[int, int, int] = (0, 0, 0),
) -> StateBytes:
    """What one rank holds.

    Args:
        optimizer: its name in the config.
        parts: the stages of the rank.
        tp_index: its place along tp; the last has the least of a vocabulary that does not divide.
        shard_index: which shard of the state it has, of `Layout.shards`.
        expert_index: its places along edp_shard, ep and etp.
    """
    alone = layout.sync != "all-reduce"  # relaxed: every replica for itself, and whole
    if alone:
        layout = layout.model_copy(update={"zero": 0})
    zero, index = layout.zero, 0 if alone else shard_index
    storage, compute, reduce = policy.storage.itemsize, policy.compute.itemsize, policy.reduce.itemsize
    parameters = gradients = elements = experts = gathered = whole_gradients = 0
    moments = _Moments(optimizer, policy.state.itemsize)
    for part in parts:
        units = _members(shape, tuple(getattr(layout, name) for name in SPLITTING), part, tp_index, *expert_index[1:])
        limit = 0 if zero == 3 else bucket_bytes(layout)
        sizes = []
        for bucket in _buckets(units, limit, reduce):
            shards = _shards(bucket, layout)
            chunk = _chunk(bucket, shards)
            sizes.append(shards * chunk)
            if zero < 3:
                shares = storage == compute
                parameters += shards * chunk * compute + (0 if shares else chunk * storage)
            else:
                parameters += chunk * storage
            gradients += (shards * chunk if zero < 2 else chunk) * reduce
            moments.add(bucket, chunk, expert_index[0] if bucket[0].expert else index)
            here = sum(members.elements for members in bucket)
            elements += here
            experts += here if bucket[0].expert else 0
        if zero >= 2:
            whole_gradients = max(whole_gradients, _neighbours(sizes, 2) * reduce)
        if zero == 3:
            at_once = 1 + layout.prefetch if layout.reshard_after_forward else len(units)
            gathered = max(gathered, _gathered(units, shape, part, layout, at_once) * compute)
    return StateBytes(parameters, gradients, moments.bytes, gathered, whole_gradients, elements, experts)


def _buckets(units: Iterable[Grouped], limit: float, itemsize: int) -> Iterator[Bucket]:
    """As `shoal.parallel.data` fills them; experts have their own."""
    filling: dict[bool, Bucket] = {}
    for alone, together in units:
        yield from ([members] for members in alone)
        for members in together:
            filling.setdefault(members.expert, []).append(members)
        for kind, bucket in list(filling.items()):
            if sum(members.allocated for members in bucket) * itemsize >= limit:
                yield filling.pop(kind)
    yield from filling.values()


def _sorted(bucket: Bucket) -> list[Held]:
    """As `shoal.parallel.bucket` does."""
    held = [held for members in bucket for held in members.held]
    return sorted(held, key=lambda held: (held.partial, held.copies, len(held.whole) > 1))


def _shards(bucket: Bucket, layout: Layout) -> int:
    """Ranks that a bucket is cut over."""
    return layout.expert_shape[2] if bucket[0].expert else layout.shards


def _chunk(bucket: Bucket, shards: int) -> int:
    """Elements of one shard of a bucket."""
    return -(-sum(members.allocated for members in bucket) // (shards * ALIGN)) * ALIGN


def bucket_bytes(layout: Layout) -> float:
    """The least bytes of a bucket of gradients; the default where that is yet to be measured."""
    given = layout.bucket_mb if isinstance(layout.bucket_mb, float) else Layout.model_fields["bucket_mb"].default
    return given * 2**20


def _neighbours(sizes: Sequence[int], count: int) -> int:
    """The most that neighbours have together."""
    return max((sum(sizes[i : i + count]) for i in range(max(1, len(sizes) - count + 1))), default=0)


def _gathered(units: Sequence[Grouped], shape: ModelShape, part: StagePart, layout: Layout, at_once: int) -> int:
    """Elements of the neighbouring units that are largest together; a head may be the embedding once more."""
    sizes = []
    for unit in units:
        buckets = [(bucket, _shards(bucket, layout)) for bucket in _buckets([unit], 0, 1)]
        sizes.append(sum(shards * _chunk(bucket, shards) for bucket, shards in buckets))
    if shape.tied and part.first and part.last and len(units) > 2:
        sizes[-1] += sizes[0]
    return min(sum(sizes), _neighbours(sizes, at_once))


class _Moments:
    """Counts the optimizer's states, bucket by bucket."""

    def __init__(self, optimizer: str, itemsize: int):
        self.optimizer, self.itemsize, self.bytes = optimizer, itemsize, 0
        self.factored: set[str] = set()  # matrices that were counted: two stages of a rank may have the same

    def add(self, bucket: Bucket, chunk: int, index: int) -> None:
        """Those of one rank's shard of a bucket."""
        elements = sum(members.elements for members in bucket)
        if self.optimizer in STATES and elements == sum(members.allocated for members in bucket):
            here = min(elements, (index + 1) * chunk) - min(elements, index * chunk)
            self.bytes += here * STATES[self.optimizer] * self.itemsize
            return
        start = 0
        for held in _sorted(bucket):
            first, stop = max(start, index * chunk) - start, min(start + held.box.numel, (index + 1) * chunk) - start
            elements = max(0, stop - first)
            if self.optimizer == "adafactor":
                self.bytes += self._factored(held, elements) * self.itemsize
            elif self.optimizer == "adam8bit" and math.prod(held.whole) >= SMALLEST:
                self.bytes += 2 * (elements + self.itemsize * _scales(held, first, stop) if elements else 0)
            else:
                self.bytes += elements * self._each(held) * self.itemsize
            start += held.allocated

    def _each(self, held: Held) -> int:
        if self.optimizer == "muon":
            return 1 if len(held.whole) == 2 and held.name.startswith("layers.") else 2
        return STATES.get(self.optimizer, 2)

    def _factored(self, held: Held, elements: int) -> int:
        """Adafactor: row and column sums of a matrix, whole on every holder; else a number for each element."""
        if len(held.whole) != 2:
            return elements
        known = held.name in self.factored
        self.factored.add(held.name)
        return 0 if known else sum(held.whole)


def _scales(held: Held, first: int, stop: int) -> int:
    """adam8bit: blocks, whole or cut, in some elements of a parameter."""
    count = 0
    for _, local in flat_range(held.box.shape, first, stop):
        box = local.within(held.box)
        left, right = box.offset[-1], box.offset[-1] + box.shape[-1]
        inner = min(right, -(-left // BLOCK) * BLOCK), max(left, right // BLOCK * BLOCK)
        blocks = sum(-(-b // BLOCK) - a // BLOCK for a, b in pairwise(sorted({left, *inner, right})))
        count += math.prod(box.shape[:-1]) * blocks
    return count


def zero_bytes(
    parameters: float, ranks: int, stage: int, *, weights: int = 2, gradients: int = 2, rest: int = 12
) -> float:
    """Bytes per rank of ZeRO, in the paper's accounting (Rajbhandari et al. 2020, section 5; K = ``rest`` = 12).

    >>> [zero_bytes(7.5e9, 64, stage) / 1e9 for stage in (0, 1, 2, 3)]
    [120.0, 31.40625, 16.640625, 1.875]
    """
    shared = [rest, gradients, weights][:stage]
    kept = [rest, gradients, weights][stage:]
    return parameters * (sum(kept) + sum(shared) / ranks)
