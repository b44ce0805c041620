"""Every route gives the plain product on real ranks and sends what it counts; chains give autograd's gradients."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine.sharding.named_axes import NamedMesh
from shoal.labs.autoshard.notation.moves import count_sent
from shoal.labs.autoshard.notation.notation import parse
from shoal.labs.autoshard.notation.product import ShardedProduct
from shoal.labs.autoshard.notation.run import compare
from shoal.labs.autoshard.notation.search import add_backward, find_forward
from tests.labs.autoshard.notation.drawn import SIZE, meshes, planner, run_routes, shardings

SIZES = dict.fromkeys("BDFIJKE", SIZE)


@settings(max_examples=8)
@given(data=st.data(), mesh=meshes, links=st.booleans())
def test_every_route_gives_the_plain_product_and_sends_what_it_counts(pool, data, mesh, links):
    product = data.draw(st.sampled_from([
        ShardedProduct("IJ", "JK", "IK"), ShardedProduct("IJ", "JK", "KI"), ShardedProduct("IJ", "IK", "JK"),
        ShardedProduct("EIJ", "EJK", "EIK"),
    ]))  # fmt: skip
    a = data.draw(shardings(product.left, mesh))
    b = data.draw(shardings(product.right, mesh))
    wanted = data.draw(shardings(product.out, mesh))
    plan = planner(mesh, SIZES, links=links)
    found = plan.routes(product, plan.reach({a: 0.0}), plan.reach({b: 0.0}), wanted)
    some = data.draw(st.lists(st.sampled_from(found), min_size=1, max_size=10, unique_by=id))
    routes = [found[0][1], *(route for _, route in some)]
    ranks = pool.run(run_routes, mesh.ranks, routes, mesh, SIZES)
    for i, route in enumerate(routes):
        assert route.out == wanted
        assert max(results[i][0] for results in ranks) < 1e-11, route
        sent = [results[i][1] for results in ranks]
        assert (max(sent), sum(sent)) == count_sent(route.moves, mesh, SIZES), route


CHAINS = [
    "In[Bx, D] * Win[D, F] * Wout[F, D] -> Out[Bx, D]",
    "In[Bx, D] * Win[Dx, F] * Wout[F, Dx] -> Out[Bx, D]",
    "In[B, Dy] * Win[D, Fy] * Wout[Fy, D] -> Out[B, Dy]",
    "In[Bx, Dy] * Win[Dx, Fy] * Wout[Fy, Dx] -> Out[Bx, Dy]",
    "In[Bx, D] * Win[D, Fy] * Wout[Fy, D] -> Out[Bx, D]",
    "In[Bx, D] * Win[D, Fy] * Wout[Fy, D] -> Out[Bx, D]{Uy}",
    "A[Ix, J]{Uy} * B[Jx, K] * C[K, Dyx] * W[D, Fy] -> E[F, Ix]",
    "In[Exy, B, D] * Win[Ex, Dy, F] * Wout[E, Fx, Dy] -> Out[Ey, Bx, D]",
]


@pytest.mark.parametrize("text", CHAINS)
def test_a_chain_and_its_gradients_are_autograds(pool, text):
    mesh = NamedMesh("xy", (4, 2))
    expression, sizes = parse(text, mesh, {}, SIZE)
    plan = planner(mesh, sizes)
    chain = add_backward(expression, find_forward(expression, plan)[0][1], plan)
    assert chain.forward[-1].out == expression.result.sharding
    for errors in pool.run(compare, 8, chain.forward, chain, expression, mesh, sizes):
        assert set(errors) == {expression.result.name, *(f"d{array.name}" for array in expression.arrays)}
        assert max(errors.values()) < 1e-9


@settings(max_examples=6)
@given(data=st.data(), mesh=meshes)
def test_any_chain_and_its_gradients_are_autograds(pool, data, mesh):
    letters = ["BD", "DF", "FD", "BD"]
    names = ["In", "Win", "Wout", "Out"]
    arrays = [f"{name}{data.draw(shardings(dims, mesh))}" for name, dims in zip(names, letters, strict=True)]
    expression, sizes = parse(f"{' * '.join(arrays[:3])} -> {arrays[3]}", mesh, {}, SIZE)
    plan = planner(mesh, sizes, links=False)
    chain = add_backward(expression, find_forward(expression, plan)[0][1], plan)
    for errors in pool.run(compare, mesh.ranks, chain.forward, chain, expression, mesh, sizes):
        assert max(errors.values()) < 1e-9, arrays
