"""The notation: what is written is read, what is read is written, and what cannot be is pointed at."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.engine.sharding.named_axes import NamedMesh, Sharding
from shoal.labs.autoshard.notation.notation import list_holders, parse, parse_mesh, parse_sizes
from tests.labs.autoshard.notation.drawn import SIZE, meshes, shardings

MESH = NamedMesh("xyz", (2, 8, 2))


@given(data=st.data(), mesh=meshes)
def test_what_is_written_is_read(data, mesh):
    a, b, c = (data.draw(shardings(dims, mesh)) for dims in ("IJ", "JK", "IK"))
    expression, sizes = parse(f"A{a} * B{b} -> C{c}", mesh, {"J": 2 * SIZE}, SIZE)
    assert [array.sharding for array in (*expression.arrays, expression.result)] == [a, b, c]
    assert [array.name for array in (*expression.arrays, expression.result)] == ["A", "B", "C"]
    assert sizes == {"I": SIZE, "J": 2 * SIZE, "K": SIZE}
    packed = f"A{a}*B{b}->C{c}".replace(" ", "")
    assert parse(packed, mesh, {}, SIZE)[0] == expression


def test_a_reading():
    expression, _ = parse("Win[D, Fyx]{Uz}", MESH, {}, 32)
    assert expression.arrays[0].sharding == Sharding((("D", ""), ("F", "yx")), "z")
    assert expression.result is None
    assert parse_mesh(" x=4, y=2 ") == NamedMesh("xy", (4, 2))
    assert parse_sizes("I=256,J=2") == {"I": 256, "J": 2}


@given(data=st.data(), mesh=meshes)
def test_every_rank_is_in_one_block_and_one_term(data, mesh):
    sharding = data.draw(shardings("IJ", mesh))
    held = list_holders(sharding, mesh)
    assert len(held) * SIZE**2 == SIZE**2 * mesh.size("".join(axes for _, axes in sharding.dims))
    for terms in held.values():
        assert len(terms) == mesh.size(sharding.unreduced)
        assert {len(ranks) for ranks in terms} == {sharding.copies(mesh)}
    assert sorted(rank for terms in held.values() for ranks in terms for rank in ranks) == list(range(mesh.ranks))


def test_the_first_axis_of_a_dim_is_the_outermost():
    mesh = NamedMesh("xy", (2, 2))
    assert list(list_holders(Sharding((("I", "xy"),)), mesh).values()) == [[[0]], [[1]], [[2]], [[3]]]
    assert list(list_holders(Sharding((("I", "yx"),)), mesh).values()) == [[[0]], [[2]], [[1]], [[3]]]
    assert mesh.groups("y") == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("text", "caret", "message"),
    [
        ("A[I, Jw]", "w", "the mesh has no axis 'w'; allowed: x, y, z"),
        ("A[Ix, Jx]", "x]", "axis x already shards dim I of this array"),
        ("A[Ixx]", "x]", "axis x already shards dim I of this array"),
        ("A[Ix]{Ux}", "x}", "axis x already shards dim I of this array"),
        ("A[Ix, I]", "I]", "dim I appears twice in one array"),
        ("A[ix]", "ix]", "a dim is expected here"),
        ("A[I J]", "J]", "`,` and another dim, or `]`"),
        ("A[I, J", "", "`,` and another dim, or `]`"),
        ("A", "", "`[` and the dims of A"),
        ("A[I]{x}", "x}", "`U` and the unreduced axes"),
        ("A[I]{U}", "}", "the axis along which it is unreduced"),
        ("A[I]{Ux", "", "`}` is expected"),
        ("A[I] B[I]", "B", "the end, `*` and another array"),
        ("A[I] * ", "", "an array's name is expected here"),
        ("A[I, J] * B[J, K]", "", "the result is missing"),
        ("A[I, Jy]", "Jy", "dim J of 12 does not divide evenly over 8 devices along y; nearest: --sizes J=8"),
        ("A[Ixz] -> A[Iyx]", "Iyx", "dim I of 24 does not divide evenly over 16 devices along yx"),
        ("A[I, L]", "L]", "dim L has no size; give it one: --sizes L=1024"),
    ],
)
def test_what_cannot_be_read_is_pointed_at(text, caret, message):
    with pytest.raises(UsageError) as refused:
        parse(text, MESH, {letter: size for letter, size in (("I", 24), ("J", 12), ("K", 8)) if letter in text})
    said, shown, pointer = str(refused.value).split("\n")
    assert message in said
    assert shown == f"  {text}"
    assert pointer.strip() == "^"
    at = pointer.index("^") - 2
    assert text[at:].startswith(caret) and (caret or at == len(text))


@pytest.mark.parametrize(
    ("read", "text", "caret", "message"),
    [
        (parse_mesh, "x=4,Y=2", "Y", "a mesh axis is one lower-case letter"),
        (parse_mesh, "x=4,x=2", "x=2", "'x' is given twice"),
        (parse_mesh, "x=0", "x", "with its devices, as x=4"),
        (parse_mesh, "4x2", "4", "a mesh axis"),
        (parse_sizes, "I=256,J", "J", "a dim is one upper-case letter with its elements"),
    ],
)
def test_options_that_cannot_be_read_are_pointed_at(read, text, caret, message):
    with pytest.raises(UsageError) as refused:
        read(text)
    said, shown, pointer = str(refused.value).split("\n")
    assert message in said
    assert shown[pointer.index("^") :].startswith(caret)


def test_a_size_of_no_dim_is_refused():
    with pytest.raises(UsageError, match=r"--sizes L=4: A\[I\] has no dim L"):
        parse("A[I]", MESH, {"I": 4, "L": 4})
