"""The races of `shoal bench step`: which of shoal's layouts runs against what of torch, and what it must reach.

2 ranks of 1 thread each, or one process of 2 threads (or as many as asked for); the same allocator setting and, unless
asked otherwise, the same library of products on both sides, except in ``single``, which compares with a loop as people
write it, on those as the system and torch set them.
"""

from __future__ import annotations

from functools import partial

from shoal.labs.bench.contender import Contender
from shoal.labs.bench.peak import MatmulWorkload, product
from shoal.labs.bench.race import Race
from shoal.labs.bench.step import shoal_engine, torch_baselines
from shoal.labs.bench.step.torch_pipelining import MICROBATCHES, SCHEDULES, pipeline
from shoal.labs.bench.step.workload import BenchPrecision, Workload
from shoal.spec.sync_methods import COMPRESSED

LINK_GBS = 0.1  # with which the gradients of the default workload take more than a quarter of its step
TENSOR_GBS = 0.2  # and the activations
SLOW_GBS = 0.02  # with which they take longer than all else of it
FEW_TOKENS = 512  # of a step, in which what is not computing weighs more
FASTEST = ("interleaved-1f1b", "zb-v", "dualpipev", "dualpipe")  # of ours, one of which takes on all of torch's


def races(workload: Workload, ranks: int = 2, *, products: bool = True) -> list[Race]:
    """All races over one workload, on so many ranks or threads.

    Args:
        products: whether torch's contenders have the library of products that shoal's have, or the one of torch.
    """
    several = partial(Contender, workload=workload, ranks=ranks)
    torchs = partial(several, products=products)
    one = partial(Contender, workload=workload, threads=ranks)
    pipe = partial(shoal_engine.engine, pp=ranks, micro_batch=workload.sequences // MICROBATCHES)
    few = workload.tokens <= FEW_TOKENS
    replicated = several("shoal zero 0", partial(shoal_engine.engine, dp=ranks, bucket_mb=8))
    sharded = several("shoal zero 1", partial(shoal_engine.engine, dp=ranks, zero=1, bucket_mb=8))
    ddp = tuple(torchs(f"DDP, buckets of {mb} MB", partial(torch_baselines.ddp, bucket_mb=mb)) for mb in (8, 64))
    alone = several("independent processes", torch_baselines.independent)
    pipelines = tuple(several(f"shoal {name}", partial(pipe, schedule=name)) for name in FASTEST)
    threaded = one(f"one process of {ranks} threads", shoal_engine.engine)
    replicas = partial(torch_baselines.threaded, replicas=ranks)
    return [
        Race(
            "dp",
            (sharded,),
            ddp,
            target=1.2 if few else 1.05,
            also=(replicated,),
            bounds=(alone,),
        ),
        Race("dp independent", (sharded,), (alone,), target=0.97, tolerance=None),
        Race("zero 0", (replicated,), ddp, target=1.0),
        Race(
            "fsdp",
            (several("shoal zero 3", partial(shoal_engine.engine, dp=ranks, zero=3)),),
            (torchs("FSDP2 fully_shard", torch_baselines.fsdp),),
            target=1.1,
        ),
        Race(
            "zero 2",
            (
                several("shoal zero 2", partial(shoal_engine.engine, dp=ranks, zero=2, bucket_mb=8)),
                several(
                    "shoal zero 3, kept", partial(shoal_engine.engine, dp=ranks, zero=3, reshard_after_forward=False)
                ),
            ),
            (torchs("FSDP2, kept after forward", partial(torch_baselines.fsdp, reshard=False)),),
            target=1.0,
        ),
        Race(
            "threads",
            (replicated,),
            (one(f"one process, {ranks} replicas", replicas, products=products),),
            target=1.0,
            also=ddp[:1],
        ),
        _overlap("overlap", workload, ranks, device_seconds=0.0, products=products),
        _overlap("overlap-device", workload, ranks, device_seconds=0.004, products=products),
        _overlap_on_network(workload, ranks),
        _compressed(workload, ranks),
        Race(
            "tp",
            (several("shoal tp", partial(shoal_engine.engine, tp=ranks)),),
            (torchs("DTensor, projections alone", partial(torch_baselines.dtensor, prepared=False)),
             torchs("DTensor, inputs prepared", partial(torch_baselines.dtensor, prepared=True))),
            target=1.6 if ranks > 2 else 1.9 if few else 1.4,
        ),
        *(
            _tensor_overlap(f"{race} {name}", workload, ranks, sequence_parallel=name == "ring", link_gbs=gbs)
            for race, gbs in (("tp-overlap", 0.0), ("tp-overlap-network", TENSOR_GBS))
            for name in ("all-reduce", "ring")
        ),
        Race(
            "pp best",
            pipelines,
            tuple(torchs(f"torch {theirs}", partial(pipeline, schedule=theirs)) for theirs in SCHEDULES.values()),
            target=1.1,
            fastest=True,
        ),
        Race("pp one-process", pipelines, (threaded,), target=0.93, fastest=True),
        *(
            Race(
                f"pp {name}",
                (several(f"shoal {name}", partial(pipe, schedule=name)),),
                (torchs(f"torch {theirs}", partial(pipeline, schedule=theirs)),),
                target=1.0,
                also=(threaded,),
            )
            for name, theirs in SCHEDULES.items()
        ),
        Race(
            "single",
            (one("shoal", shoal_engine.engine),),
            (one("plain loop, system allocator", torch_baselines.plain, tuned=False),),
            target=1.2,
            also=(one("plain loop, tuned allocator", torch_baselines.plain, products=products),),
        ),
        _compiled(workload, ranks, "fp32", 0.77),
        _compiled(workload, ranks, "bf16", 0.60),
    ]


def _overlap(name: str, workload: Workload, ranks: int, device_seconds: float, *, products: bool) -> Race:
    """Naive DDP against the same with overlap, on so few tokens a rank and over sockets that communication weighs.

    Args:
        device_seconds: of each layer's forward, in which the cores are free.
    """
    few = Workload(workload.model, sequence_length=32, sequences=ranks, precision=workload.precision)
    few_on = partial(Contender, workload=few, ranks=ranks)
    ddp = partial(shoal_engine.engine, dp=ranks, bucket_mb=4, transport="backend", device_seconds=device_seconds)
    theirs = partial(torch_baselines.ddp, bucket_mb=4, device_seconds=device_seconds)
    return Race(
        name,
        (few_on("shoal zero 0", ddp),),
        (few_on("shoal, reduced after backward", partial(ddp, overlap=False)),),
        target=1 / 0.9,
        also=(few_on("DDP, buckets of 4 MB", theirs, products=products),),
        bounds=(few_on("independent processes", partial(torch_baselines.independent, device_seconds=device_seconds)),),
    )


def _overlap_on_network(workload: Workload, ranks: int) -> Race:
    """The same between ranks that a network seems to join, whose bytes move while the cores compute."""
    several = partial(Contender, workload=workload, ranks=ranks)
    memory = partial(shoal_engine.engine, dp=ranks, bucket_mb=4)
    network = partial(memory, link_gbs=LINK_GBS)
    return Race(
        "overlap-network",
        (several("shoal zero 0", network),),
        (several("shoal, reduced after backward", partial(network, overlap=False)),),
        target=1 / 0.9,
        also=(several("shoal, through memory alone", memory),),
    )


def _compressed(workload: Workload, ranks: int) -> Race:
    """Compressed gradients against exact ones, on a network that is slow for them. Their losses differ, on purpose."""
    several = partial(Contender, workload=workload, ranks=ranks)
    network = partial(shoal_engine.engine, dp=ranks, bucket_mb=4, link_gbs=SLOW_GBS)
    return Race(
        "compression-network",
        tuple(several(f"shoal {sync}", partial(network, sync=sync)) for sync in COMPRESSED),
        (several("shoal all-reduce, with overlap", network),),
        target=1.0,
        also=(several("shoal all-reduce, after backward", partial(network, overlap=False)),),
        tolerance=None,
    )


def _tensor_overlap(
    name: str, workload: Workload, ranks: int, *, sequence_parallel: bool, link_gbs: float
) -> Race:
    """Tensor parallelism whose collectives and products are made part by part, against one after the other."""
    several = partial(Contender, workload=workload, ranks=ranks)
    tensor = partial(shoal_engine.engine, tp=ranks, sequence_parallel=sequence_parallel, link_gbs=link_gbs)
    return Race(
        name,
        (several("shoal, part by part", partial(tensor, tp_overlap=True)),),
        (several("shoal, one after the other", partial(tensor, tp_overlap=False)),),
        target=1.0,
    )


def _compiled(workload: Workload, ranks: int, precision: BenchPrecision, share: float) -> Race:
    """``compile = true`` against the peak of the same threads."""
    work = Workload(workload.model, workload.sequence_length, workload.sequences, precision)
    peak = MatmulWorkload(precision=precision)
    return Race(
        f"compile {precision}",
        (Contender("shoal, compiled", partial(shoal_engine.engine, compile=True), work, threads=ranks),),
        (Contender(f"product of {peak.side} x {peak.side}", product, peak, threads=ranks),),
        target=share,
        tolerance=None,
    )


NAMES = (
    "dp", "zero", "fsdp", "threads", "overlap", "overlap-device", "overlap-network", "compression-network", "tp",
    "tp-overlap", "tp-overlap-network", "pp", "single", "compile",
)
"""What ``--only`` takes."""
