"""Ranks on another device than the reference: the staged transport, here with the CPU in the device's place."""

from random import Random

import pytest
import torch

import shoal
from shoal.base.errors import UsageError
from shoal.launch.worker_pool import Pool
from shoal.spec.config import RunConfig
from shoal.testing.verify.case import prepare, run_case
from shoal.testing.verify.draw import draw_run
from tests.testing.verify.runs import small_run

LAYOUTS = {
    "ddp": {"dp": 2},
    "zero-2-hybrid": {"dp": 4, "zero": 2, "zero_shard": 2},
    "zero-3": {"dp": 2, "zero": 3},
    "tp": {"tp": 2},
    "tp-sequence-overlap": {"tp": 2, "sequence_parallel": True, "tp_overlap": True},
    "pp-zb-v": {"pp": 2, "schedule": "zb-v"},
    "cp": {"cp": 2},
}


def check_staged(pool: Pool, run: RunConfig) -> None:
    verdict, _ = run_case(prepare(run, own_precision=False), pool, steps=1, transport="staged")
    assert not verdict.findings, verdict.findings[0].text
    assert verdict.worst_gradient <= 1e-9


@pytest.mark.parametrize("layout", LAYOUTS)
def test_staged_ranks_compute_what_one_device_computes(pool: Pool, layout: str) -> None:
    check_staged(pool, small_run(LAYOUTS[layout], {"layers": 4}))


def test_staged_experts(pool: Pool) -> None:
    experts = {"count": 4, "ffn": 6, "per_token": 2}
    check_staged(pool, small_run({"dp": 2, "zero": 1, "ep": 2}, {"experts": experts}))


def test_staged_ranks_of_a_drawn_layout(pool: Pool) -> None:
    check_staged(pool, draw_run(Random("staged:1").choice, 6))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device exists")
def test_without_cuda_auto_verifies_on_the_cpu_and_cuda_is_refused() -> None:
    run = small_run({"tp": 2}, {"layers": 1})
    assert shoal.verify(run, steps=1, device="auto").same
    for random in (None, 1):
        with pytest.raises(UsageError, match="device = 'cuda', but torch sees no CUDA device"):
            shoal.verify(run, random=random, device="cuda")
