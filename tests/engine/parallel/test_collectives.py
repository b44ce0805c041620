"""The collectives with their autograd pairs against what they stand for on the ranks' tensors put together."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.engine.collectives import ops
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.launch.worker_pool import Pool
from shoal.spec.layout import Layout

RANKS = 3
SHAPE = (6, 3, 6)


def inputs(seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return list(torch.randn(RANKS, *SHAPE, dtype=torch.float64).unbind())


def world(transport: str) -> Group:
    """The group of all ranks."""
    return Mesh(Layout(tp=RANKS), dist.get_rank(), transport=transport).group("tp")


def run(transport: str, name: str, dim: int | None) -> tuple[Tensor, Tensor]:
    """One rank's output, and its input's gradient under the weights of seed 1 (its own, cut to the output's shape)."""
    rank, group = dist.get_rank(), world(transport)
    x = inputs(0)[rank].requires_grad_()
    args = () if dim is None else (dim,)
    out = getattr(ops, name)(x * 1, group, *args)
    weight = weights(name, dim)[rank]
    out.backward(weight)
    return out.detach(), x.grad


def weights(name: str, dim: int | None) -> list[Tensor]:
    """Each rank's gradient of its output, of the output's shape."""
    given = inputs(1)
    if name == "gather_from":
        return [torch.cat([g * (r + 1) for g in given], dim) for r in range(RANKS)]
    if name == "scatter_to":
        return [g.chunk(RANKS, dim)[0].contiguous() for g in given]
    return [given[0]] * RANKS if name == "reduce_from" else given


CASES = [("copy_to", None), ("reduce_from", None), *((n, d) for n in ("gather_from", "scatter_to") for d in (0, 2))]


@pytest.mark.parametrize("transport", ["auto", "backend"])
@pytest.mark.parametrize(("name", "dim"), CASES)
def test_forward_and_backward(pool: Pool, transport: str, name: str, dim: int | None) -> None:
    xs, gs = inputs(0), weights(name, dim)
    total = sum(xs)
    expected = {
        "copy_to": lambda r: (xs[r], sum(gs)),
        "reduce_from": lambda r: (total, gs[r]),
        "gather_from": lambda r: (torch.cat(xs, dim), sum(gs).chunk(RANKS, dim)[r]),
        "scatter_to": lambda r: (total.chunk(RANKS, dim)[r], torch.cat(gs, dim)),
    }[name]
    for rank, (out, gradient) in enumerate(pool.run(run, RANKS, transport, name, dim)):
        torch.testing.assert_close(out, expected(rank)[0])
        torch.testing.assert_close(gradient, expected(rank)[1])


def test_over_one_rank_they_do_nothing() -> None:
    x = torch.ones(2)
    assert ops.copy_to(x, None) is x
    assert ops.reduce_from(x, None) is x
    assert ops.gather_from(x, None, 0) is x
    assert ops.scatter_to(x, None, 0) is x


def flat(transport: str, n: int) -> tuple[Tensor, Tensor]:
    """Reduce-scatter into a slice of its own input, as ZeRO-1 does, then gather that back."""
    group = world(transport)
    whole = torch.arange(n * RANKS, dtype=torch.float64) * (dist.get_rank() + 1)
    mine = whole[dist.get_rank() * n :][:n]
    ops.reduce_scatter_flat(mine, whole, group).wait()
    out = torch.empty_like(whole)
    ops.all_gather_flat(out, mine, group).wait()
    return mine.clone(), out


@pytest.mark.parametrize("transport", ["auto", "backend"])
def test_flat_collectives_may_alias_and_add_up(pool: Pool, transport: str) -> None:
    n = 5
    expected = torch.arange(n * RANKS, dtype=torch.float64) * sum(range(1, RANKS + 1))
    for rank, (mine, out) in enumerate(pool.run(flat, RANKS, transport, n)):
        assert torch.equal(mine, expected[rank * n :][:n])
        assert torch.equal(out, expected)
