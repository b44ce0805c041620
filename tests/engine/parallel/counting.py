"""Counts the collectives of a rank, by the function that starts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from shoal.engine.collectives import ops
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.parallel.zero import bucket, zero_engine
from shoal.spec.config import RunConfig
from shoal.testing.verify.case import prepare
from shoal.training.dry_run.dry_run import make_samples
from shoal.training.step.engine import Engine


def engine_of(config: RunConfig) -> Engine:
    """This rank's engine on synthetic data."""
    case = prepare(config, own_precision=True, accumulate=False)
    return Engine(case.config, case.shape, Mesh(config.parallel, dist.get_rank()), make_samples(config, case.shape))


def sent_in_a_step(engine: Engine) -> Counter[tuple[str, str]]:
    """Bytes that this rank sends in a step that is not the first, by axis and kind of collective."""
    engine.step(0)
    before = engine.mesh.sent()
    engine.step(1)
    sent = engine.mesh.sent()
    sent.subtract(before)
    return +sent


@contextmanager
def watched(note: Callable[[str], Any]) -> Iterator[None]:
    """Call ``note`` with start_all_reduce, reduce_scatter_flat or all_gather_flat as each is started."""
    places = [
        (ops, "start_all_reduce"),
        (zero_engine, "start_all_reduce"),
        (zero_engine, "reduce_scatter_flat"),
        (bucket, "all_gather_flat"),
    ]
    right = [getattr(owner, name) for owner, name in places]

    def noting(name: str, function: Callable) -> Callable:
        def call(*args, **kwargs):
            note(name)
            return function(*args, **kwargs)

        return call

    for (owner, name), function in zip(places, right, strict=True):
        setattr(owner, name, noting(name, function))
    try:
        yield
    finally:
        for (owner, name), function in zip(places, right, strict=True):
            setattr(owner, name, function)
