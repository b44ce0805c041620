"""`shoal bench step`: races of shoal's layouts against torch's implementations, with targets.

Variants have 2 ranks of 1 thread each, or one process of 2 threads (or the given number). Both sides have the same
allocator settings and, by default, the same library of matrix products. The exception is ``single``, whose reference is
a usual training loop with the system's allocator and torch's library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveInt
from rich.console import Console
from rich.text import Text

from shoal.base.errors import UsageError
from shoal.base.files import check_writable
from shoal.base.options import reject_unused
from shoal.engine.device import allocator_environment
from shoal.labs.bench.benchmark import Benchmark, Notify, Row, all_met, choose_names, make_table, write_records
from shoal.labs.bench.kernels import multiply
from shoal.labs.bench.race import Race, RaceError, Variant, run_race
from shoal.labs.bench.step.own_races import LIBRARIES, own_ddp, own_dtensor, own_fsdp, own_step
from shoal.labs.bench.step.torch_baselines import MICROBATCHES, SCHEDULES, ddp, dtensor, fsdp, pipeline, plain, threaded
from shoal.labs.bench.step.workload import BenchPrecision, MatmulWorkload, Workload, make_layout, shoal_step
from shoal.spec.layout import Layout
from shoal.spec.sync_methods import COMPRESSED

SHARED = ("dp", "zero", "fsdp", "threads", "overlap-network", "compression-network", "ep-overlap", "pp", "own")
"""Races whose ranks or micro-batches share the sequences of a step evenly."""


class StepBenchmark(Benchmark):
    """Training steps of shoal and of torch's own implementations, in turns; exit code 1 if a target is missed or a race
    fails."""

    only: str = ""
    """Comma-separated list of races: dp, zero, fsdp, threads, overlap, overlap-device, overlap-network,
    compression-network, tp, tp-overlap, tp-overlap-network, ep-overlap, pp, own, single, compile; or one race of a
    kind, such as "pp zb-v" or "own fsdp"."""

    turns: PositiveInt = 10
    """Turns of each variant; medians over all turns are compared."""

    steps: PositiveInt = 3
    """Steps in a turn."""

    sequences: PositiveInt = 8
    """Sequences of 256 tokens in a step, over all ranks: a multiple of the ranks, and of 8 for pp."""

    ranks: PositiveInt = 2
    """Ranks of one thread (in single and compile: threads)."""

    products: Literal["equal", "torch"] = "equal"
    """Library of matrix products of torch's variants: shoal's choice, so that only the parallelism differs; or torch's
    default."""

    quick: bool = False
    """2 turns of 1 step: checks that everything runs and computes the same losses; proves nothing about speed."""

    out: Path | None = None
    """Also write the table to this file, .csv or .json."""

    def run(self, console: Console, notify: Notify) -> bool:
        if self.quick:
            reject_unused(self, ("turns", "steps"), "--quick takes 2 turns of 1 step")
        check_writable(self.out, "bench step --out", ".csv", ".json", new=True)
        races = self.choose_races()
        turns, steps = (2, 1) if self.quick else (self.turns, self.steps)
        rows: list[Row] = []
        failed = False
        try:
            for race in races:
                try:
                    found = run_race(race, turns, steps, warmup=2, notify=notify)
                except RaceError as error:
                    failed = True
                    console.print(Text(f"{race.name} failed: {error}"))
                    print(*getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
                    continue
                rows += found
                for row in found:
                    if row["target"] is not None:
                        console.print(Text("{race}: {variant} at {ratio:.2f} of {target:.2f}".format(**row)))
        finally:  # the finished races also after an error or Ctrl-C
            if rows:
                _print_table(rows, console)
                if self.products == "torch":
                    console.print("Torch's variants use torch's default library of matrix products.")
                if self.out:
                    write_records(rows, self.out)
        return not failed and (self.quick or all_met(rows))

    def choose_races(self) -> list[Race]:
        """Return the requested races.

        Raises:
            UsageError: a race is unknown, the ranks cannot share the work, or the environment configures the allocator.
        """
        every = {race.name: race for race in build_races(
            Workload(sequences=self.sequences), self.ranks, products=self.products == "equal"
        )}  # fmt: skip
        kinds = dict.fromkeys(name.split()[0] for name in every)
        names = choose_names(self.only, [*kinds, *every], "bench step --only")
        if find_spec("transformers") is None:
            if any(name.split()[0] == "own" for name in names) and self.only:
                raise UsageError("bench step --only own needs a Llama: pip install transformers.")
            every = {name: race for name, race in every.items() if not name.startswith("own ")}
        # one side of a comparison uses the allocator's defaults
        present = [name for name in (*allocator_environment(), "GLIBC_TUNABLES", "LD_PRELOAD") if os.environ.get(name)]
        if present:
            raise UsageError(f"the environment configures the allocator of every variant: unset {', '.join(present)}.")
        if self.ranks < 2:
            raise UsageError(f"bench step --ranks {self.ranks}: parallelism needs 2 or more.")
        races = [race for name, race in every.items() if name in names or name.split()[0] in names]
        for race in races:
            self.check_work(race)
        return races

    def check_work(self, race: Race) -> None:
        """Reject sequences that the ranks of a race cannot share evenly, and layouts that the model does not allow."""
        parts = MICROBATCHES if race.name.startswith("pp ") else self.ranks
        if self.sequences % parts and race.name.split()[0] in SHARED:
            raise UsageError(
                f"bench step --sequences {self.sequences}: {race.name} needs a multiple of {parts}."
                f"\n  Use {-(-self.sequences // parts) * parts}, or choose other races with --only."
            )
        for variant in race.variants:
            build, work = variant.build, variant.workload
            if isinstance(build, partial) and build.func is shoal_step and isinstance(work, Workload):
                fields = build.keywords.keys() & Layout.model_fields
                try:
                    make_layout(work, variant.ranks, **{field: build.keywords[field] for field in fields})
                except UsageError as error:
                    raise UsageError(f"bench step, {race.name}: {error}") from None


def _print_table(rows: Sequence[Row], console: Console) -> None:
    console.print(make_table("one training step: shoal beside torch", [
        {
            "race": row["race"], "variant": row["variant"], "ms": f"{row['seconds'] * 1e3:.1f}",
            "CPU ms": f"{row['cpu_seconds'] * 1e3:.1f}", "tokens/s": round(row["tokens_per_second"]),
            "MB": round(row["memory"] / 1e6), "ratio": f"{row['ratio']:.2f}",
            "quartiles": f"{row['spread_low']:.2f}-{row['spread_high']:.2f}",
            "target": "" if row["target"] is None else f"{row['target']:.2f}", "met": row["met"],
        } for row in rows
    ], above="race"))  # fmt: skip


LINK_GBS = 0.1  # network on which the gradients of the default workload take more than a quarter of its step
TENSOR_GBS = 0.2  # the same for activations
EXPERT_GBS = 0.02  # network on which rows of 32 tokens take less time than a layer's forward on the emulated device
SLOW_GBS = 0.02  # network on which gradients take longer than the rest of the step
DEVICE_SECONDS = 0.004  # forward of each layer, during which the cores are free
PEAK_SHARES: dict[BenchPrecision, float] = {"fp32": 0.77, "bf16": 0.60}  # share of the peak that compiled steps reach
FEW_TOKENS = 512  # tokens of a small step, in which overhead weighs more
FASTEST = ("interleaved-1f1b", "zb-v", "dualpipev", "dualpipe")  # shoal's schedules in "pp best"


@dataclass(frozen=True)
class VariantFactory:
    """Builds variants of one workload, each with as many ranks or threads. With `products` torch's variants use shoal's
    library of matrix products, otherwise torch's default."""

    workload: Workload
    ranks: int
    products: bool

    def shoal(self, name: str, **options: Any) -> Variant:
        """Return shoal on all ranks, with options of `build_engine`."""
        return Variant(f"shoal{name}", partial(shoal_step, **options), self.workload, self.ranks)

    def torch(self, name: str, build: Callable[..., Any], **options: Any) -> Variant:
        return Variant(name, partial(build, **options), self.workload, self.ranks, products=self.products)

    def bound(self, **options: Any) -> Variant:
        """Return processes that exchange nothing: no data parallelism that updates unsharded weights is faster."""
        return Variant("independent processes", partial(plain, **options), self.workload, self.ranks)

    def threads(self, name: str, build: Callable[..., Any], **options: Any) -> Variant:
        return Variant(name, build, self.workload, threads=self.ranks, **options)


def build_races(workload: Workload, ranks: int = 2, *, products: bool = True) -> list[Race]:
    """Return all races over one workload, with the arguments of `VariantFactory`."""
    make = VariantFactory(workload, ranks, products)
    return [
        *_data_parallel(make), *_overlap(make), *_tensor_parallel(make), *_experts(make), *_pipelines(make),
        *_own_models(make), *_one_process(make),
    ]  # fmt: skip


def _data_parallel(make: VariantFactory) -> list[Race]:
    ranks, reference = make.ranks, tuple(make.torch(f"DDP, buckets of {mb} MB", ddp, bucket_mb=mb) for mb in (8, 64))
    replicated, sharded = (make.shoal(f" zero {zero}", dp=ranks, zero=zero, bucket_mb=8) for zero in (0, 1))
    target = 1.2 if make.workload.tokens <= FEW_TOKENS else 1.05
    gathered = (
        make.shoal(" zero 2", dp=ranks, zero=2, bucket_mb=8),
        make.shoal(" zero 3, kept", dp=ranks, zero=3, reshard_after_forward=False),
    )
    kept = make.torch("FSDP2, kept after forward", fsdp, reshard=False)
    process = make.threads(
        f"one process, {ranks} replicas", partial(threaded, replicas=ranks), products=make.products
    )
    return [
        Race("dp", (sharded,), reference, target, also=(replicated,), bounds=(make.bound(),)),
        Race("dp independent", (sharded,), (make.bound(),), target=0.97, tolerance=None),
        Race("zero 0", (replicated,), reference, target=1.0),
        Race("fsdp", (make.shoal(" zero 3", dp=ranks, zero=3),), (make.torch("FSDP2 fully_shard", fsdp),), target=1.1),
        Race("zero 2", gathered, (kept,), target=1.0),
        Race("threads", (replicated,), (process,), target=1.0, also=reference[:1]),
    ]


def _overlap(make: VariantFactory) -> list[Race]:
    """Overlapped communication against the same communication after backward.

    Over sockets, on so few tokens that communication weighs, also with layers that leave the cores free; and over a
    simulated network, whose transfers use no core. On a slow network compressed gradients race against exact ones;
    their losses differ by design.
    """
    few = replace(make.workload, sequence_length=32, sequences=make.ranks)
    on_few, data = replace(make, workload=few), {"dp": make.ranks, "bucket_mb": 4}
    races = []
    for name, seconds in (("overlap", 0.0), ("overlap-device", DEVICE_SECONDS)):
        device = {"device_seconds": seconds}
        options = {**data, **device, "transport": "backend"}
        races.append(Race(
            name, (on_few.shoal(" zero 0", **options),),
            (on_few.shoal(", reduced after backward", **options, overlap=False),), target=1 / 0.9,
            also=(on_few.torch("DDP, buckets of 4 MB", ddp, bucket_mb=4, **device),), bounds=(on_few.bound(**device),),
        ))  # fmt: skip
    return [
        *races,
        Race(
            "overlap-network", (make.shoal(" zero 0", **data, link_gbs=LINK_GBS),),
            (make.shoal(", reduced after backward", **data, link_gbs=LINK_GBS, overlap=False),), target=1 / 0.9,
            also=(make.shoal(", through memory alone", **data),),
        ),
        Race(
            "compression-network",
            tuple(make.shoal(f" {sync}", **data, link_gbs=SLOW_GBS, sync=sync) for sync in COMPRESSED),
            (make.shoal(" all-reduce, with overlap", **data, link_gbs=SLOW_GBS),), target=1.0,
            also=(make.shoal(" all-reduce, after backward", **data, link_gbs=SLOW_GBS, overlap=False),),
            tolerance=None,
        ),
    ]  # fmt: skip


def _tensor_parallel(make: VariantFactory) -> list[Race]:
    """Tensor parallelism against torch's; and overlapped collectives and products against sequential ones."""
    references = tuple(
        make.torch(f"DTensor, {name}", dtensor, prepared=prepared)
        for name, prepared in (("projections alone", False), ("inputs prepared", True))
    )
    target = 1.6 if make.ranks > 2 else 1.9 if make.workload.tokens <= FEW_TOKENS else 1.4
    races = [Race("tp", (make.shoal(" tp", tp=make.ranks),), references, target)]
    for name, gbs in (("tp-overlap", 0.0), ("tp-overlap-network", TENSOR_GBS)):
        for way in ("all-reduce", "ring"):
            options = {"tp": make.ranks, "sequence_parallel": way == "ring", "link_gbs": gbs}
            races.append(Race(
                f"{name} {way}", (make.shoal(", part by part", **options, tp_overlap=True),),
                (make.shoal(", one after the other", **options, tp_overlap=False),), target=1.0,
            ))  # fmt: skip
    return races


def _experts(make: VariantFactory) -> list[Race]:
    """Pairs of micro-batches that hide each other's exchanges of rows, against the same one after the other.

    On the network, layers leave the cores free, and short sequences send more bytes of rows than of gradients.
    """
    work = replace(make.workload, experts=4 * make.ranks)
    many = replace(work, sequence_length=32, sequences=8 * work.sequences)
    ways: dict[str, tuple[Workload, dict[str, Any]]] = {
        "memory": (work, {}), "sockets": (work, {"transport": "backend"}),
        "network": (many, {"link_gbs": EXPERT_GBS, "device_seconds": DEVICE_SECONDS}),
    }  # fmt: skip
    races = []
    for way, (workload, options) in ways.items():
        routed = replace(make, workload=workload)
        options |= {"dp": make.ranks, "ep": make.ranks, "schedule": "dualpipev", "micro_batch": 1}
        races.append(Race(
            f"ep-overlap {way}", (routed.shoal(", in turns", **options, ep_overlap=True),),
            (routed.shoal(", one after the other", **options, ep_overlap=False),), target=1.0,
        ))  # fmt: skip
    return races


def _pipelines(make: VariantFactory) -> list[Race]:
    micro_batch = make.workload.sequences // MICROBATCHES
    process = make.threads(f"one process of {make.ranks} threads", shoal_step)
    ours = {
        name: make.shoal(f" {name}", pp=make.ranks, micro_batch=micro_batch, schedule=name)
        for name in dict.fromkeys([*FASTEST, *SCHEDULES])
    }
    theirs = {name: make.torch(f"torch {schedule}", pipeline, schedule=schedule)
              for name, schedule in SCHEDULES.items()}
    fastest = tuple(ours[name] for name in FASTEST)
    return [
        Race("pp best", fastest, tuple(theirs.values()), target=1.1, fastest=True),
        Race("pp one-process", fastest, (process,), target=0.93, fastest=True),
        *(Race(f"pp {name}", (ours[name],), (theirs[name],), target=1.0, also=(process,)) for name in SCHEDULES),
    ]


def _own_models(make: VariantFactory) -> list[Race]:
    """transformers' Llama as a model of one's own."""
    ranks, mb = make.ranks, 8

    def shoal(name: str, **layout: Any) -> Variant:
        return Variant(f"shoal {name}", partial(own_step, **layout), make.workload, ranks)

    replicated = make.torch(f"DDP, buckets of {mb} MB", own_ddp, bucket_mb=mb)
    others = tuple(make.torch(name, build) for name, build in LIBRARIES.items())
    return [
        Race("own dp", tuple(shoal(f"zero {zero}", dp=ranks, zero=zero, bucket_mb=mb) for zero in (0, 1)),
             (replicated, *others), target=1.0, fastest=True),
        Race("own fsdp", (shoal("zero 3", dp=ranks, zero=3),), (make.torch("FSDP2 fully_shard", own_fsdp),), 1.0),
        Race("own tp", (shoal("tp", tp=ranks),), (make.torch("DTensor", own_dtensor),), target=1.0),
    ]


def _one_process(make: VariantFactory) -> list[Race]:
    """One process against a plain loop; and ``compile = true`` against the peak of the same threads."""
    loop = partial(plain, kernel="sdpa")
    system = make.threads("plain loop, system allocator", loop, tuned=False)
    tuned = make.threads("plain loop, tuned allocator", loop, products=make.products)
    races = [Race("single", (make.threads("shoal", shoal_step),), (system,), target=1.2, also=(tuned,))]
    for precision, share in PEAK_SHARES.items():
        work, peak = replace(make.workload, precision=precision), MatmulWorkload(precision=precision)
        compiled = replace(make, workload=work).threads("shoal, compiled", partial(shoal_step, compile=True))
        matmul = Variant(f"product of {peak.side} x {peak.side}", multiply, peak, threads=make.ranks)
        races.append(Race(f"compile {precision}", (compiled,), (matmul,), target=share, tolerance=None))
    return races
