"""The state in host memory: what survives which loss, under any cut, and what never happens to it."""

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.engine.checkpoint import CheckpointError
from shoal.engine.checkpoint.write import SavePlan
from shoal.launch.worker_pool import RankError
from shoal.spec.config import save_config
from shoal.training.resilience import host_memory_dir, memory_slot
from shoal.training.resilience.memory_checkpoint import InMemoryCheckpointer, RankTopology
from shoal.training.resilience.restore import Restored
from tests.training.resilience.states import flip, go_on, here, keep, on_disk, pieces_of
from tests.trainings.runs import shoal, small_config

# ---- what survives ---------------------------------------------------------------------------------------------------


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_what_is_lost_with_a_node_is_in_its_neighbour_whatever_the_cut(pool, tmp_path_factory, data):
    home, disk = tmp_path_factory.mktemp("home") / "run", tmp_path_factory.mktemp("disk")
    world, later = data.draw(st.integers(1, 5), label="ranks"), data.draw(st.integers(1, 5), label="ranks later")
    node_ranks = data.draw(st.integers(1, 2), label="ranks of a node")
    cuts = data.draw(st.integers(0, 99)), data.draw(st.integers(0, 99))
    steps = [1, 2, 3][: data.draw(st.integers(1, 3), label="saves")]
    assert pool.run(keep, world, [home], steps, cuts[0], node_ranks) == [[]] * world
    nodes = -(-world // node_ranks)
    lost = data.draw(st.sets(st.integers(0, nodes - 1)), label="lost nodes")
    for node in lost:
        shutil.rmtree(home / f"node-{node:05d}")
    gone = any(node in lost and (node + 1) % nodes in lost for node in range(nodes))
    results = pool.run(go_on, later, [home], disk, cuts[1])
    for found, notes, right in results:
        assert right and notes == results[0][1]
        if gone:
            assert found is None
            assert lost == set(range(nodes)) or f"step {steps[-1]}: no node has the part of rank" in notes[0]
        else:
            assert found.step == steps[-1] and not notes
    assert not list(home.glob("restoring-*"))


@pytest.mark.parametrize("lost", [None, 0, 1, 2])
@pytest.mark.parametrize("later", [3, 4])
def test_between_hosts_the_copies_go_over_the_network(lost, later, pool, tmp_path):
    """Each host has a file system of its own, so that what a rank reads elsewhere must have been sent to it."""
    homes = [tmp_path / f"host-{i}" for i in range(3)]
    pool.run(keep, 6, homes, [1, 2], 5)
    for i, home in enumerate(homes):
        assert {p.name for p in home.iterdir()} == {"owner.json", f"node-{i:05d}"}
    if lost is not None:
        shutil.rmtree(homes[lost])  # another machine has taken its place
    for found, notes, right in pool.run(go_on, later, homes, tmp_path / "disk", 6):
        assert (found.step, notes, right) == (2, [], True)


def test_a_node_and_its_neighbour_lost_go_back_to_the_disk_and_say_so(pool, tmp_path):
    home = tmp_path / "home"
    pool.run(on_disk, 3, tmp_path / "disk", [1, 2], 3)
    pool.run(keep, 3, [home], [2, 3], 3, 1)
    assert pool.run(go_on, 3, [home], tmp_path / "disk", 4)[0][0].step == 3
    for node in (1, 2):
        shutil.rmtree(home / f"node-{node:05d}")
    for found, notes, right in pool.run(go_on, 2, [home], tmp_path / "disk", 4):
        assert right and (found.step, found.save) == (2, None) and "step-00000002" in found.source
        assert notes == [
            "in memory refused: step 3: no node has the part of rank 1 of 3.",
            "in memory refused: step 2: no node has the part of rank 1 of 3.",
        ]


@pytest.mark.parametrize("before, step, memory", [(None, 4, True), (3, 3, True), (2, 2, False), (0, None, False)])
def test_the_newest_of_both_is_taken_memory_first(before, step, memory, pool, tmp_path):
    pool.run(on_disk, 2, tmp_path / "disk", [1, 2, 4], 3)
    pool.run(keep, 2, [tmp_path / "home"], [3, 4], 3)
    for found, notes, right in pool.run(go_on, 2, [tmp_path / "home"], tmp_path / "disk", 3, before):
        assert right and not notes
        assert (found and found.step, bool(found and found.save)) == (step, memory)


@pytest.mark.parametrize("kind", ["data", "description"])
def test_of_two_copies_the_damaged_one_is_named_and_the_other_taken(kind, pool, tmp_path):
    home = tmp_path / "home"
    pool.run(keep, 2, [home], [1], 3, 1)
    (mine,) = [folder for folder in memory_slot.list_slots(home) if folder.match("node-00000/*-00000-*")]
    flip(next(mine.glob("*.safetensors")) if kind == "data" else mine / "part.json")
    for found, notes, right in pool.run(go_on, 2, [home], tmp_path / "disk", 3):
        assert right and found.step == 1
        assert len(notes) == 1 and str(mine) in notes[0] and "is damaged" in notes[0]


def test_with_every_copy_damaged_the_state_before_is_taken(pool, tmp_path):
    home = tmp_path / "home"
    pool.run(keep, 2, [home], [1, 2], 3, 1)
    for folder in home.glob("node-*/*-00000-*"):
        if memory_slot.read(folder).step == 2:
            flip(next(folder.glob("*.safetensors")))
    found, notes, right = pool.run(go_on, 1, [home], tmp_path / "disk", 3)[0]
    assert right and found.step == 1
    assert len(notes) == 3 and notes[2] == "in memory refused: step 2: no node has the part of rank 0 of 2."


# ---- killed while writing --------------------------------------------------------------------------------------------



def keep_and_die(moment: str, home: Path) -> None:
    """Three saves, in the last of which the process is killed."""
    owner, name = (SavePlan, "copy") if moment.endswith("copied") else (memory_slot.MemorySlot, "commit")
    original, calls = getattr(owner, name), 0

    def dies(*args: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3 and moment.startswith("before"):
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **options)
        if calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dies)
    keep([home], [1, 2, 3], 3)


@pytest.mark.parametrize(
    "moment", ["before it is copied", "when it is copied", "before it is described", "when it is described"]
)
def test_killed_while_it_writes_the_state_before_is_whole(pool, moment, tmp_path):
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        pool.run(keep_and_die, 1, moment, tmp_path / "home")
    found, notes, right = go_on([tmp_path / "home"], tmp_path / "disk", 3)
    assert right and not notes
    assert found.step == (3 if moment == "when it is described" else 2)


def go_on_with_an_unreadable_copy(home: Path, disk: Path) -> tuple[Restored | None, list[str], bool]:
    """Go on from a state that rank 1 cannot read, once it has been listed."""
    read, left = memory_slot.read, [dist.get_rank() == 1]

    def fail_once(folder: Path):
        if left[0] and sys._getframe(1).f_code.co_name != "read_all":
            left[0] = False
            raise CheckpointError(f"{folder} cannot be read.")
        return read(folder)

    with mock.patch.object(memory_slot, "read", fail_once):
        return go_on([home], disk, 4)


def test_ranks_of_one_host_refuse_a_state_together_that_one_of_them_cannot_read(pool, tmp_path):
    home, disk = tmp_path / "home", tmp_path / "disk"
    pool.run(on_disk, 2, disk, [1], 3)
    pool.run(keep, 2, [home], [1, 2, 3], 3)
    for found, notes, right in pool.run(go_on_with_an_unreadable_copy, 2, home, disk):
        assert right and found.step == 2 and len(notes) == 1 and notes[0].endswith("cannot be read.")


def leave_a_save(home: Path) -> tuple[float, bool]:
    """Leave a save in which the other rank takes no part; return the seconds, and whether its thread still waits."""
    rank, world, group = here()
    memory = InMemoryCheckpointer(home, home, group=group, places=RankTopology.collect(group, 1), report=str)
    begin, waits = time.monotonic(), False
    if rank == 0:
        memory.save(1, pieces_of(1, 3, rank, world), {"step": 1})
        saving = memory._pending
        memory.abandon()
        waits = saving is not None and not saving.done
    seconds = time.monotonic() - begin
    dist.barrier()
    if rank == 1:  # takes part after all
        memory.save(1, pieces_of(1, 3, rank, world), {"step": 1})
        memory.abandon()
    dist.barrier()
    return seconds, waits


def test_a_survivor_leaves_an_exchange_that_does_not_end(pool, tmp_path):
    """gloo may wait for a rank that ended during a transfer, until its timeout of half an hour."""
    (seconds, waits), _ = pool.run(leave_a_save, 2, tmp_path / "home")
    assert waits and seconds < 5


def test_a_slot_is_written_again_only_when_all_have_the_other(pool, tmp_path):
    """Of each rank there are two steps at most, and the newest that all have is there at any moment."""
    home = tmp_path / "home"
    pool.run(keep, 4, [home], [1, 2, 3, 4, 5], 3, 2)
    held: dict[int, list[int]] = {}
    for folder in memory_slot.list_slots(home):
        record = memory_slot.read(folder)
        held.setdefault(record.rank, []).append(record.step)
    assert {rank: sorted(steps) for rank, steps in held.items()} == {rank: [4, 4, 5, 5] for rank in range(4)}


# ---- one attempt after another ---------------------------------------------------------------------------------------


def test_what_a_run_goes_on_from_stays_until_it_has_something_newer(pool, tmp_path):
    home = tmp_path / "home"
    pool.run(keep, 2, [home], [1, 2], 3)
    found, _, _ = pool.run(go_on, 3, [home], tmp_path / "disk", 4)[0]
    pool.run(keep, 3, [home], [], 4, 0, found.save)  # it dies before its first save
    assert pool.run(go_on, 3, [home], tmp_path / "disk", 4)[0][0].save == found.save
    pool.run(keep, 3, [home], [3], 4, 0, found.save)
    assert {memory_slot.read(folder).step for folder in memory_slot.list_slots(home)} == {3}
    assert len({folder.name.split("-")[0] for folder in home.glob("node-*/*")}) == 1  # nothing torn is left either


def go_on_in_process(home: Path, steps: list[int], before: int | None) -> tuple[bool, list[set[int]]]:
    """Save states in memory and abandon the checkpointer; then restore a state and save with a new checkpointer.

    Returns:
        whether both attempts have the same memory; and the steps that it holds at the start and after each new save.
    """
    rank, world, group = here()
    places = RankTopology.collect(group, 1)
    first = InMemoryCheckpointer(home, home, group=group, places=places, report=str)
    for step in steps:
        first.save(step, pieces_of(step, 3, rank, world), {"step": step})
    first.wait()
    mapped = {each[rank].memory.data_ptr() for each in first._slots}
    first.abandon(reuse=True)
    group = dist.new_group(backend="gloo") if world > 1 else None
    found = go_on([home], home / "disk", 3, before)[0]
    again = InMemoryCheckpointer(
        home, home, group=group, places=RankTopology.collect(group, 1), keep=found and found.save, report=str
    )
    held = [steps_in(home, group)]
    for step in (9, 10):
        again.save(step, pieces_of(step, 3, rank, world), {"step": step})
        again.wait()
        held.append(steps_in(home, group))
    return mapped == {each[rank].memory.data_ptr() for each in again._slots}, held


def steps_in(home: Path, group: dist.ProcessGroup | None) -> set[int]:
    """Return the steps that memory holds, while no rank changes anything."""
    dist.barrier(group)
    held = {memory_slot.read(folder).step for folder in memory_slot.list_slots(home)}
    dist.barrier(group)
    return held


@pytest.mark.parametrize("before, kept", [(None, {3}), (2, {2}), (1, set())])
def test_a_survivor_saves_into_the_memory_that_it_has(pool, before, kept, tmp_path):
    home = tmp_path / "home"
    for same, held in pool.run(go_on_in_process, 2, home, [2, 3], before):
        assert same and held == [kept, {9}, {9, 10}]
    assert pool.run(go_on, 3, [home], tmp_path / "disk", 4)[0][0].step == 10


def test_a_new_run_does_not_find_what_an_older_one_left(pool, tmp_path):
    home = tmp_path / "home"
    pool.run(keep, 2, [home], [7], 3)
    pool.run(keep, 2, [home], [], 3)
    assert pool.run(go_on, 2, [home], tmp_path / "disk", 3)[0][0] is None


def test_parts_of_two_attempts_are_never_mixed(pool, tmp_path):
    """A node that comes back still holds the same step as another attempt computed it, in another layout."""
    home, other = tmp_path / "home", tmp_path / "other"
    pool.run(keep, 2, [home], [2], 3, 1)
    shutil.rmtree(home / "node-00001")
    pool.run(keep, 2, [other], [2], 4, 1)
    shutil.rmtree(other / "node-00000")
    shutil.copytree(home / "node-00000", other / "node-00000")
    for folder in [*other.glob("node-00000/*-00001-*"), *other.glob("node-00001/*-00000-*")]:
        shutil.rmtree(folder)
    found, notes, _ = pool.run(go_on, 2, [other], tmp_path / "disk", 3)[0]
    assert found is None and len(notes) == 2


def forgotten(home: Path) -> set[int]:
    memory = InMemoryCheckpointer(home, home, group=None, places=RankTopology.collect(None))
    for step in (1, 2):
        memory.save(step, pieces_of(step, 3, 0, 1), {"step": step})
    memory.forget(after=1)
    left = {memory_slot.read(folder).step for folder in memory_slot.list_slots(home)}
    for step in (4, 5):
        memory.save(step, pieces_of(step, 3, 0, 1), {"step": step})
    memory.wait()
    return left


def test_a_course_that_was_left_is_forgotten_and_the_slots_serve_again(tmp_path):
    assert forgotten(tmp_path / "home") == {1}
    for step in (5, 4):
        found, notes, right = go_on([tmp_path / "home"], tmp_path / "disk", 3, step)
        assert right and not notes and found.step == step


def nodes_of(node_ranks: int) -> list[tuple[int | None, list[int]]]:
    places = RankTopology.collect(here()[2], node_ranks)
    return [(places.receiver(r), places.senders(r)) for r in range(dist.get_world_size())]


def test_every_node_keeps_the_copies_of_the_one_before(pool):
    assert pool.run(nodes_of, 5, 2)[0] == [(2, [4]), (3, []), (4, [0]), (4, [1]), (0, [2, 3])]
    assert pool.run(nodes_of, 2, 0)[0] == [(None, []), (None, [])]


def test_a_new_run_does_not_go_on_from_a_deleted_one_of_its_name(corpus, tmp_path):
    folder, file = tmp_path / "run", tmp_path / "run.toml"
    config = small_config(corpus, train={"steps": 1, "validate_every": 0}, failover={"memory_folder": str(tmp_path)})
    save_config(config, file)
    left = host_memory_dir.run_dir(folder, config.failover)
    left.mkdir()
    (left / "slot").write_text("a state")
    code, said = shoal("train", file, "--run-folder", folder)
    assert code == 0, said
    assert not left.exists()
