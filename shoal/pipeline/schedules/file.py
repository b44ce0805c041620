"""Read and write schedules as CSV files in the format of torch.distributed.pipelining: one row per rank.

Each cell is an action. ``0F1`` is stage 0, forward, micro-batch 1; B is a full backward, I and W are its halves. torch
also writes the actions around the computations (``0SEND_F1``, ``0RECV_B1``, ``0UNSHARD``, ``0RESHARD``,
``0REDUCE_GRAD``) and pairs that it overlaps (``(0F1;1B0)OVERLAP_F_B``). Reading keeps only the computations, and splits
a pair into two consecutive actions. shoal then adds the transfers, the reductions and the optimizer itself, in an order
that it can prove.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

from shoal.base.errors import UsageError
from shoal.base.files import parse_csv, read_text
from shoal.pipeline.checker import check_program
from shoal.pipeline.program import COMPUTE, Action, Op, Program, ProgramError, Schedule, build_program

AROUND = {  # torch's names of actions that are not computations
    Op.SEND_FORWARD: "SEND_F",
    Op.RECV_FORWARD: "RECV_F",
    Op.SEND_BACKWARD: "SEND_B",
    Op.RECV_BACKWARD: "RECV_B",
    Op.REDUCE: "REDUCE_GRAD",
}
LEFT_OUT = (Op.STEP, Op.GATHER)  # torch leaves them to the trainer
COMPUTATION = re.compile(r"([0-9]+)([FBIW])([0-9]+)")
OTHER = re.compile(rf"[0-9]+({'|'.join(AROUND.values())}|UNSHARD|RESHARD)[0-9]*")
PAIR = re.compile(r"\(([^();]+(?:;[^();]+)*)\)OVERLAP_F_B")


def dump_csv(program: Program, *, transfers: bool = False) -> str:
    """Return a program as CSV text that torch can read.

    Args:
        transfers: include sends, receives and reductions (torch's format "compute_comms"); if False, "compute_only".

    Raises:
        UsageError: the program has sequence slices or weight versions, which the format cannot express.
    """
    if program.sequence_slices > 1 or program.updates > 1:
        raise UsageError(
            "torch's format of a schedule has no slices of a sequence and no versions of weights, and this program has "
            f"{program.sequence_slices} slices and {program.updates} updates: write a synchronous schedule without "
            "slices"
        )
    rows = io.StringIO()
    writer = csv.writer(rows)
    for actions in program.actions:
        written = [a for a in actions if (a.op not in LEFT_OUT if transfers else a.op in COMPUTE)]
        writer.writerow([
            f"{a.stage}{AROUND.get(a.op, a.op.value)}{a.microbatch if a.microbatch >= 0 else ''}" for a in written
        ])
    return rows.getvalue()


def load_csv(text: str, name: str = "schedule") -> Program:
    """Parse a schedule file's text into a program.

    Raises:
        UsageError: the text is not a complete schedule; the message names the row and the cell where possible.
    """
    return _read(text, name)[1]


def schedule_from_csv(path: str | Path) -> Schedule:
    """Load a schedule from a file, with the number of pipeline ranks and micro-batches that it was written for.

    Raises:
        UsageError: the file does not exist, or it does not hold a complete schedule.
    """
    try:
        text = read_text(path)
    except UsageError as error:
        raise UsageError(
            f"schedule file {path}: {error}\n  Give a text file as torch.distributed.pipelining writes it."
        ) from None
    return _read(text, str(path))[0]


def _read(text: str, name: str) -> tuple[Schedule, Program]:
    orders = _orders(text, name)
    ranks, microbatches = len(orders), 1 + max(action.microbatch for order in orders for action in order)
    placement = _placement(orders, name)
    through = [{a.microbatch for a in order if a.stage == s} for s, r in enumerate(placement) for order in [orders[r]]]
    copies = len({frozenset(stage) for stage in through})
    copies = copies if len(placement) % copies == 0 else 1
    _check_copies(name, placement, copies, ranks)

    def refuses(given_ranks: int, given: int, virtual: int) -> str:
        if (given_ranks, given) == (ranks, microbatches):
            return ""
        return f"{name} was written for {ranks} pipeline ranks and {microbatches} micro-batches: use those"

    schedule = Schedule(
        f"file:{name}", "torch.distributed.pipelining, a file", lambda *_: orders, lambda *_: placement,
        virtual=max(map(placement.count, range(ranks))), model_copies=copies, refuses=refuses,
        order=lambda rank, *_: orders[rank],
    )
    program = build_program(schedule, ranks, microbatches)
    try:
        check_program(program)
    except ProgramError as error:
        raise UsageError(f"schedule file {name} (a row for each pipeline rank, from 0): {error}") from None
    return schedule, program


def _check_copies(name: str, placement: Sequence[int], copies: int, ranks: int) -> None:
    """Check that the two copies of each stage are on two different ranks, which sum their gradients."""
    depth = len(placement) // copies
    others = [{placement[(s + depth) % len(placement)] for s, held in enumerate(placement) if held == rank}
              for rank in range(ranks)]
    if copies > 2 or (copies == 2 and any(len(other) > 1 or rank in other for rank, other in enumerate(others))):
        raise UsageError(
            f"schedule file {name}: its stages take different micro-batches, as {copies} copies of the model do."
            "\n  Two copies can be trained if each rank has the second copies of one other rank's stages, as in "
            "dualpipe. Otherwise give every stage all micro-batches."
        )


def _orders(text: str, name: str) -> list[list[Action]]:
    orders: list[list[Action]] = []
    seen: dict[Action, str] = {}
    try:
        rows = parse_csv(text)
    except ValueError as error:
        raise UsageError(f"schedule file {name} is not CSV: {error}") from None
    for rank, cells in enumerate(rows):
        order: list[Action] = []
        for column, cell in enumerate(cells):
            place = f"row {rank + 1}, cell {column + 1}"
            for action in _actions(cell.strip(), f"schedule file {name}, {place}"):
                if action in seen:
                    raise UsageError(f"schedule file {name}, {place}: {action} is already in {seen[action]}")
                seen[action] = place
                order.append(action)
        if not order:
            raise UsageError(f"schedule file {name}, row {rank + 1}: no computation in it; cells are like 0F0, 0B0")
        orders.append(order)
    if not orders:
        raise UsageError(f"schedule file {name} is empty; it needs a row for each rank, with cells like 0F0, 0B0")
    _check_numbers("micro-batch", {action.microbatch for action in seen}, name)
    _check_numbers("stage", {action.stage for action in seen}, name)
    return orders


def _check_numbers(what: str, given: set[int], name: str) -> None:
    """Check that stages and micro-batches are numbered from 0 without a gap."""
    missing = next(number for number in range(len(given) + 1) if number not in given)
    if missing < len(given):
        raise UsageError(f"schedule file {name}: it has {what} {max(given)}, but no row has {what} {missing}")


def _actions(cell: str, place: str) -> list[Action]:
    if pair := PAIR.fullmatch(cell):
        return [action for part in pair[1].split(";") for action in _actions(part.strip(), place)]
    if computation := COMPUTATION.fullmatch(cell):
        stage, op, microbatch = computation.groups()
        return [Action(Op(op), int(stage), int(microbatch))]
    if cell and not OTHER.fullmatch(cell):
        raise UsageError(
            f"{place}: {cell!r} is no action; allowed are 0F1, 0B1, 0I1, 0W1 (stage, pass, micro-batch), "
            f"(0F1;1B0)OVERLAP_F_B, 0UNSHARD, 0RESHARD and {', '.join('0' + name for name in AROUND.values())}"
        )
    return []


def _placement(orders: list[list[Action]], name: str) -> tuple[int, ...]:
    holder: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for action in order:
            other = holder.setdefault(action.stage, rank)
            if other != rank:
                raise UsageError(
                    f"schedule file {name}: row {rank + 1} has {action}, but stage {action.stage} is on row {other + 1}"
                )
    return tuple(holder[stage] for stage in range(len(holder)))
