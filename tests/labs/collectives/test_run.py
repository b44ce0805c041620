"""Every algorithm of every collective on real processes: the backend's own result, bit for bit where sums are exact."""

import pytest
import torch
import torch.distributed as dist

from shoal.labs.collectives.description import REDUCING, VECTORS, Collective, even
from shoal.labs.collectives.run import MOST_PIECES, PIECE_BYTES, run_blocks, run_vector
from shoal.labs.collectives.textbook import TEXTBOOK, describe
from shoal.launch.worker_pool import RankError

# What gloo itself reduces; what is only moved may be of any dtype.
REDUCED = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64
)
MOVED = (*REDUCED, torch.bool, torch.complex64)
FEW = 3  # ranks, up to which every dtype is tried: who sends what to whom does not depend on it


def algorithms(collective, ranks):
    """The descriptions of a collective; the root is the middle rank."""
    for name in TEXTBOOK[collective]:
        nodes = [n for n in range(1, ranks + 1) if ranks % n == 0] if name == "hierarchical" else [1]
        for per_node in nodes:
            yield describe(collective, name, ranks, root=ranks // 2, per_node=per_node)


def values(dtype, numel, seed):
    """Small whole numbers: sums of 6 are exact in every dtype."""
    return torch.randint(0, 4, (numel,), generator=torch.Generator().manual_seed(seed)).to(dtype)


def vector(collective, dtype, numel, cuts):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = values(dtype, numel, rank)
    wanted = own.clone()
    if collective is Collective.BROADCAST:
        dist.broadcast(wanted, ranks // 2)
    elif collective is Collective.REDUCE:
        dist.reduce(wanted, ranks // 2)
    else:
        dist.all_reduce(wanted)
    for description in algorithms(collective, ranks):
        for pieces in cuts:
            x = own.clone()
            assert run_vector(description, x, dist.group.WORLD, pieces=pieces) is x
            if rank == ranks // 2 or collective is not Collective.REDUCE:
                assert torch.equal(x, wanted), (description.algorithm, dtype, numel)


def blocks(collective, dtype, sizes):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    several = list(algorithms(collective, ranks))
    first = several[0]
    # Every block as its contributors have it, then as the backend makes it.
    mine = {block: values(dtype, sizes[block], 100 * rank + block) for block in first.initial(rank)}
    done = {}
    if collective is Collective.ALL_TO_ALL:
        own = [sizes[rank * ranks + j] for j in range(ranks)]
        theirs = [sizes[i * ranks + rank] for i in range(ranks)]
        out = torch.empty(sum(theirs), dtype=dtype)
        dist.all_to_all_single(out, torch.cat(list(mine.values())), theirs, own)
        done = dict(zip(first.final(rank), out.split(theirs), strict=True))
    else:
        for block in range(ranks):
            done[block] = mine[block].clone() if block in mine else torch.empty(sizes[block], dtype=dtype)
            if collective in REDUCING:
                dist.all_reduce(done[block])
            else:
                dist.broadcast(done[block], ranks // 2 if collective is Collective.SCATTER else block)
    x = torch.cat([*mine.values(), torch.empty(0, dtype=dtype)])
    before = x.clone()
    wanted = torch.cat([*(done[block] for block in first.final(rank)), torch.empty(0, dtype=dtype)])
    for description in several:
        got = run_blocks(description, x, sizes, dist.group.WORLD)
        assert torch.equal(got, wanted), (description.algorithm, dtype, sizes)
        assert torch.equal(x, before), f"{description.algorithm} changed its input"


def everything(collective):
    ranks = dist.get_world_size()
    reduces = collective in REDUCING
    dtypes = (torch.bfloat16,) if ranks > FEW else REDUCED if reduces else MOVED
    if collective in VECTORS:
        for dtype in dtypes:
            vector(collective, dtype, 13, cuts=(3,))
        for numel in (0, 1, ranks - 1, 1000):
            vector(collective, torch.float32, numel, cuts=(None, 3))
        return
    count = ranks**2 if collective is Collective.ALL_TO_ALL else ranks
    uneven = [(3 * block + 1) % 5 for block in range(count)]  # some empty
    for dtype in dtypes:
        blocks(collective, dtype, uneven)
    for size in (0, 1, 40):
        blocks(collective, torch.float32, [size] * count)
    blocks(collective, torch.float32, [0] * (count - 1) + [7])


@pytest.mark.parametrize("ranks", [1, 3, 4, 6])
@pytest.mark.parametrize("collective", Collective)
def test_every_algorithm_gives_the_backends_own_result(pool, collective, ranks):
    pool.run(everything, ranks, collective)


def rounding(numel):
    """Real numbers: the order of additions differs, so results agree to rounding; the ranks' results agree in bits."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    wanted = own.clone()
    dist.all_reduce(wanted)
    for description in algorithms(Collective.ALL_REDUCE, ranks):
        x = own.clone()
        run_vector(description, x, dist.group.WORLD)
        torch.testing.assert_close(x, wanted, rtol=1e-5, atol=1e-5)
        everyones = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(everyones, x)
        same = all(torch.equal(x, other) for other in everyones)
        assert same or description.copies, description.algorithm  # each rank adds up a copy of its own


def test_large_vectors_go_in_pieces_and_all_ranks_get_the_same_bits(pool):
    numel = 2 * PIECE_BYTES // 4 + 1
    assert numel * 4 > PIECE_BYTES and MOST_PIECES > 1  # else nothing is cut
    pool.run(rounding, 3, numel)


def inside_a_subgroup():
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return None
    x = torch.full((5,), float(dist.get_rank()))
    return run_vector(describe("all-reduce", "ring", 2), x, group).tolist()


def test_ranks_are_those_of_the_group(pool):
    assert pool.run(inside_a_subgroup, 4) == [None, [4.0] * 5, None, [4.0] * 5]


def misuse(name, algorithm, ranks, numel, sizes):
    description, x = describe(name, algorithm, ranks), torch.ones(numel)
    if sizes is None:
        run_vector(description, x, dist.group.WORLD)
    else:
        run_blocks(description, x, sizes, dist.group.WORLD)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("all-gather", "ring", 2, 4, None), "use run_blocks"),
        (("all-reduce", "ring", 2, 4, [2, 2]), "use run_vector"),
        (("all-reduce", "ring", 3, 4, None), "for 3 ranks in a group of 2"),
        (("all-gather", "ring", 2, 4, [4]), "1 sizes for 2 blocks"),
        (("all-gather", "ring", 2, 4, [3, 3]), r"shape \(4,\)"),
    ],
)
def test_what_does_not_fit_is_refused(pool, call, message):
    with pytest.raises(RankError, match=message):
        pool.run(misuse, 2, *call)


def test_even():
    assert even(10, 4) == [3, 3, 2, 2]
    assert even(2, 3) == [1, 1, 0]
