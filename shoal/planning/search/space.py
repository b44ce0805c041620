"""Search space: every layout of a cluster that a run could use, level by level.

`layouts` enumerates all of them; the search visits the same levels and prunes layouts that cannot be among the best.
Excluded choices, left to the user: asynchronous schedules and relaxed synchronisation, which change the computation;
zb-auto, terapipe and schedules from files; offloading; 2D tensor parallelism (tp_x); the token order of the ring
(cp_order); overlap and tp_overlap; bucket_mb and prefetch, which hardly affect the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from math import ceil
from typing import Any

from shoal.base.errors import UsageError, divisors
from shoal.base.section import validate
from shoal.pipeline.partition import balance_layers, measure_head
from shoal.pipeline.schedules import SCHEDULES
from shoal.planning.estimable import check_trained
from shoal.planning.run import EstimatedRun
from shoal.spec.catalog import ModelShape
from shoal.spec.layout import Layout
from shoal.spec.schedules import PAIRED

SEARCHED = (
    "1f1b", "interleaved-1f1b", "gpipe", "looped-bfs", "zb-h1", "zb-h2", "interleaved-zb", "zb-v", "v-half", "v-min",
    "dualpipe", "dualpipev",
)  # fmt: skip
Fields = dict[str, Any]  # some fields of a layout
PLAIN = Layout()


@dataclass(frozen=True)
class LayoutSpace:
    """Choices of the search."""

    # pipeline schedules; a single stage accumulates gradients with the first of them
    schedules: tuple[str, ...] = SEARCHED
    most_virtual: int = 8  # maximum stages on each rank, for schedules that leave it open
    least_tokens: int = 4096  # minimum tokens of a sequence per context-parallel rank; limits the number of these ranks
    uneven: bool = True  # stages may have uneven layers, see `splits`
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fixed fields of the layout

    def allows(self, name: str, value: Any, default: Any = None) -> bool:
        """Return whether a field may have a value; None means ``default``."""
        if name not in self.fixed:
            return True
        given = self.fixed[name]
        return (default if given is None else given) == (default if value is None else value)

    @property
    def unpaired(self) -> bool | str:
        """`Layout.ep_overlap` of layouts that pair no micro-batches, in which it changes nothing."""
        return False if self.fixed.get("ep_overlap") is False else PLAIN.ep_overlap

    def among(self, name: str, values: Sequence[Any]) -> list[Any]:
        """Return the values of a field to try, including the fixed one."""
        given = self.fixed.get(name)
        return list(values) if given is None or given in values else [*values, given]


def layouts(run: EstimatedRun, space: LayoutSpace) -> Iterator[Layout]:
    """Yield every layout of the space that the run's model, batch and cluster allow."""
    for degrees in meshes(run, space):
        for work in works(run, degrees, space):
            microbatches = run.global_batch // (degrees["dp"] * work["micro_batch"])
            hides = degrees["ep"] > 1 and run.cluster.at_once is None  # see `StagePrices.hides_rows`
            for pipe in pipelines(degrees["pp"], microbatches, run.shape.layers, space, apart=hides):
                for split in splits(run.shape, degrees["pp"], pipeline_depth(degrees["pp"], pipe), space):
                    for shards in shardings(degrees, space):
                        yield build_layout(space, degrees, work, pipe, split, shards)


def build_layout(space: LayoutSpace, *levels: Fields) -> Layout:
    """Build a layout from a choice on each level; other fields are fixed or have their default."""
    values = {name: value for name, value in space.fixed.items() if name in OTHERS}
    for level in levels:
        values |= level
    return PLAIN.model_copy(update=values)  # several times faster than constructing one; skips validation


LEVELS = (
    "dp", "tp", "cp", "ulysses", "ep", "etp", "pp", "sequence_parallel", "recompute", "micro_batch", "schedule",
    "virtual_stages", "ep_overlap", "stage_layers", "zero", "zero_shard", "reshard_after_forward",
)  # fmt: skip
OTHERS = tuple(name for name in Layout.model_fields if name not in LEVELS)


# ---- the levels ------------------------------------------------------------------------------------------------------


def meshes(run: EstimatedRun, space: LayoutSpace) -> Iterator[Fields]:
    """Yield the parallel degrees that fill the cluster."""
    ranks = run.cluster.size
    most_cp = max(1, run.sequence_length // space.least_tokens, space.fixed.get("cp", 1))
    for tp, pp, cp in product(divisors(ranks), divisors(ranks), [n for n in divisors(ranks) if n <= most_cp]):
        if ranks % (tp * pp * cp):
            continue
        for ulysses, (ep, etp) in product(divisors(cp), _experts(run.shape, tp, space)):
            degrees: Fields = {
                "dp": ranks // (tp * pp * cp), "tp": tp, "cp": cp, "ulysses": ulysses, "ep": ep, "etp": etp, "pp": pp
            }
            allowed = all(space.allows(name, value, tp if name == "etp" else None) for name, value in degrees.items())
            if allowed and shardings(degrees, space) and fits(run, Layout(**degrees)):
                yield degrees


def _experts(shape: ModelShape, tp: int, space: LayoutSpace) -> list[tuple[int, int | None]]:
    """Return choices of (ranks that experts are spread over, ranks that split each: None as other matrices, or 1)."""
    if shape.experts is None:
        return [(1, None)]
    split = [etp for etp in space.among("etp", (None, 1)) if etp != tp]
    return list(product(divisors(shape.experts.count), split))


def works(run: EstimatedRun, degrees: Fields, space: LayoutSpace) -> Iterator[Fields]:
    """Yield the micro-batches, and what is recomputed in each."""
    split = [value for value in (False, True) if fits(run, Layout(**degrees, sequence_parallel=value))]
    for micro_batch in divisors(run.global_batch // degrees["dp"]):
        for sequence_parallel, recompute in product(split, ("none", "selective", "full")):
            work = {
                "micro_batch": micro_batch, "sequence_parallel": sequence_parallel, "recompute": recompute
            }
            if all(space.allows(*item) for item in work.items()):
                yield work


def pipelines(
    pp: int, microbatches: int, layers: int, space: LayoutSpace, *, apart: bool = False
) -> Iterator[Fields]:
    """Yield the schedules, with stages per rank for schedules that leave it open (one stage is another schedule's).

    Args:
        apart: yield paired micro-batches one after the other, too: the next rank waits for both of a pair.
    """
    names = [name for name in space.schedules if space.allows("schedule", name)]
    for name in names[:1] if pp == 1 else names:
        schedule = SCHEDULES[name]
        choices: list[tuple[int | None, int]]  # (layout field, stages per rank)
        if schedule.virtual is None:
            choices = [(each, each) for each in space.among("virtual_stages", range(2, space.most_virtual + 1))]
        else:
            choices = [(None, schedule.virtual)]
        for virtual, each in choices:
            pipe: Fields = {"schedule": name, "virtual_stages": virtual}
            if pipeline_depth(pp, pipe) > layers or not space.allows("virtual_stages", virtual):
                continue
            if not schedule.refuses(pp, microbatches, each):
                pairs = apart and name in PAIRED
                values = space.among("ep_overlap", ("auto", False)) if pairs else (space.unpaired,)
                yield from (pipe | {"ep_overlap": each} for each in values if space.allows("ep_overlap", each))


def splits(shape: ModelShape, pp: int, depth: int, space: LayoutSpace) -> tuple[Fields, ...]:
    """Return the splits of layers into stages: even, and with fewer layers on the last or on the first and last stage.

    The reduction ranges from none to the size of the head's (and the embedding's) matrix in layers, rounded up. In
    time, the head weighs that much, or less if layers do more than their products (recomputation, attention,
    communication). In memory both the head and the embedding weigh that much, and the first stage also keeps most
    micro-batches alive.

    If a rank has several stages, these have few layers each, and stay even.
    """
    if given := space.fixed.get("stage_layers"):
        return ({"stage_layers": given},) if (len(given), sum(given)) == (depth, shape.layers) else ()
    if "stage_layers" in space.fixed or not space.uneven or depth != pp or pp == 1:
        return ({"stage_layers": None},)
    even = tuple(len(part) for part in balance_layers(shape, depth))
    return _splits(even, ceil(measure_head(shape)))


@cache
def _splits(even: tuple[int, ...], most: int) -> tuple[Fields, ...]:
    besides = [(first, last) for last in range(most + 1) for first in sorted({0, last})]
    found = dict.fromkeys(_balanced(sum(even), len(even), *both) for both in besides)
    return tuple({"stage_layers": sizes} for sizes in (None, *(sizes for sizes in found if sizes != even)))


def _balanced(layers: int, stages: int, first: int, last: int) -> tuple[int, ...]:
    """Balance layers over stages if the first and the last also have work worth ``first`` and ``last`` layers.

    Stages have equal work, up to one layer more on later ones, which keep fewer micro-batches alive.

    >>> _balanced(32, 4, 0, 3)
    (8, 9, 9, 6)
    >>> _balanced(32, 4, 3, 3)
    (6, 9, 10, 7)
    """
    begin = min(max(1, (layers + first + last) // stages - first), layers - stages + 1)
    rest = layers - begin
    end = max(1, -(-(rest + last) // (stages - 1)) - last)
    each, more = divmod(rest - end, stages - 2) if stages > 2 else (0, 0)
    return (begin, *[each] * (stages - 2 - more), *[each + 1] * more, end)


def shardings(degrees: Fields, space: LayoutSpace) -> tuple[Fields, ...]:
    """Return the shardings of state over replicas and their context-parallel ranks: ZeRO stages and sizes."""
    dp = degrees["dp"]
    # A field that sets the number of shards, or when to reshard, implies sharding.
    shared = space.fixed.get("zero_shard") or not space.fixed.get("reshard_after_forward", True)
    found: list[Fields] = [] if shared else [{"zero": 0}]
    for zero, shard in product((1, 2, 3), [n for n in divisors(dp) if n * degrees["cp"] > 1]):
        for reshard in (True, False) if zero == 3 else (True,):
            found.append({
                "zero": zero, "zero_shard": None if shard == dp else shard, "reshard_after_forward": reshard
            })
    return tuple(f for f in found if all(space.allows(*item, dp) for item in f.items()))


def pipeline_depth(pp: int, pipe: Fields) -> int:
    """Return the number of stages that a micro-batch passes through."""
    schedule = SCHEDULES[pipe["schedule"]]
    return pp * (schedule.virtual or pipe["virtual_stages"]) // schedule.model_copies


def fits(run: EstimatedRun, layout: Layout) -> bool:
    """Return whether `shoal train` accepts a layout, of other software in 16 bits: it has products that shoal lacks."""
    if run.software.name != "shoal":
        run = replace(run, precision=run.cluster.accelerator.half)
    try:
        check_trained(run, layout)
    except UsageError:
        return False
    return True


# ---- fixed fields ----------------------------------------------------------------------------------------------------


def check_fixed(fields: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with their types.

    Args:
        fields: names and values, or text such as ``tp=8,recompute=full``.

    Raises:
        UsageError: an unknown field, a field that is not searched, or an invalid value.

    >>> check_fixed("tp=8,sequence-parallel=true,stage_layers=7/9")
    {'tp': 8, 'sequence_parallel': True, 'stage_layers': (7, 9)}
    """
    values = _parse(fields) if isinstance(fields, str) else dict(fields)
    layout = validate(Layout, values, source="--fix")
    if unknown := [name for name in values if name not in LEVELS]:
        raise UsageError(f"--fix {unknown[0]}: it is not searched; allowed: {', '.join(LEVELS)}")
    given = {name: getattr(layout, name) for name in values}
    if given.get("schedule", SEARCHED[0]) not in SEARCHED:
        raise UsageError(f"--fix schedule={given['schedule']}: it is not searched; allowed: {', '.join(SEARCHED)}")
    return given


def _parse(text: str) -> dict[str, Any]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if bad := [name for name, equals, value in pairs if not equals or not value]:
        raise UsageError(f"--fix {text}: write fields and values, as tp=8; {bad[0]} has none")
    return {name.strip().replace("-", "_"): _parse_value(value.strip()) for name, _, value in pairs}


def _parse_value(text: str) -> int | bool | str | list[int]:
    """Parse a number, numbers between slashes, or a truth value; otherwise return the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    parts = text.split("/")
    if len(parts) > 1:
        if not all(part.isdecimal() for part in parts):
            raise UsageError(f"--fix {text}: write the layers of all stages, as stage_layers=7/9")
        return [int(part) for part in parts]
    return int(text) if text.isdecimal() else text
