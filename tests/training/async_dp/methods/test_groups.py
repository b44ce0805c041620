"""Who meets whom: tournaments and exponential graphs of any size."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from shoal.training.async_dp.methods.gossip import exponential, hops
from shoal.training.async_dp.methods.wagma import tournament

living = st.sets(st.integers(0, 40), min_size=1, max_size=13).map(sorted)


@given(living, st.integers(1, 4).map(lambda pairs: 2 * pairs), st.integers(0, 1000))
def test_every_pair_meets_in_one_round_of_the_tournament(ranks, size, start):
    rounds = len(ranks) - 1 if len(ranks) % 2 == 0 else len(ranks)
    met = set()
    for step in range(start, start + max(1, rounds)):
        groups = tournament(step, ranks, size)
        assert sorted(rank for group in groups for rank in group) == ranks  # everyone is in one group
        assert all(len(group) <= max(size, len(ranks) if size >= len(ranks) else size) for group in groups)
        met |= {frozenset(pair) for group in groups for pair in combinations(group, 2)}
    assert met == {frozenset(pair) for pair in combinations(ranks, 2)}


@given(living, st.integers(0, 1000))
def test_the_exponential_graph_has_one_sender_and_one_receiver_each_and_mixes_all(ranks, start):
    knows = {rank: {rank} for rank in ranks}
    for step in range(start, start + 2 * hops(len(ranks))):
        sent = {rank: exponential(step, rank, ranks)[0] for rank in ranks}
        assert sorted(sent.values()) == ranks
        assert all(exponential(step, to, ranks)[1] == rank for rank, to in sent.items())
        before = {rank: set(known) for rank, known in knows.items()}
        for rank, to in sent.items():
            knows[to] |= before[rank]
    assert all(known == set(ranks) for known in knows.values())


@given(living)
def test_full_groups_are_all_that_live(ranks):
    assert tournament(3, ranks, len(ranks)) == [ranks]
