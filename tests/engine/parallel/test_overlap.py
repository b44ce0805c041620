"""Where products and collectives of tensor parallelism are made part by part, and where that is refused."""

import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.base.errors import UsageError
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.parallel.weight_grad import ProductInput
from shoal.launch.worker_pool import Pool
from shoal.spec.config import RunConfig
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS
from shoal.training.check import check
from shoal.training.dry_run.dry_run import make_samples
from shoal.training.step.engine import Engine
from tests.testing.verify.runs import small_run

MODEL = {"hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 64}
IN_8_BITS = [name for name, formats in FORMATS.items() if formats.products != "compute"]


def run_of(tp_overlap: Any, parallel: dict | None = None, **train: Any) -> RunConfig:
    parallel = {"tp": 2, "sequence_parallel": True, "tp_overlap": tp_overlap, **(parallel or {})}
    return small_run(parallel, MODEL, device="cpu", **train)


def part_by_part(config: RunConfig, background: bool) -> list[bool]:
    """Of each region of a layer, whether its products and collectives are made together.

    Args:
        background: whether transfers are to be taken to go on while a rank computes.
    """
    shape = check(config)
    right = Layout.overlaps_products
    with patch.object(Layout, "overlaps_products", lambda layout, **_: right(layout, background)):
        engine = Engine(config, shape, Mesh(config.parallel, dist.get_rank()), make_samples(config, shape))
    (stage,) = engine.stages
    layer = stage.module.layers["0"]
    return [linear.at.overlap for linear in (layer.attention.q, layer.mlp.down)]


@pytest.mark.parametrize(("tp_overlap", "parallel", "train", "background", "expected"), [
    ("auto", {}, {}, True, True),
    ("auto", {}, {}, False, False),  # as between CPU ranks
    ("auto", {"sequence_parallel": False}, {}, True, False),
    ("auto", {}, {"compile": True}, True, False),
    *(("auto", {}, {"precision": name}, True, False) for name in IN_8_BITS),
    (True, {}, {}, False, True),
    (True, {"sequence_parallel": False}, {}, False, True),
    (False, {}, {}, True, False),
])
def test_where_it_overlaps(
    pool: Pool, tp_overlap: Any, parallel: dict, train: dict, background: bool, expected: bool
) -> None:
    config = run_of(tp_overlap, parallel, **train)
    for found in pool.run(part_by_part, 2, config, background):
        assert found == [expected, expected]


def test_between_cpu_ranks_transfers_wait_for_computation(pool: Pool) -> None:
    """What auto is told, unpatched."""
    (told, _) = pool.run(asked_background, 2, run_of("auto"))
    assert told == [False]


def asked_background(config: RunConfig) -> list[bool]:
    told, right = [], Layout.overlaps_products

    def noting(layout: Layout, background: bool) -> bool:
        told.append(background)
        return right(layout, background)

    with patch.object(Layout, "overlaps_products", noting):
        shape = check(config)
        Engine(config, shape, Mesh(config.parallel, dist.get_rank()), make_samples(config, shape))
    return told


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("background", [False, True])
def test_auto_needs_ranks_a_split_sequence_and_transfers_in_the_background(
    tp: int, sequence_parallel: bool, background: bool
) -> None:
    layout = Layout(tp=tp, sequence_parallel=sequence_parallel)
    assert layout.overlaps_products(background) == (tp > 1 and sequence_parallel and background)


@pytest.mark.parametrize(("parallel", "train", "what"), [
    ({"tp": 1, "sequence_parallel": False}, {}, r"tp_overlap = true with parallel\.tp = 1"),
    ({}, {"compile": True}, r"tp_overlap = true with train\.compile = true"),
    *(({}, {"precision": name}, f"tp_overlap = true with train.precision = '{name}'") for name in IN_8_BITS),
])
def test_what_cannot_overlap_is_refused(parallel: dict, train: dict, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        check(run_of(True, parallel, **train))
    for choice in ("auto", False):
        check(run_of(choice, parallel, **train))


@pytest.mark.parametrize(("train", "what"), [
    ({"compile": True}, r"tp_x = 2 with train\.compile = true"),
    ({"precision": "fp8"}, "tp_x = 2 with train.precision = 'fp8'"),
])
def test_what_cannot_be_on_a_grid_is_refused(train: dict, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        check(run_of("auto", {"tp": 4, "tp_x": 2}, **train))


def test_a_gathered_input_is_freed_with_its_last_use() -> None:
    gathers: list[int] = []

    def start_gather() -> Callable[[], Tensor]:
        gathers.append(1)
        return lambda: torch.ones(2)

    kept = ProductInput(start_gather, uses=2)
    kept.start()
    first = weakref.ref(kept.take())
    assert first() is not None and kept.take() is first() and gathers == [1]
    assert first() is None
