"""The races of `shoal bench step`: which of shoal's layouts runs against what of torch, and what it must reach.

2 ranks of 1 thread each, or one process of 2 threads (or as many as asked for); the same allocator setting and, unless
asked otherwise, the same library of products on both sides, except in ``single``, which compares with a loop as people
write it, on those as the system and torch set them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shoal.labs.bench.contender import Contender
from shoal.labs.bench.peak import MatmulWorkload, product
from shoal.labs.bench.race import Race
from shoal.labs.bench.step.shoal_engine import engine
from shoal.labs.bench.step.torch_baselines import ddp, dtensor, fsdp, independent, plain, threaded
from shoal.labs.bench.step.torch_pipelining import MICROBATCHES, SCHEDULES, pipeline
from shoal.labs.bench.step.workload import BenchPrecision, Workload
from shoal.spec.sync_methods import COMPRESSED

LINK_GBS = 0.1  # with which the gradients of the default workload take more than a quarter of its step
TENSOR_GBS = 0.2  # and the activations
SLOW_GBS = 0.02  # with which they take longer than all else of it
DEVICE_SECONDS = 0.004  # of each layer's forward, in which the cores are free
PEAK_SHARES: dict[BenchPrecision, float] = {"fp32": 0.77, "bf16": 0.60}  # of the peak, in compiled steps
FEW_TOKENS = 512  # of a step, in which what is not computing weighs more
FASTEST = ("interleaved-1f1b", "zb-v", "dualpipev", "dualpipe")  # of ours, one of which takes on all of torch's


@dataclass(frozen=True)
class ContenderFactory:
    """Makes contenders of one workload.

    Attributes:
        ranks: of each contender, or its threads.
        products: whether torch's contenders have the library of products that shoal's have, or the one of torch.
    """

    workload: Workload
    ranks: int
    products: bool

    def shoal(self, name: str, **how: Any) -> Contender:
        """Shoal's engine on so many ranks, as `shoal.labs.bench.step.shoal_engine.build` takes it."""
        return Contender(f"shoal{name}", partial(engine, **how), self.workload, self.ranks)

    def torch(self, name: str, build: Callable[..., Any], **how: Any) -> Contender:
        """One of torch's ways on so many ranks."""
        return Contender(name, partial(build, **how), self.workload, self.ranks, products=self.products)

    def bound(self, **how: Any) -> Contender:
        """Processes that exchange nothing."""
        return Contender("independent processes", partial(independent, **how), self.workload, self.ranks)

    def threads(self, name: str, build: Callable[..., Any], **how: Any) -> Contender:
        """One process with so many threads."""
        return Contender(name, build, self.workload, threads=self.ranks, **how)


def races(workload: Workload, ranks: int = 2, *, products: bool = True) -> list[Race]:
    """All races over one workload, on so many ranks or threads.

    Args:
        products: as of `ContenderFactory`.
    """
    make = ContenderFactory(workload, ranks, products)
    return [*_data_parallel(make), *_overlap(make), *_tensor_parallel(make), *_pipelines(make), *_one_process(make)]


def _data_parallel(make: ContenderFactory) -> list[Race]:
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


def _overlap(make: ContenderFactory) -> list[Race]:
    """Communication that is hidden behind the backward, against the same after it.

    Over sockets on so few tokens that communication weighs, also with layers that leave the cores free; and between
    ranks that a network seems to join, whose bytes move while the cores compute. There compressed gradients race
    against exact ones, too; their losses differ, on purpose.
    """
    few = replace(make.workload, sequence_length=32, sequences=make.ranks)
    on_few, data = replace(make, workload=few), {"dp": make.ranks, "bucket_mb": 4}
    found = []
    for name, seconds in (("overlap", 0.0), ("overlap-device", DEVICE_SECONDS)):
        device = {"device_seconds": seconds}
        how = {**data, **device, "transport": "backend"}
        found.append(Race(
            name, (on_few.shoal(" zero 0", **how),),
            (on_few.shoal(", reduced after backward", **how, overlap=False),), target=1 / 0.9,
            also=(on_few.torch("DDP, buckets of 4 MB", ddp, bucket_mb=4, **device),), bounds=(on_few.bound(**device),),
        ))  # fmt: skip
    return [
        *found,
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


def _tensor_parallel(make: ContenderFactory) -> list[Race]:
    """Against torch's; and collectives and products made part by part against one after the other."""
    references = tuple(
        make.torch(f"DTensor, {name}", dtensor, prepared=prepared)
        for name, prepared in (("projections alone", False), ("inputs prepared", True))
    )
    target = 1.6 if make.ranks > 2 else 1.9 if make.workload.tokens <= FEW_TOKENS else 1.4
    found = [Race("tp", (make.shoal(" tp", tp=make.ranks),), references, target)]
    for name, gbs in (("tp-overlap", 0.0), ("tp-overlap-network", TENSOR_GBS)):
        for way in ("all-reduce", "ring"):
            how = {"tp": make.ranks, "sequence_parallel": way == "ring", "link_gbs": gbs}
            found.append(Race(
                f"{name} {way}", (make.shoal(", part by part", **how, tp_overlap=True),),
                (make.shoal(", one after the other", **how, tp_overlap=False),), target=1.0,
            ))  # fmt: skip
    return found


def _pipelines(make: ContenderFactory) -> list[Race]:
    micro_batch = make.workload.sequences // MICROBATCHES
    process = make.threads(f"one process of {make.ranks} threads", engine)
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


def _one_process(make: ContenderFactory) -> list[Race]:
    """Against a plain loop; and ``compile = true`` against the peak of the same threads."""
    system = make.threads("plain loop, system allocator", plain, tuned=False)
    tuned = make.threads("plain loop, tuned allocator", plain, products=make.products)
    found = [Race("single", (make.threads("shoal", engine),), (system,), target=1.2, also=(tuned,))]
    for precision, share in PEAK_SHARES.items():
        work, peak = replace(make.workload, precision=precision), MatmulWorkload(precision=precision)
        compiled = replace(make, workload=work).threads("shoal, compiled", partial(engine, compile=True))
        matmul = Contender(f"product of {peak.side} x {peak.side}", product, peak, threads=make.ranks)
        found.append(Race(f"compile {precision}", (compiled,), (matmul,), target=share, tolerance=None))
    return found


NAMES = (
    "dp", "zero", "fsdp", "threads", "overlap", "overlap-device", "overlap-network", "compression-network", "tp",
    "tp-overlap", "tp-overlap-network", "pp", "single", "compile",
)
"""What ``--only`` takes."""
