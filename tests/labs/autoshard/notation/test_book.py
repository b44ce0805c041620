"""The worked numbers of How to Scale Your Model (Austin et al. 2025), chapters 3 and 5, by what the command uses."""

import math

import pytest

from shoal.engine.sharding.named_axes import NamedMesh
from shoal.labs.autoshard.notation.network import Rings
from shoal.labs.autoshard.notation.notation import parse
from shoal.labs.autoshard.notation.search import RouteSearch, add_backward, find_forward
from shoal.labs.collectives.topology import Wire
from shoal.spec.catalog.accelerators import accelerator
from shoal.spec.catalog.clusters import link

V5P = accelerator("tpu-v5p").peak_flops["bf16"]
W = 2 * link("ici-v5p").bandwidth
ALPHA = V5P / W  # FLOPs that a device does while a byte crosses a link


# The rules of chapter 5, which docs/sharding.md derives.


def least_batch(alpha, axes=1):
    """B / X, tokens per device, above which data parallelism and FSDP are compute-bound."""
    return alpha / axes


def most_tensor(alpha, hidden, axes=1):
    """Y, the devices up to which tensor parallelism is compute-bound, whatever the batch."""
    return axes * hidden / alpha


def best_fsdp(batch, hidden, devices, fsdp_axes=1, tensor_axes=1):
    """X of ``devices`` = X Y for which FSDP and tensor parallelism together communicate least."""
    return math.sqrt(batch / hidden * fsdp_axes / tensor_axes * devices)


def least_mixed_batch(alpha, hidden, fsdp_axes=1, tensor_axes=1, *, overlapped=True):
    """Tokens per device above which both together, at the best X, are compute-bound."""
    return (1 if overlapped else 4) * alpha**2 / (fsdp_axes * tensor_axes * hidden)


def rings(mesh, name="ici-v5p"):
    wire = link(name)
    return Rings(mesh, Wire(wire.latency, wire.bandwidth))


def memory(text, mesh, sizes, itemsize):
    """Bytes of one device, and of all."""
    expression, sizes = parse(text, mesh, sizes)
    local = expression.arrays[0].sharding.local_numel(sizes, mesh) * itemsize
    return local, local * mesh.ranks


def test_memory_of_a_sharded_array():
    """Chapter 3: the pop quiz of "A unified notation for sharding", and question 1 on its mesh of 4 x 8 x 2."""
    quiz = NamedMesh("xyz", (2, 8, 2))
    assert memory("A[Ixy, J]", quiz, {"I": 128, "J": 2048}, 1) == (16384, 512 * 1024)
    mesh = NamedMesh("xyz", (4, 8, 2))
    assert memory("A[Ix, J]", mesh, {"I": 256, "J": 2048}, 2) == (64 * 2048 * 2, 16 * 256 * 2048 * 2)
    assert memory("A[Ixy, J]", mesh, {"I": 256, "J": 2048}, 2) == (8 * 2048 * 2, 2 * 256 * 2048 * 2)
    assert memory("A[Ix, Jyz]", mesh, {"I": 256, "J": 2048}, 2) == (16384, 256 * 2048 * 2)
    assert memory("A[I, J]", mesh, {"I": 256, "J": 2048}, 2) == (2**20, 64 * 2**20)


def test_time_of_an_all_gather():
    """Chapter 3, pop quiz 2 and questions 2 and 3: bytes / bandwidth, over n axes n times the bandwidth, or latency."""
    quiz = rings(NamedMesh("xy", (8, 4)), "ici-v5e")
    assert quiz.price("all-gather", "y", 2048 * 8192 * 2)[0] == pytest.approx(377e-6, rel=0.02)  # 34e6 bytes, rounded
    cube = Rings(NamedMesh("xyz", (4, 4, 4)), Wire(0.5e-6, 45e9))
    b, d = 1024, 4096
    assert cube.price("all-gather", "x", 2 * b * d / 4)[0] == pytest.approx(23e-6, rel=0.02)
    assert cube.price("all-gather", "xy", 2 * b * d)[0] == pytest.approx(46e-6, rel=0.02)
    assert cube.price("all-reduce", "z", 2 * b * d / 16)[0] == pytest.approx(2 * 5.8e-6, rel=0.02)
    small = Rings(NamedMesh("xyz", (4, 4, 4)), Wire(1e-6, 45e9))
    assert small.price("all-gather", "x", 256)[0] == pytest.approx(2e-6)  # two hops, however little is sent


def test_the_four_collectives_beside_each_other():
    """Chapter 3, "What Have We Learned?": reduce-scatter takes as long, all-reduce twice, all-to-all a quarter."""
    net = rings(NamedMesh("x", (16,)))
    v = 1e9
    gather = net.price("all-gather", "x", v)[0]
    assert gather == pytest.approx(v / W)
    assert net.price("reduce-scatter", "x", v)[0] == gather
    assert net.price("all-reduce", "x", v)[0] == 2 * gather
    assert net.price("all-to-all", "x", v / 16)[0] == pytest.approx(gather / 4)
    for devices in (2, 4, 64):  # how many share the array does not matter
        assert rings(NamedMesh("x", (devices,))).price("all-gather", "x", v)[0] == gather


def test_gather_or_reduce():
    """Chapter 3, question 4: A[B, D] * W[Dx, F]: reduce C, 4 B F bytes, or gather W, 2 D F and X times the FLOPs."""
    mesh, sizes = NamedMesh("x", (4,)), {"B": 2048, "D": 8192, "F": 32768}
    expression, sizes = parse("A[B, D] * W[Dx, F] -> C[B, F]", mesh, sizes)
    plan = RouteSearch(mesh, sizes, 2, rings(mesh), peak_flops=V5P)
    routes = {str(route.multiplied[1]): route for _, (route,) in find_forward(expression, plan)}
    reduce, gather = routes["[Dx, F]"], routes["[D, F]"]
    assert [str(t) for t in reduce.moves] == ["slice x into D", "all-reduce x"]
    assert reduce.communication == pytest.approx(2 * 2 * 2048 * 32768 / W)
    assert reduce.compute == pytest.approx(2 * 2048 * 8192 * 32768 / 4 / V5P)
    by_gathering = next(
        route for _, (route,) in find_forward(expression, plan)
        if [str(t) for t in route.moves] == ["all-gather x of D"]
    )  # fmt: skip
    assert by_gathering.communication == pytest.approx(2 * 8192 * 32768 / W)
    assert by_gathering.compute == pytest.approx(4 * reduce.compute)
    assert gather.multiplied == by_gathering.multiplied or gather.compute < by_gathering.compute


SCHEMES = {
    "data": ("In[Bx, D] * Win[D, F] * Wout[F, D] -> Out[Bx, D]", [], ["dWout: all-reduce x", "dWin: all-reduce x"]),
    "FSDP": (
        "In[Bx, D] * Win[Dx, F] * Wout[F, Dx] -> Out[Bx, D]",
        ["Win: all-gather x of D", "Wout: all-gather x of D"],
        ["dWout: reduce-scatter x into D", "Wout: all-gather x of D", "dWin: reduce-scatter x into D",
         "Win: all-gather x of D"],
    ),
    "tensor": (
        "In[B, Dy] * Win[D, Fy] * Wout[Fy, D] -> Out[B, Dy]",
        ["In: all-gather y of D", "Out: reduce-scatter y into D"],
        ["dOut: all-gather y of D", "In: all-gather y of D", "dIn: reduce-scatter y into D"],
    ),
    "mixed": (
        "In[Bx, Dy] * Win[Dx, Fy] * Wout[Fy, Dx] -> Out[Bx, Dy]",
        ["In: all-gather y of D", "Win: all-gather x of D", "Wout: all-gather x of D", "Out: reduce-scatter y into D"],
        ["dOut: all-gather y of D", "dWout: reduce-scatter x into D", "Wout: all-gather x of D",
         "In: all-gather y of D", "dWin: reduce-scatter x into D", "Win: all-gather x of D",
         "dIn: reduce-scatter y into D"],
    ),
}  # fmt: skip


def layer(scheme, mesh, sizes):
    expression, sizes = parse(SCHEMES[scheme][0], mesh, sizes)
    plan = RouteSearch(mesh, sizes, 2, Rings(mesh, Wire(0.0, W / 2)), peak_flops=V5P)
    return add_backward(expression, find_forward(expression, plan)[0][1], plan)


def said(routes):
    return [
        f"{name}: {move}"
        for route in routes
        for name, moves in zip(route.names, (route.left, route.right, route.after), strict=True)
        for move in moves
    ]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_search_finds_the_algorithms_of_the_book(scheme):
    """Chapter 5: the forward and backward passes of the four schemes, collective by collective."""
    mesh = {"data": NamedMesh("x", (16,)), "FSDP": NamedMesh("x", (16,)), "tensor": NamedMesh("y", (8,))}
    chain = layer(scheme, mesh.get(scheme, NamedMesh("xy", (16, 4))), {"B": 1 << 15, "D": 8192, "F": 32768})
    assert said(chain.forward) == SCHEMES[scheme][1]
    assert said(chain.backward) == SCHEMES[scheme][2]


def bound(routes):
    """The time of the products over that of the collectives."""
    return sum(route.compute for route in routes) / sum(route.communication for route in routes)


def test_when_data_parallelism_and_fsdp_wait():
    """Chapter 5: compute-bound while B / X > C / W = 2550; a third of it with three axes."""
    assert least_batch(ALPHA) == pytest.approx(2550, rel=0.01)
    assert least_batch(ALPHA, axes=3) == pytest.approx(850, rel=0.01)
    assert 16e6 / least_batch(ALPHA, 3) == pytest.approx(18823, rel=0.01)  # devices for LLaMA-3 70B's batch
    for scheme, part in (("data", "backward"), ("FSDP", "forward")):
        for batch in (1 << 15, 1 << 17, 1 << 19):  # of smaller ones the activations are the cheaper to move
            chain = layer(scheme, NamedMesh("x", (16,)), {"B": batch, "D": 4096, "F": 8192})
            assert bound(getattr(chain, part)) == pytest.approx(batch / 16 / ALPHA)


def test_when_tensor_parallelism_waits():
    """Chapter 5: compute-bound while Y < n F / (C / W), whatever the batch: 11 for LLaMA-3's F, 19 for Gemma's."""
    assert most_tensor(ALPHA, 30_000) == pytest.approx(11.7, rel=0.01)
    assert int(most_tensor(ALPHA, 50_000)) == 19
    assert most_tensor(ALPHA, 30_000, axes=2) == 2 * most_tensor(ALPHA, 30_000)
    assert 20_000 < 8 * ALPHA < 20_500  # "the required F for 8-way is 20k"
    for devices in (4, 8, 16, 32):
        for batch in (1024, 4096):
            chain = layer("tensor", NamedMesh("y", (devices,)), {"B": batch, "D": 8192, "F": 32768})
            assert bound(chain.forward) == pytest.approx(most_tensor(ALPHA, 32768) / devices)


def test_the_best_mix_of_fsdp_and_tensor_parallelism():
    """Chapter 5: X = sqrt(B / F * nx / ny * N) is 13.9 for 64 devices, B = 48,000 and F = 32,768: so 16 and 4."""
    assert best_fsdp(48_000, 32_768, 64, fsdp_axes=2, tensor_axes=1) == pytest.approx(13.9, rel=0.02)
    times = {}
    for tensor in (2, 4, 8, 16):
        chain = layer("mixed", NamedMesh("xy", (64 // tensor, tensor)), {"B": 49_152, "D": 8192, "F": 32768})
        times[64 // tensor] = sum(route.communication for route in chain.forward)
    least = 2 * 4 * 8192 / W * math.sqrt(49_152 * 32_768 / 64)  # at the best X, 9.8 with one axis for each
    assert 8 < best_fsdp(49_152, 32_768, 64) < 16
    assert min(times, key=times.get) == 8
    assert all(seconds >= least for seconds in times.values())


def test_when_the_mix_waits():
    """Chapter 5: below 4 alpha^2 / (nx ny F) tokens per device, 396, collectives in turn; a quarter if they overlap."""
    assert least_mixed_batch(ALPHA, 32_768, 2, 1, overlapped=False) == pytest.approx(396, rel=0.01)
    assert least_mixed_batch(ALPHA, 30_000, 2, 1, overlapped=False) == pytest.approx(432, rel=0.01)
    assert least_mixed_batch(ALPHA, 32_768, 2, 1) == pytest.approx(99, rel=0.01)
    # At the best split of a batch that is just large enough, products take as long as the collectives of the search.
    devices, hidden = 64, 32_768
    least = least_mixed_batch(ALPHA, hidden, overlapped=False) * devices
    for fsdp in (4, 8):
        batch = hidden * fsdp**2 / devices  # for which this X is the best
        chain = layer("mixed", NamedMesh("xy", (fsdp, devices // fsdp)), {"B": int(batch), "D": 8192, "F": hidden})
        assert bound(chain.forward) == pytest.approx(math.sqrt(batch / least))
