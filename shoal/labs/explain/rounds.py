"""Draw a collective round by round in a terminal: the blocks of every rank, and the messages."""

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
MOST_ROUNDS = 32  # largest number shown; of more, the first and the last
MOST_WIDTH = 88  # maximum width of all ranks' blocks; above it, each rank's blocks become one character


def cells(description: Description, held: State, rank: int) -> list[float]:
    """Return how complete each block on a rank is, 0 to 1; in an all-to-all, each of the N blocks of its output."""
    everyone = description.collective is Collective.ALL_TO_ALL
    blocks = description.final(rank) if everyone else range(description.blocks)
    wanted = description.ranks if description.collective in REDUCING else 1
    return [len(held[rank].get(block, ())) / wanted for block in blocks]


def describe_round(description: Description, messages: Round) -> str:
    """Describe the messages of a round; a shift by all ranks and a pair that exchanges are one entry each."""
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
    ways, parts = {(m.source, m.target): len(m.blocks) for m in messages}, []
    for (source, target), count in ways.items():
        if ways.get((target, source)) == count:
            if source < target:
                parts.append(f"{source}↔{target}")
        else:
            parts.append(f"{source}→{target}")
    return parts


def draw_rounds(description: Description, topology: Topology, size: float) -> RenderableType:
    """Draw a line for each round: its messages, its time and every rank's blocks after it.

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
                rows.append(("…", *[""] * (n if drawn else 0), "", f"{rounds - MOST_ROUNDS} more rounds"))
            continue
        seconds = show_seconds(price_round(messages, description.share, topology).seconds(size))
        words = describe_round(description, messages)
        words = words if len(words) < 120 else f"{words[:110]} …"
        rows.append((f"{number + 1}", *_held(description, held, wide, drawn), seconds, words))
    ranks = [f"{'rank ' if rank == 0 and wide else ''}{rank}" for rank in range(n if drawn else 0)]
    headings = ("", *ranks, "time", "messages")
    table = text_table(headings, rows, words={*range(len(headings))} - {len(headings) - 2}, gap=1)
    legend = Text("a rank's blocks: · none  ░▒▓ sums of some ranks  █ complete", style="dim")
    if not drawn:
        legend = Text(f"(blocks are drawn for up to {MOST_WIDTH // 2} ranks; these are {n})", style="dim")
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
    """Return a character for 0 to 1; the first is exactly 0, the last exactly 1."""
    return SHADES[0] if part == 0 else SHADES[-1] if part >= 1 else SHADES[1 + min(2, int(part * 3))]
