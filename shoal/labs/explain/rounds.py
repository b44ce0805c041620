"""A collective round by round in a terminal: what every rank holds, and who sends what to whom."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from shoal.base.units import show_bytes, show_seconds
from shoal.labs.collectives.checker import State, play
from shoal.labs.collectives.description import REDUCING, Collective, Description, Round
from shoal.labs.collectives.price import price_round
from shoal.labs.collectives.topology import Topology
from shoal.report.tables import text_table

SHADES = "·░▒▓█"
MOST_ROUNDS = 32  # that are shown; of more, the first and the last
MOST_WIDTH = 88  # of what all ranks hold; wider, and each rank's blocks become one sign


def cells(description: Description, held: State, rank: int) -> list[float]:
    """How complete each block on a rank is, 0 to 1; in an all-to-all, each of the N blocks that are meant for it."""
    everyone = description.collective is Collective.ALL_TO_ALL
    blocks = description.final(rank) if everyone else range(description.blocks)
    wanted = description.ranks if description.collective in REDUCING else 1
    return [len(held[rank].get(block, ())) / wanted for block in blocks]


def phrase(description: Description, messages: Round) -> str:
    """What is sent in a round, in words.

    A shift that all ranks make is said once, pairs that exchange are said once each.
    """
    n, sizes = description.ranks, sorted({len(message.blocks) for message in messages})
    added = {message.reduce for message in messages}
    how = {frozenset({True}): ", added", frozenset({False}): ""}.get(frozenset(added), ", some added")
    number = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    what = f"{number} block{'s' if sizes != [1] else ''}{how}"
    shifts = {(message.target - message.source) % n for message in messages}
    if len(messages) == n > 2 and len(shifts) == 1:
        shift = min(shifts)
        return f"every rank r → r {f'+ {shift}' if 2 * shift <= n else f'− {n - shift}'}: {what}"
    return f"{' '.join(_ways(messages))}: {what}"


def _ways(messages: Round) -> list[str]:
    ways, said = {(m.source, m.target): len(m.blocks) for m in messages}, []
    for (source, target), count in ways.items():
        if ways.get((target, source)) == count:
            if source < target:
                said.append(f"{source}↔{target}")
        else:
            said.append(f"{source}→{target}")
    return said


def picture(description: Description, topology: Topology, size: float) -> RenderableType:
    """A line for each round: its messages and time, and the blocks that every rank holds after it.

    Args:
        size: S in bytes.
    """
    n = description.ranks
    wide = n * (len(cells(description, next(play(description)), 0)) + 1) <= MOST_WIDTH
    drawn = n * 2 <= MOST_WIDTH
    rounds = len(description.rounds)
    states = play(description)
    first = next(states)
    rows: list[tuple[str | Text, ...]] = [("start", *_held(description, first, wide, drawn), "", "")]
    for number, (messages, held) in enumerate(zip(description.rounds, states, strict=True)):
        if rounds > MOST_ROUNDS and MOST_ROUNDS // 2 <= number < rounds - MOST_ROUNDS // 2:
            if number == MOST_ROUNDS // 2:
                rows.append(("…", *[""] * (n if drawn else 0), "", f"{rounds - MOST_ROUNDS} rounds more"))
            continue
        seconds = show_seconds(price_round(messages, description.share, topology).seconds(size))
        words = phrase(description, messages)
        words = words if len(words) < 120 else f"{words[:110]} …"
        rows.append((f"{number + 1}", *_held(description, held, wide, drawn), seconds, words))
    ranks = [f"{'rank ' if rank == 0 and wide else ''}{rank}" for rank in range(n if drawn else 0)]
    headings = ("", *ranks, "time", "messages")
    table = text_table(headings, rows, words={*range(len(headings))} - {len(headings) - 2}, gap=1)
    legend = Text("a rank's blocks: · none  ░▒▓ sums of some ranks  █ complete", style="dim")
    if not drawn:
        legend = Text(f"(what each of {n} ranks holds is drawn up to {MOST_WIDTH // 2} ranks)", style="dim")
    block = show_bytes(size * float(description.share))
    return Group(table, legend, Text(f"1 block = {description.share} S = {block}", style="dim"))


def _held(description: Description, held: State, wide: bool, drawn: bool) -> list[Text]:
    row = []
    for rank in range(description.ranks if drawn else 0):
        parts = cells(description, held, rank)
        if not wide:
            parts = [sum(parts) / len(parts)]
        text = Text()
        for part in parts:
            style = "dim" if part == 0 else "cyan" if part == 1 else "yellow"
            text.append(shade(part), style)
        row.append(text)
    return row


def shade(part: float) -> str:
    """One sign for 0 to 1, the first and the last for exactly these."""
    return SHADES[0] if part == 0 else SHADES[-1] if part >= 1 else SHADES[1 + min(2, int(part * 3))]
