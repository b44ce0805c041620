"""The races of `shoal bench step`: which of shoal's layouts runs against what of torch, and what it must reach.

2 ranks of 1 thread each, or one process of 2 threads; the same allocator setting on both sides, except in ``single``,
which compares with a loop as people write it, on the allocator as the system sets it.
"""

from __future__ import annotations

from functools import partial

from shoal.bench import ours, references
from shoal.bench.crew import Contender
from shoal.bench.peak import Product, product
from shoal.bench.pipelining import MICROBATCHES, pipeline
from shoal.bench.race import Race
from shoal.bench.workload import Workload

RANKS = 2
PIPELINES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")


def races(workload: Workload) -> list[Race]:
    """All races over one workload."""
    two = partial(Contender, workload=workload, ranks=RANKS)
    one = partial(Contender, workload=workload, threads=RANKS)
    pipe = {"pp": RANKS, "micro_batch": workload.sequences // MICROBATCHES}
    return [
        Race(
            "dp",
            (two("shoal zero 0", partial(ours.engine, dp=RANKS, bucket_mb=8)),
             two("shoal zero 1", partial(ours.engine, dp=RANKS, zero=1, bucket_mb=8))),
            tuple(two(f"DDP, buckets of {mb} MB", partial(references.ddp, bucket_mb=mb)) for mb in (8, 64)),
            target=1.0,
        ),
        Race(
            "fsdp",
            (two("shoal zero 3", partial(ours.engine, dp=RANKS, zero=3)),),
            (two("FSDP2 fully_shard", references.fsdp),),
            target=1.1,
        ),
        Race(
            "tp",
            (two("shoal tp 2", partial(ours.engine, tp=RANKS)),),
            (two("DTensor, projections alone", partial(references.dtensor, prepared=False)),
             two("DTensor, inputs prepared", partial(references.dtensor, prepared=True))),
            target=1.2,
        ),
        Race(
            "pp",
            (two("shoal 1f1b", partial(ours.engine, schedule="1f1b", **pipe)),),
            tuple(two(f"torch {name}", partial(pipeline, schedule=name)) for name in PIPELINES),
            target=1.0,
        ),
        Race(
            "single",
            (one("shoal", ours.engine),),
            (one("plain loop, system allocator", references.plain, tuned=False),),
            target=1.2,
            also=(one("plain loop, tuned allocator", references.plain),),
        ),
        *(_compiled(workload, precision, share) for precision, share in (("fp32", 0.77), ("bf16", 0.60))),
    ]


def _compiled(workload: Workload, precision: str, share: float) -> Race:
    """``compile = true`` against the peak of the same two threads."""
    work = Workload(workload.model, workload.sequence_length, workload.sequences, precision)
    peak = Product(precision=precision)
    return Race(
        f"compile {precision}",
        (Contender("shoal, compiled", partial(ours.engine, compile=True), work, threads=RANKS),),
        (Contender(f"product of {peak.side} x {peak.side}", product, peak, threads=RANKS),),
        target=share,
        tolerance=None,
    )


NAMES = ("dp", "fsdp", "tp", "pp", "single", "compile")
"""What ``--only`` takes."""
