"""shoal's engine as a variant."""

from __future__ import annotations

from functools import partial
from typing import Any

from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.throttle import ThrottledLink
from shoal.labs.bench.step.workload import OPTIMIZER, SEED, Workload, emulate_device
from shoal.labs.bench.variant import Step, Variant
from shoal.spec.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from shoal.spec.layout import Layout
from shoal.spec.layout.sizes import check_layout
from shoal.spec.sync_methods import COMPRESSED
from shoal.training.async_dp.engines import CompressedEngine
from shoal.training.step.engine import Engine


def shoal_step(workload: Workload, rank: int, ranks: int, **options: Any) -> Step:
    """Build a training step of shoal on any layout, with the options of `build_engine`."""
    engine = build_engine(workload, rank, ranks, **options)

    def step(number: int) -> float:
        loss = engine.step(number).loss
        return loss if rank == 0 else 0.0

    return step


def build_engine(
    workload: Workload, rank: int, ranks: int, *, compile: bool = False, transport: str = "auto",
    device_seconds: float = 0.0, link_gbs: float = 0.0, **layout: Any,
) -> Engine:
    """Build the engine of a workload.

    Args:
        compile: as in ``train``.
        transport: see `Mesh`.
        device_seconds: forward time of each layer on an emulated device (`emulate_device`).
        link_gbs: GB/s of a simulated network, 0 for none.
        layout: fields of `Layout`, with any exact or compressed ``sync``.
    """
    config = RunConfig(
        model=ModelConfig(name=workload.model),
        parallel=make_layout(workload, ranks, **layout),
        train=TrainConfig(
            global_batch=workload.sequences, precision=workload.precision, seed=SEED, compile=compile, device="cpu"
        ),
        data=DataConfig(sequence_length=workload.sequence_length),
        optimizer=OPTIMIZER,
    )
    mesh = Mesh(config.parallel, rank, transport=transport, link=ThrottledLink.of(link_gbs))
    kind = CompressedEngine if config.parallel.sync in COMPRESSED else Engine
    engine = kind(config, workload.shape, mesh, workload.samples)
    if device_seconds:
        emulate_device((layer for stage in engine.stages for layer in stage.module.layers.values()), device_seconds)
    return engine


def make_layout(workload: Workload, ranks: int, **layout: Any) -> Layout:
    """Return the layout of a workload. Without ``micro_batch``, a replica runs its sequences in one forward.

    Raises:
        UsageError: the layout cannot run this workload on these ranks.
    """
    layout.setdefault("micro_batch", max(1, workload.sequences // layout.get("dp", 1)))
    made = Layout(**layout)
    check_layout(
        made, workload.shape, global_batch=workload.sequences, sequence_length=workload.sequence_length, ranks=ranks
    )
    return made


def check_variant(variant: Variant) -> None:
    """Reject a layout of shoal that cannot run the workload, before any process starts.

    Raises:
        UsageError: see `make_layout`.
    """
    if isinstance(variant.build, partial) and variant.build.func is shoal_step:
        assert isinstance(variant.workload, Workload)
        fields = {name: value for name, value in variant.build.keywords.items() if name in Layout.model_fields}
        make_layout(variant.workload, variant.ranks, **fields)
