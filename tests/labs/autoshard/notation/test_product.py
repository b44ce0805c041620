"""Products: the four cases, what multiplies as it is, and how a chain contracts."""

import pytest

from shoal.base.errors import UsageError
from shoal.engine.sharding.named_axes import NamedMesh
from shoal.labs.autoshard.notation.notation import parse
from shoal.labs.autoshard.notation.product import ShardedProduct, classify, list_products

MESH = NamedMesh("xyz", (2, 2, 2))


def read(text):
    return parse(text, MESH, {}, 8)[0]


@pytest.mark.parametrize(
    ("text", "found", "local"),
    [
        ("A[I, J] * B[J, K] -> C[I, K]", [1], "[I, K]"),
        ("A[Ix, J] * B[J, K] -> C[Ix, K]", [1], "[Ix, K]"),
        ("A[I, J] * B[J, Ky] -> C[I, Ky]", [1], "[I, Ky]"),
        ("A[Ix, J] * B[J, Ky] -> C[Ix, Ky]", [1], "[Ix, Ky]"),
        ("A[I, Jx] * B[J, K] -> C[I, K]", [2], None),
        ("A[I, J] * B[Jx, K] -> C[I, K]", [2], None),
        ("A[I, Jx] * B[Jy, K] -> C[I, K]", [2], None),
        ("A[Ix, J] * B[Jx, K] -> C[Ix, K]", [2], None),
        ("A[I, Jx] * B[Jx, K] -> C[I, K]", [3], "[I, K]{Ux}"),
        ("A[Iz, Jxy] * B[Jxy, K] -> C[I, Kx]", [3], "[Iz, K]{Uxy}"),
        ("A[I, Jxy] * B[Jyx, K] -> C[I, K]", [2], None),
        ("A[Ix, J] * B[J, Kx] -> C[Ix, K]", [4], None),
        ("A[Ix, Jy] * B[Jy, Kx] -> C[Ix, K]", [3, 4], None),
        ("A[Ix, Jy] * B[J, Kx] -> C[Ix, K]", [2, 4], None),
        ("A[I, J]{Ux} * B[J, K] -> C[I, K]", [1], "[I, K]{Ux}"),
        ("A[I, J]{Ux} * B[J, K]{Uy} -> C[I, K]", [1], "[I, K]{Uxy}"),
        ("A[I, J]{Ux} * B[J, K]{Ux} -> C[I, K]", [4], None),
        ("A[I, J]{Ux} * B[J, Kx] -> C[I, K]", [4], None),
        ("A[Ex, I, J] * B[Ex, J, Ky] -> C[Ex, I, K]", [1], "[Ex, I, Ky]"),
        ("A[Ex, I, J] * B[E, J, K] -> C[E, I, K]", [2], None),
    ],
)
def test_the_four_cases(text, found, local):
    """How to Scale Your Model, chapter 3, "Computation With Sharded Arrays", and what else can be written."""
    expression = read(text)
    (product,) = list_products(expression)
    a, b = (array.sharding for array in expression.arrays)
    assert [case for case, _ in classify(product, a, b)] == found
    got = product.local(a, b)
    assert (str(got) if got else None) == local


def test_flops_are_a_multiplication_and_an_addition_for_each_element_of_the_local_block():
    expression, sizes = parse("A[Ix, Jy] * B[Jy, K] -> C[Ix, K]", MESH, {"I": 6, "J": 10, "K": 7})
    a, b = (array.sharding for array in expression.arrays)
    assert list_products(expression)[0].flops(a, b, sizes, MESH) == 2 * 3 * 5 * 7


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("A[I, J] * B[J, K] -> C[K, I]", ["IJ,JK->KI"]),
        ("X[B, D] * Y[B, F] -> W[D, F]", ["BD,BF->DF"]),
        ("A[I] * B[J] -> C[I, J]", ["I,J->IJ"]),
        ("A[I, J] * B[I, J] -> C[I]", ["IJ,IJ->I"]),
        ("In[B, D] * Win[D, F] * Wout[F, D] -> Out[B, D]", ["BD,DF->BF", "BF,FD->BD"]),
        ("In[E, B, D] * Win[E, D, F] * Wout[E, F, D] -> Out[E, B, D]", ["EBD,EDF->EBF", "EBF,EFD->EBD"]),
    ],
)
def test_what_is_contracted(text, steps):
    assert [product.einsum for product in list_products(read(text))] == steps


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        ("A[I, J] * B[J, K] -> C[I]", "K] ->", "dim K is in neither the result nor the other factor"),
        ("A[I, J] * B[J, K] -> C[I, K, L]", "L]", "no factor leaves a dim L"),
        ("A[I, J] * B[J, K] * C[K, L] -> D[I, J]", "L] ->", "dim L is in neither"),
        ("A[I, J] * B[J, K] * C[K, L] -> D[I, L, K]", "K]", "dim K is contracted, so the result cannot have it"),
    ],
)
def test_what_is_no_product_is_pointed_at(text, at, message):
    with pytest.raises(UsageError) as refused:
        list_products(read(text))
    said, shown, pointer = str(refused.value).split("\n")
    assert message in said
    assert shown[pointer.index("^") :].startswith(at), pointer


def test_a_batch_dim_is_not_contracted():
    assert ShardedProduct("EIJ", "EJK", "EIK").contracted == "J"
    assert ShardedProduct("EIJ", "EJK", "EIK").shared == "EJ"
