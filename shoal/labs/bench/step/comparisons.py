"""The races of `shoal bench step`: shoal's layouts beside torch's implementations, with targets.

Variants have 2 ranks of 1 thread each, or one process of 2 threads (or the given number). Both sides have the same
allocator settings and, by default, the same library of matrix products. The exception is ``single``, whose reference is
a usual training loop with the system's allocator and torch's library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shoal.labs.bench.kernels import multiply
from shoal.labs.bench.race import Race, Variant
from shoal.labs.bench.step.torch_baselines import MICROBATCHES, SCHEDULES, ddp, dtensor, fsdp, pipeline, plain, threaded
from shoal.labs.bench.step.workload import BenchPrecision, MatmulWorkload, Workload, shoal_step
from shoal.spec.sync_methods import COMPRESSED

LINK_GBS = 0.1  # network on which the gradients of the default workload take more than a quarter of its step
TENSOR_GBS = 0.2  # the same for activations
SLOW_GBS = 0.02  # network on which gradients take longer than the rest of the step
DEVICE_SECONDS = 0.004  # forward of each layer, during which the cores are free
PEAK_SHARES: dict[BenchPrecision, float] = {"fp32": 0.77, "bf16": 0.60}  # share of the peak that compiled steps reach
FEW_TOKENS = 512  # tokens of a small step, in which overhead weighs more
FASTEST = ("interleaved-1f1b", "zb-v", "dualpipev", "dualpipe")  # shoal's schedules in "pp best"


@dataclass(frozen=True)
class VariantFactory:
    """Builds variants of one workload.

    Attributes:
        ranks: number of ranks, or of threads, of each variant.
        products: whether torch's variants use shoal's library of matrix products, or torch's default.
    """

    workload: Workload
    ranks: int
    products: bool

    def shoal(self, name: str, **options: Any) -> Variant:
        """Return shoal on all ranks, with options of `build_engine`."""
        return Variant(f"shoal{name}", partial(shoal_step, **options), self.workload, self.ranks)

    def torch(self, name: str, build: Callable[..., Any], **options: Any) -> Variant:
        """Return one of torch's implementations on all ranks."""
        return Variant(name, partial(build, **options), self.workload, self.ranks, products=self.products)

    def bound(self, **options: Any) -> Variant:
        """Return processes that exchange nothing: no data parallelism that updates unsharded weights is faster."""
        return Variant("independent processes", partial(plain, **options), self.workload, self.ranks)

    def threads(self, name: str, build: Callable[..., Any], **options: Any) -> Variant:
        """Return one process with several threads, and options of `Variant`."""
        return Variant(name, build, self.workload, threads=self.ranks, **options)


def build_races(workload: Workload, ranks: int = 2, *, products: bool = True) -> list[Race]:
    """Return all races over one workload, with the arguments of `VariantFactory`."""
    make = VariantFactory(workload, ranks, products)
    return [*_data_parallel(make), *_overlap(make), *_tensor_parallel(make), *_pipelines(make), *_one_process(make)]


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
