"""Schedules as files: what torch writes is read, what is written torch reads."""

import csv
import io
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.pipeline.checker import check_program
from shoal.pipeline.program import COMPUTE, Action, Op, build_program
from shoal.pipeline.schedules import SCHEDULES
from shoal.pipeline.schedules.file import dump_csv, load_csv, schedule_from_csv
from tests.pipeline.schedules import torch_schedules

SYNCHRONOUS = sorted(name for name, schedule in SCHEDULES.items() if build_program(schedule, 2, 2).updates == 1)


def computations(actions: tuple[Action, ...]) -> list[str]:
    return [str(a) for a in actions if a.op in COMPUTE]


@pytest.mark.parametrize("transfers", [False, True])
@pytest.mark.parametrize("name", sorted(torch_schedules.NAMES))
def test_what_torch_writes_is_read(name: str, transfers: bool, tmp_path: Path) -> None:
    schedule = torch_schedules.of_torch(name, 2, 8)
    schedule._dump_csv(tmp_path / "torch.csv", "compute_comms" if transfers else "compute_only")
    read = schedule_from_csv(tmp_path / "torch.csv")
    program = build_program(read, 2, 8)
    check_program(program)
    for rank, actions in enumerate(program.actions):
        torchs = [a for a in schedule.pipeline_order[rank] if a is not None]
        flat = [str(part) for a in torchs for part in (a.sub_actions or (a,))]
        # torch puts a last weight half elsewhere when it adds its transfers, and never another pass.
        assert computations(actions) == flat or (transfers and sorted(computations(actions)) == sorted(flat))
    assert read.refuses(2, 8, 2) == ""
    assert "2 pipeline ranks and 8 micro-batches" in read.refuses(4, 8, 2)


@pytest.mark.parametrize("name", [n for n in SYNCHRONOUS if SCHEDULES[n].model_copies == 1])
def test_what_is_written_torch_reads(name: str, tmp_path: Path) -> None:
    program = build_program(SCHEDULES[name], 4, 8, virtual_stages=2)
    (tmp_path / "ours.csv").write_text(dump_csv(program))
    torchs = torch_schedules.empty(4, len(program.rank_stages(0)), 8)
    torchs._load_csv(tmp_path / "ours.csv")  # adds torch's transfers, and raises where it finds no order for them
    for rank, actions in enumerate(program.actions):
        assert [str(a) for a in torchs.pipeline_order[rank]] == computations(actions)
    assert torchs.stage_index_to_group_rank == dict(enumerate(program.stage_rank))


@pytest.mark.parametrize("name", [n for n in SYNCHRONOUS if SCHEDULES[n].model_copies == 1])
def test_torch_reads_each_cell_as_it_is_meant_transfers_too(name: str) -> None:
    program = build_program(SCHEDULES[name], 4, 8, virtual_stages=2)
    kinds = {"SEND_F": "SF", "RECV_F": "RF", "SEND_B": "SB", "RECV_B": "RB", "REDUCE_GRAD": "R"}
    for row, actions in zip(csv.reader(io.StringIO(dump_csv(program, transfers=True))), program.actions, strict=True):
        cells = [torch_schedules.schedules._Action.from_str(cell) for cell in row]
        read = [
            f"{c.stage_index}{kinds.get(c.computation_type.value, c.computation_type.value)}"
            f"{'' if c.microbatch_index is None else c.microbatch_index}" for c in cells
        ]
        assert read == [str(a) for a in actions if a.op not in (Op.STEP, Op.GATHER)]


@settings(deadline=None)
@given(st.sampled_from(SYNCHRONOUS), st.integers(1, 6), st.integers(1, 12), st.booleans())
def test_there_and_back(name: str, p: int, m: int, transfers: bool) -> None:
    schedule = SCHEDULES[name]
    assume(not schedule.refuses(p, m, schedule.virtual or 2))
    program = build_program(schedule, p, m, virtual_stages=2)
    assert load_csv(dump_csv(program, transfers=transfers)) == program


@settings(deadline=None)
@given(st.sampled_from(SYNCHRONOUS), st.data())
def test_a_damaged_file_is_refused_with_the_place(name: str, data: st.DataObject) -> None:
    rows = list(csv.reader(io.StringIO(dump_csv(build_program(SCHEDULES[name], 2, 4, virtual_stages=2)))))
    row = data.draw(st.integers(0, 1))
    place = data.draw(st.integers(0, len(rows[row]) - 1))
    match data.draw(st.sampled_from(["drop", "double", "garble", "move"])):
        case "drop":
            rows[row].pop(place)
            words = "is missing|no row has|comes before|deadlock|does not belong"
        case "double":
            rows[row].insert(place, rows[row][place])
            words = f"row {row + 1}, cell {place + 2}: .* is already in row {row + 1}, cell {place + 1}"
        case "garble":
            nonsense = ["F", "0X1", "0F", "-1F0", "0F0F", "(0F0;)OVERLAP_F_B", "٣F0"]
            rows[row][place] = data.draw(st.sampled_from(nonsense))
            words = f"row {row + 1}, cell {place + 1}: .* is no action; allowed"
        case "move":
            other = 1 - row
            rows[other].insert(0, rows[row].pop(place))
            words = "but stage .* is on row"
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    with pytest.raises(UsageError, match=words):
        load_csv(text.getvalue())


def test_files_that_are_no_schedule(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        schedule_from_csv(tmp_path / "nowhere.csv")
    for text, words in (
        ("", "is empty"), ("0UNSHARD", "no computation"), ("0F0,0B0\n\n", "row 2: no computation"),
        ("0F999999999,0B999999999", "no row has micro-batch 0"), ("7F0,7B0", "no row has stage 0"),
        ("0F0", "0I0 is missing"), ("0B0,0F0", "comes before"),
    ):
        with pytest.raises(UsageError, match=words):
            load_csv(text)


@pytest.mark.parametrize("text", [
    "0F0,0B0,2F1,2B1\n1F0,1B0,3F1,3B1\n",  # both copies of a stage on one rank
    "0F0,0B0,1F1,1B1\n",
    "0F0,0B0\n1F1,1B1\n2F2,2B2\n",  # three
    "0F0,0B0,5F1,5B1\n1F0,1B0,3F1,3B1\n2F0,2B0,4F1,4B1\n",  # a rank's stages with copies on two others
])
def test_copies_that_nobody_sums_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="its stages take different micro-batches"):
        load_csv(text, "mine.csv")
