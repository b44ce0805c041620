"""shoal's engine as a contender."""

from __future__ import annotations

from functools import partial
from typing import Any

from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.throttle import ThrottledLink
from shoal.labs.bench.contender import Contender, Step
from shoal.labs.bench.step.workload import OPTIMIZER, SEED, Workload, emulate_device
from shoal.spec.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from shoal.spec.layout import Layout
from shoal.spec.layout.sizes import check_layout
from shoal.spec.sync_methods import COMPRESSED
from shoal.training.async_dp.engines import CompressedEngine
from shoal.training.step.engine import Engine


def engine(workload: Workload, rank: int, ranks: int, **how: Any) -> Step:
    """A training step of shoal on any layout.

    Args:
        how: as of `build`.

    Returns:
        From the number of a step to this rank's share of its mean loss [nats]; the ranks' shares add up.
    """
    built = build(workload, rank, ranks, **how)

    def step(number: int) -> float:
        loss = built.step(number).loss
        return loss if rank == 0 else 0.0

    return step


def build(
    workload: Workload, rank: int, ranks: int, *,
    compile: bool = False, transport: str = "auto", device_seconds: float = 0.0,
    link_gbs: float = 0.0, **layout: Any,
) -> Engine:
    """The engine of a workload.

    Args:
        compile, transport: as in ``train``; link_gbs: as in ``testing``.
        device_seconds: of each layer's forward, on an emulated device (`emulate_device`).
        layout: fields of `Layout`, with any exact or compressed ``sync``; without ``micro_batch``, a replica takes its
            sequences in one forward.
    """
    config = RunConfig(
        model=ModelConfig(name=workload.model),
        parallel=layout_of(workload, ranks, **layout),
        train=TrainConfig(
            global_batch=workload.sequences, precision=workload.precision, seed=SEED, compile=compile, device="cpu"
        ),
        data=DataConfig(sequence_length=workload.sequence_length),
        optimizer=OPTIMIZER,
    )
    mesh = Mesh(config.parallel, rank, transport=transport, link=ThrottledLink.of(link_gbs))
    kind = CompressedEngine if config.parallel.sync in COMPRESSED else Engine
    built = kind(config, workload.shape, mesh, workload.samples)
    if device_seconds:
        emulate_device((layer for stage in built.stages for layer in stage.module.layers.values()), device_seconds)
    return built


def layout_of(workload: Workload, ranks: int, **layout: Any) -> Layout:
    """The layout of a workload on so many ranks.

    Raises:
        UsageError: it has none of these fields.
    """
    layout.setdefault("micro_batch", max(1, workload.sequences // layout.get("dp", 1)))
    made = Layout(**layout)
    check_layout(
        made, workload.shape, global_batch=workload.sequences, sequence_length=workload.sequence_length, ranks=ranks
    )
    return made


def check(contender: Contender) -> None:
    """Refuse what no engine could be built of, before any process is started.

    Raises:
        UsageError: the layout and the work do not go together.
    """
    if isinstance(contender.build, partial) and contender.build.func is engine:
        fields = {name: value for name, value in contender.build.keywords.items() if name in Layout.model_fields}
        layout_of(contender.workload, contender.ranks, **fields)
