"""Tensor parallelism over symmetric memory, with torch's own reference of its operators on the CPU."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from shoal.engine.collectives.mesh import Mesh
from shoal.engine.parallel import overlap, symmetric, tensor
from shoal.launch.worker_pool import Pool
from shoal.spec.layout import Layout
from shoal.testing.verify import case, rank
from shoal.testing.verify.reference import ComparisonJob
from tests.testing.verify.runs import small_run


def use_reference() -> torch.library.Library:
    """Run the operators on CPU tensors until the result is deleted."""
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU")
    return library


def as_the_ring_does(sequences: int, tokenwise: bool) -> None:
    library, n, index = use_reference(), dist.get_world_size(), dist.get_rank()
    group = Mesh(Layout(tp=n), index, transport="backend").group("tp")

    def numbers(*shape: int, seed: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    x, factors = numbers(sequences, 4, 6, seed=index), [numbers(6, m, seed=9).t().contiguous().t() for m in (5, 2)]
    gathered, products = symmetric.gather_products(x, factors, group, tokenwise)
    expected = overlap.gather_products(x, factors, group, tokenwise)
    torch.testing.assert_close([gathered, *products], [expected[0], *expected[1]], rtol=1e-12, atol=1e-12)
    assert all(y.is_contiguous() for y in (gathered, *products))
    x = numbers(sequences, 4 * n, 6, seed=index)
    part = symmetric.scatter_product(x, factors[0], group, tokenwise)
    torch.testing.assert_close(part, overlap.scatter_products([x], factors[:1], group, tokenwise))
    assert part.is_contiguous()
    del library


@pytest.mark.parametrize("tokenwise", [False, True])
@pytest.mark.parametrize(("ranks", "sequences"), [(2, 1), (2, 3), (3, 2)])
def test_it_computes_what_the_ring_computes(pool: Pool, ranks: int, sequences: int, tokenwise: bool) -> None:
    pool.run(as_the_ring_does, ranks, sequences, tokenwise)


def compare_over_symmetric_memory(job: ComparisonJob) -> rank.RankReport:
    library = use_reference()
    called = []
    with (
        patch.object(tensor, "is_available", lambda group, device: True),
        patch.object(symmetric, "_name", lambda group: called.append(1) or group.backend.group_name),
    ):
        report = rank.compare(job)
    assert called
    del library
    return report


def test_a_layout_computes_what_one_device_computes(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case, "compare", compare_over_symmetric_memory)
    run = small_run({"tp": 2, "sequence_parallel": True, "tp_overlap": True, "recompute": "selective"})
    verdict, _ = case.run_case(case.prepare(run, own_precision=False), pool, steps=2, transport="backend")
    assert not verdict.findings, verdict.findings[0].text
    assert verdict.worst_gradient <= 1e-9


def ask() -> bool:
    return symmetric.is_available(Mesh(Layout(tp=2), dist.get_rank()).group("tp"), torch.device("cpu"))


def test_not_between_ranks_on_the_cpu(pool: Pool) -> None:
    assert pool.run(ask, 2) == [False, False]
