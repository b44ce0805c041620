"""Every algorithm computes its collective, for any number of ranks, and costs what the textbook says."""

from dataclasses import replace
from fractions import Fraction
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.labs.collectives.checker import AlgorithmError, check, play
from shoal.labs.collectives.description import REDUCING, ROOTED, Collective, Description, Message
from shoal.labs.collectives.textbook import TEXTBOOK, describe

NAMES = [(collective, name) for collective, algorithms in TEXTBOOK.items() for name in algorithms]


@st.composite
def described(draw, max_ranks=34):
    """Any algorithm on any number of ranks, with any root, nodes and pipeline."""
    collective, name = draw(st.sampled_from(NAMES))
    ranks = draw(st.integers(1, 14 if collective is Collective.ALL_TO_ALL else max_ranks))
    return describe(
        collective,
        name,
        ranks,
        root=draw(st.integers(0, ranks - 1)),
        per_node=draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0])),
        segments=draw(st.integers(1, 20)),
    )


@pytest.mark.parametrize(("collective", "name"), NAMES)
def test_computes_its_collective_for_every_rank_count_and_root(collective, name):
    for ranks in range(1, 18):
        for root in range(ranks if collective in ROOTED else 1):
            check(describe(collective, name, ranks, root=root))
        for per_node in (n for n in range(1, ranks + 1) if ranks % n == 0 and name == "hierarchical"):
            check(describe(collective, name, ranks, root=ranks - 1, per_node=per_node))


@given(described())
def test_computes_its_collective(description):
    check(description)


@given(described(max_ranks=12), st.data())
def test_a_changed_description_is_refused_or_computes_the_same(description, data):
    """What passes after a message was left out, or doubled, was not needed, or does no harm: an independent look."""
    messages = list(description.messages)
    if not messages:
        return
    number = data.draw(st.integers(0, len(description.rounds) - 1))
    index = data.draw(st.integers(0, len(description.rounds[number]) - 1))
    rounds = [list(of_round) for of_round in description.rounds]
    del rounds[number][index]
    changed = replace(description, rounds=tuple(tuple(of_round) for of_round in rounds))
    try:
        check(changed)
        passed = True
    except AlgorithmError:
        passed = False
    assert passed == (numbers(changed) == numbers(description))


def numbers(description):
    """What the ranks hold at the end, where rank r brings 9^r to each block: a sum shows who is in it how often."""
    held = [dict.fromkeys(description.initial(rank), 9**rank) for rank in range(description.ranks)]
    for messages in description.rounds:
        before = [dict(own) for own in held]
        for source, target, blocks, reduce in messages:
            for block in blocks:
                if block not in before[source] or (reduce and block not in before[target]):
                    return "a block that is not there"
                held[target][block] = before[source][block] + (before[target][block] if reduce else 0)
    return [[held[rank].get(block) for block in description.final(rank)] for rank in range(description.ranks)]


# ---- costs ----------------------------------------------------------------------------------------------------------


def value(formula, description, per_node, segments):
    """A formula of the table."""
    n = description.ranks
    power = 1 << n.bit_length() - 1
    symbols = {
        "N": Fraction(n), "P": Fraction(power), "F": int(power < n), "L": Fraction(per_node),
        "G": Fraction(n, per_node), "B": Fraction(segments), "log": lambda x: ceil(log2(x)),
    }
    return eval(formula, symbols)


@pytest.mark.parametrize(("collective", "name"), NAMES)
def test_costs_what_the_table_says(collective, name):
    algorithm = TEXTBOOK[collective][name]
    for n in range(2, 34 if collective is not Collective.ALL_TO_ALL else 18):
        per_node = max(d for d in range(1, n) if n % d == 0)
        d = describe(collective, name, n, root=n - 1, per_node=per_node, segments=5)
        volume = value(algorithm.volume, d, per_node, 5)
        reduced = value(algorithm.reduced, d, per_node, 5)
        assert len(d.rounds) == value(algorithm.rounds, d, per_node, 5), n
        if algorithm.bound and n & (n - 1):
            assert volume / 2 < d.volume <= volume and reduced / 2 <= d.reduced <= reduced, n
        else:
            assert (d.volume, d.reduced) == (volume, reduced), n


@pytest.mark.parametrize("n", range(2, 34))
def test_the_classic_counts(n):
    ring = describe("all-reduce", "ring", n)
    assert len(ring.rounds) == 2 * (n - 1)
    assert ring.volume == ring.busiest == Fraction(2 * (n - 1), n)
    assert ring.total == 2 * (n - 1)
    assert all(len(of_round) == n for of_round in ring.rounds)  # everyone sends in every round
    tree = describe("broadcast", "tree", n, root=1)
    assert len(tree.rounds) == tree.volume == ceil(log2(n))
    assert len(list(tree.messages)) == tree.total == n - 1  # everyone but the root gets it once
    assert len(describe("broadcast", "flat", n).rounds) == n - 1
    assert len(describe("all-gather", "bruck", n).rounds) == ceil(log2(n))
    pairwise = describe("all-to-all", "pairwise", n)
    assert pairwise.volume == pairwise.busiest == Fraction(n - 1, n)
    through = describe("all-to-all", "bruck", n)
    assert len(through.rounds) == ceil(log2(n)) and through.total >= pairwise.total


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32])
def test_halving_doubling_moves_as_little_as_a_ring_in_log_rounds(n):
    halving = describe("all-reduce", "halving-doubling", n)
    ring = describe("all-reduce", "ring", n)
    assert (halving.volume, halving.reduced) == (ring.volume, ring.reduced)
    assert len(halving.rounds) == 2 * log2(n)


def test_only_what_must_cross_between_nodes_does():
    d = describe("all-reduce", "hierarchical", 32, per_node=8)
    crossing = sum(len(m.blocks) for m in d.messages if m.source // 8 != m.target // 8) * d.share
    assert crossing == 4 * Fraction(2 * 3, 4)  # each of 4 nodes as one rank of a ring of 4


# ---- what is refused ------------------------------------------------------------------------------------------------


def two_ranks(*rounds, collective=Collective.ALL_REDUCE, blocks=1):
    return Description(collective, "by hand", 2, 0, blocks, rounds)


SUM = (Message(0, 1, (0,), True), Message(1, 0, (0,), True))


@pytest.mark.parametrize(
    ("description", "why"),
    [
        (two_ranks(SUM[:1]), r"rank 0 ends without \[1\] in block 0"),
        (two_ranks(SUM, SUM), r"gets \[0, 1\] in block 0 a second time"),
        (two_ranks(SUM, blocks=2), r"ends without \[1\] in block 1"),
        (two_ranks((SUM[0], SUM[0])), "source of two messages"),
        (two_ranks((Message(0, 1, (0,), True), Message(1, 0, (0,)))), "rank 0 overwrites what it is sending"),
        (two_ranks((Message(0, 2, (0,), True),)), "does not exist"),
        (two_ranks((Message(0, 0, (0,)),)), "to itself"),
        (two_ranks((Message(0, 1, ()),)), "is empty"),
        (two_ranks((Message(0, 1, (0, 0)),)), "block twice"),
        (two_ranks((Message(1, 0, (0,)),), collective=Collective.BROADCAST), "sends block 0, which it does not hold"),
        (two_ranks((Message(0, 1, (0,), True),), collective=Collective.BROADCAST), "no block 0 to add to"),
        (two_ranks((), SUM), "no messages"),
    ],
)
def test_a_wrong_description_is_refused(description, why):
    check(two_ranks(SUM))
    with pytest.raises(AlgorithmError, match=why):
        check(description)


def test_play_shows_how_contributions_spread():
    sizes = [[len(held.get(0, ())) for held in state] for state in play(describe("reduce", "tree", 4))]
    assert sizes == [[1, 1, 1, 1], [2, 1, 2, 1], [4, 1, 2, 1]]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("all-redcue", "ring", 4), {}, "did you mean 'all-reduce'"),
        (("all-reduce", "rnig", 4), {}, "did you mean 'ring'"),
        (("broadcast", "tree", 4), {"root": 4}, "root 4 is no rank of 4; allowed: 0 to 3"),
        (("broadcast", "tree", 0), {}, "0 ranks"),
        (("all-reduce", "hierarchical", 8), {"per_node": 3}, "nearest allowed: 2 or 4"),
        (("broadcast", "ring", 8), {"segments": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_described(arguments, options, message):
    with pytest.raises(UsageError, match=message):
        describe(*arguments, **options)


def test_every_reduction_is_one():
    for collective, name in NAMES:
        reduces = any(message.reduce for message in describe(collective, name, 6, per_node=2).messages)
        assert reduces == (collective in REDUCING)
