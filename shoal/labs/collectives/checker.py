"""Prove that a description computes its collective, by executing it on sets of contributing ranks instead of numbers.

Every block on every rank holds the set of ranks whose contribution it has. A message that is reduced unites two sets,
which must have no rank in common, or a contribution would be counted twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.labs.collectives.description import REDUCING, Collective, Description, Message, Round

State = list[dict[int, frozenset[int]]]
"""For each rank, the blocks that it holds, and for each block the ranks that contributed to it."""


class AlgorithmError(ValueError):
    """A description does not compute its collective, or its ranks disagree about a message."""


def check(description: Description) -> None:
    """Prove that a description computes its collective.

    Raises:
        AlgorithmError: a message sends what its source does not hold, or adds a contribution a second time; a rank has
            two messages to send or to receive in one round, or overwrites what it is just sending; or a rank ends
            without one of its blocks or without a contribution to it.
    """
    *_, end = play(description)
    for rank, held in enumerate(end):
        for block in description.final(rank):
            missing = contributors(description, block) - held.get(block, frozenset())
            if missing:
                raise AlgorithmError(
                    f"{_name(description)}: rank {rank} ends without {sorted(missing)} in block {block}"
                )


def play(description: Description) -> Iterator[State]:
    """Yield the state at the start and after each round.

    Raises:
        AlgorithmError: a round is invalid (see `check`).
    """
    state: State = [
        {block: frozenset({rank}) for block in description.initial(rank)} for rank in range(description.ranks)
    ]
    yield state
    for number, messages in enumerate(description.rounds):
        conflicts = (_find_conflict(state, message) for message in messages)
        if problem := _find_malformed(description, messages) or next(filter(None, conflicts), ""):
            raise AlgorithmError(f"{_name(description)}, round {number}: {problem}")
        after = [dict(held) for held in state]
        for message in messages:
            for block in message.blocks:
                own = state[message.target].get(block, frozenset()) if message.reduce else frozenset()
                after[message.target][block] = own | state[message.source][block]
        state = after
        yield state


def contributors(description: Description, block: int) -> frozenset[int]:
    """Return the ranks that contribute to a finished block."""
    if description.collective in REDUCING:
        return frozenset(range(description.ranks))
    if description.collective in (Collective.BROADCAST, Collective.SCATTER):
        return frozenset({description.root})
    return frozenset({block // description.ranks if description.collective is Collective.ALL_TO_ALL else block})


def _find_malformed(description: Description, messages: Round) -> str:
    """Describe what is wrong with the messages of a round, whatever the ranks hold; empty if nothing."""
    if not messages:
        return "it has no messages"
    for end in ("source", "target"):
        ranks = [getattr(message, end) for message in messages]
        if len(set(ranks)) < len(ranks):
            return f"a rank is the {end} of two messages"
        if not set(ranks) <= set(range(description.ranks)):
            return f"a rank that is the {end} of a message does not exist"
    sent = {message.source: set(message.blocks) for message in messages}
    for message in messages:
        if not message.blocks or message.source == message.target or len(set(message.blocks)) < len(message.blocks):
            return f"{message} is empty, to itself, or has a block twice"
        if not message.reduce and sent.get(message.target, set()) & set(message.blocks):
            return f"rank {message.target} overwrites what it is sending"
    return ""


def _find_conflict(state: State, message: Message) -> str:
    """Describe why the ranks cannot exchange a message with the blocks that they hold; empty if they can."""
    for block in message.blocks:
        given = state[message.source].get(block)
        if given is None:
            return f"rank {message.source} sends block {block}, which it does not hold"
        if message.reduce:
            own = state[message.target].get(block)
            if own is None:
                return f"rank {message.target} has no block {block} to add to"
            if own & given:
                return f"rank {message.target} gets {sorted(own & given)} in block {block} a second time"
    return ""


def _name(description: Description) -> str:
    return f"{description.collective} by {description.algorithm} on {description.ranks} ranks"
