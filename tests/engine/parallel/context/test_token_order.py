"""Every order gives each token to one rank, and zig-zag gives all the same work."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine.parallel.context.causal_blocks import split_scores
from shoal.engine.parallel.context.token_order import ORDERS, assign_tokens, count_tokens, join_ranges, split_chunks
from shoal.spec.layout import Layout

ANY_ORDER = st.sampled_from(sorted(ORDERS))


@st.composite
def spreads(draw: st.DrawFn):
    """A spread of any sequence, in slices or whole, and its length."""
    ring, ulysses, multiple = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    order = draw(ANY_ORDER) if ring > 1 else "zig-zag"
    layout = Layout(cp=ring * ulysses, ulysses=ulysses, cp_order=order, tp=multiple, sequence_parallel=multiple > 1)
    sizes = st.integers(2 * layout.cp, 2 * layout.cp + 9).map(lambda units: units * multiple)
    slices = draw(st.lists(sizes, min_size=1, max_size=3))
    return assign_tokens(layout, sum(slices), slices), sum(slices), slices, multiple


def tokens(chunks) -> list[int]:
    return [token for chunk in chunks for token in chunk]


@given(spreads())
def test_every_token_is_on_one_rank_of_its_slice(drawn) -> None:
    found, length, slices, multiple = drawn
    ranks = range(found.ring * found.ulysses)
    assert sorted(t for rank in ranks for t in tokens(found.chunks(rank))) == list(range(length))
    start = 0
    for i, size in enumerate(slices):
        mine = [tokens(found.chunks(rank, range(i, i + 1))) for rank in ranks]
        assert sorted(chain(*mine)) == list(range(start, start + size))
        assert [len(m) for m in mine] == [found.lengths(rank)[i] for rank in ranks]
        assert all(m and len(m) % multiple == 0 for m in mine)
        start += size
    for place in range(found.ring):
        whole = tokens(found.ring_chunks(place, range(len(slices))))
        assert whole == [t for rank in found.ranks(place) for t in tokens(found.chunks(rank))]


@settings(max_examples=80, deadline=None)
@given(spreads(), st.sampled_from([None, 1, 2, 5, 11, 40]))
def test_pieces_are_the_causal_mask_each_score_once(drawn, window: int | None) -> None:
    found, _, slices, _ = drawn
    for last in range(len(slices)):
        for some in (range(last, last + 1), range(last + 1)):  # one slice, or all at once
            for place in range(found.ring):
                queries = found.ring_chunks(place, some)
                for other in range(found.ring):
                    keys = found.ring_chunks(other, range(last + 1))
                    seen = [[0] * count_tokens(keys) for _ in range(count_tokens(queries))]
                    for piece in split_scores(queries, keys, window):
                        for i in range(piece.rows.start, piece.rows.stop):
                            columns, own = range(piece.columns.start, piece.columns.stop), i - piece.rows.start
                            first = 0 if piece.since is None else max(0, own + piece.since)
                            used = columns[first : own + 1 if piece.causal else None]
                            assert len(used), "no row of a block is empty"
                            for j in used:
                                seen[i][j] += 1
                    near = window or sum(slices)
                    assert seen == [[int(q - near < k <= q) for k in tokens(keys)] for q in tokens(queries)]


@given(st.integers(1, 8), st.integers(1, 16))
def test_zig_zag_is_equal_work_in_every_step(places: int, chunk: int) -> None:
    """Step 0 has the diagonal; in every other a rank computes 2 c of its 4 c^2 scores, whichever block it has."""
    held = ORDERS["zig-zag"](2 * places * chunk, places, 1)
    for step in range(places):
        work = {
            sum(block.scores for block in split_scores(held[i], held[(i - step) % places])) for i in range(places)
        }
        assert work == ({2 * chunk * (2 * chunk + 1) // 2} if step == 0 else {2 * chunk**2})


@pytest.mark.parametrize(("order", "worst"), [("zig-zag", 1.0), ("striped", 1.0), ("contiguous", 1.75)])
def test_what_an_order_costs(order: str, worst: float) -> None:
    """The slowest place's scores over the mean: 2 - 1/R for runs; stripes lose half a diagonal."""
    held = ORDERS[order](4096, 4, 1)
    work = [sum(p.scores for other in held for p in split_scores(mine, other)) for mine in held]
    assert sum(work) == 4096 * 4097 // 2
    assert max(work) / (sum(work) / 4) == pytest.approx(worst, rel=2e-3)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_cut_keeps_every_token_in_order(sizes: list[int], data: st.DataObject) -> None:
    starts = [sum(sizes[:i]) * 2 for i in range(len(sizes))]  # with gaps
    chunks = join_ranges([range(start, start + size) for start, size in zip(starts, sizes, strict=True)])
    total, lengths = count_tokens(chunks), []
    while sum(lengths) < total:
        lengths.append(data.draw(st.integers(1, total - sum(lengths))))
    assert list(chain(*map(tokens, split_chunks(chunks, lengths)))) == tokens(chunks)
    assert [count_tokens(part) for part in split_chunks(chunks, lengths)] == lengths
