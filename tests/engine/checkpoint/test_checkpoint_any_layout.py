"""What one layout saves, any other loads, bit for bit."""

import tempfile
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.base.boxes import Box, Piece
from shoal.engine.checkpoint import Checkpointer, CheckpointError, list_checkpoints, load, newest_good, verify
from shoal.engine.checkpoint.load import describe_checkpoint, load_checkpoint
from shoal.engine.checkpoint.manifest import check_cover
from tests.engine.checkpoint.cuts import blank, cut, random_boxes, random_values, same, whole, write_checkpoint

shapes = st.lists(st.lists(st.integers(0, 6), max_size=4).map(tuple), min_size=1, max_size=3)


@settings(deadline=None, max_examples=100)
@given(shapes, st.integers(1, 4), st.integers(1, 4), st.sampled_from((8, 24, 64, 1 << 20)), st.integers(0, 2**32))
def test_any_cut_loads_into_any_other(shapes, saved_on, loaded_on, box_bytes, seed):
    rng = Random(seed)
    values = random_values(rng, {f"t{i}": shape for i, shape in enumerate(shapes)})
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder, "step-00000001"), cut(rng, values, saved_on), box_bytes=box_bytes)
        verify(path)
        states = blank(cut(rng, values, loaded_on))
        for state in states:
            load(path, state)
    for state in states:
        for name, pieces in state.items():
            for piece in pieces:
                assert same(piece.tensor, values[name][piece.box.slices]), name


def test_a_whole_checkpoint_is_loaded_by_name(tmp_path):
    rng = Random(5)
    values = random_values(rng, {"model.a": (5, 3), "model.b": (), "optimizer.a": (5, 3), "optimizer.none": (0, 4)})
    path = write_checkpoint(tmp_path / "step-00000001", cut(rng, values, 3), box_bytes=24)
    assert len(describe_checkpoint(path).tensors["model.a"].boxes) > 1
    for prefix in ("", "model.", "optimizer.", "x"):
        found = load_checkpoint(str(path), prefix=prefix)
        assert found.keys() == {name for name in values if name.startswith(prefix)}
        assert all(same(tensor, values[name]) for name, tensor in found.items())


def test_a_file_is_plain_safetensors(tmp_path):
    from safetensors.torch import load_file

    value = torch.arange(12.0).reshape(4, 3)
    path = write_checkpoint(tmp_path / "step-00000001", [whole({"model.w": value})], box_bytes=1 << 20)
    with open(path / "rank-00000.safetensors", "rb") as file:
        assert int.from_bytes(file.read(8), "little") % 8 == 0  # aligned, which some tools need
    assert torch.equal(load_file(path / "rank-00000.safetensors")["model.w[0:4,0:3]"], value)
    found = describe_checkpoint(path)
    saved = found.tensors["model.w"]
    assert (found.step, len(found.files), list(found.tensors)) == (1, 1, ["model.w"])
    assert (saved.dtype, saved.shape, len(saved.boxes), found.bytes) == ("F32", (4, 3), 1, 48)


def test_loading_writes_into_the_memory_of_a_parameter(tmp_path):
    path = write_checkpoint(tmp_path / "step-00000001", [whole({"w": torch.ones(2, 3), "b": torch.tensor(5.0)})])
    weight, scalar = torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(()))
    load(path, whole({"w": weight, "b": scalar}))
    assert weight.sum() == 6
    assert scalar == 5


# ---- nothing may be lost ---------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32))
@settings(deadline=None)
def test_a_lost_or_doubled_box_is_named(seed):
    rng = Random(seed)
    shape = tuple(rng.randrange(1, 6) for _ in range(rng.randrange(4)))
    boxes = random_boxes(rng, shape)
    check_cover("t", shape, boxes)
    victim = rng.randrange(len(boxes))
    with pytest.raises(CheckpointError, match=r"tensor 't'.*would be lost"):
        check_cover("t", shape, boxes[:victim] + boxes[victim + 1 :])
    with pytest.raises(CheckpointError, match=r"tensor 't'.*overlap"):
        check_cover("t", shape, [*boxes, boxes[victim]])


def test_a_box_outside_its_tensor_is_named():
    with pytest.raises(CheckpointError, match=r"'t'.*\[2:5\] reaches outside"):
        check_cover("t", (4,), [Box((0,), (2,)), Box((2,), (3,))])


def test_a_tensor_that_no_rank_holds_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no rank holds a piece of tensor 'layers.3.w'"):
        write_checkpoint(tmp_path / "x", [{"layers.3.w": []}, {}])


def test_ranks_that_disagree_about_a_tensor_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"'w' is F32"):
        write_checkpoint(tmp_path / "x", [whole({"w": torch.ones(2)}), whole({"w": torch.ones(3)})])
    with pytest.raises(CheckpointError, match=r"'w' is F32 .* on one rank and BF16"):
        write_checkpoint(tmp_path / "y", [
            {"w": [Piece((4,), Box((2 * i,), (2,)), torch.ones(2, dtype=dtype))]}
            for i, dtype in enumerate((torch.float32, torch.bfloat16))
        ])


@pytest.mark.parametrize("ranks, what", [((0, 2), "2 of 6 elements would be lost"), ((0, 1, 1, 2), "overlap")])
def test_what_is_saved_twice_or_by_no_rank_is_no_checkpoint(tmp_path, ranks, what):
    """A rank that is missing, or whose copy is taken for the one to save, is not noticed by any other."""
    states = [{"w": [Piece((6,), Box((2 * i,), (2,)), torch.ones(2))]} for i in ranks]
    with pytest.raises(CheckpointError, match=what):
        write_checkpoint(tmp_path / "step-00000001", states)
    assert not list_checkpoints(tmp_path)


# ---- on real ranks ---------------------------------------------------------------------------------------------------


def save_on_ranks(folder: str, seed: int) -> float:
    group = dist.new_group(backend="gloo")
    values = random_values(Random(seed), {"a": (13, 7), "b": (5,), "c": (), "d": (4, 3, 2)})
    state = cut(Random(seed + 1), values, dist.get_world_size())[dist.get_rank()]
    checkpointer = Checkpointer(Path(folder), group=group, keep=2, asynchronous=True)
    for step in (1, 2, 3):
        stall = checkpointer.save(step, state, {"model": {"layers": 2}, "tokens": step * 100})
        dist.all_reduce(torch.ones(3))  # the training goes on, on its own group
    checkpointer.close()
    return stall


def load_on_ranks(folder: str, seed: int) -> tuple[int, int, bool]:
    group = dist.new_group(backend="gloo")
    values = random_values(Random(seed), {"a": (13, 7), "b": (5,), "c": (), "d": (4, 3, 2)})
    found, refused = newest_good(Path(folder))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    state = blank(cut(Random(seed + 2), values, ranks))[rank]
    state = {name: state[name] for name in sorted(state)[rank::ranks]}  # like pipeline stages: no rank wants every name
    extra = load(found.path, state, group=group, model={"layers": 2})
    equal = all(same(p.tensor, values[name][p.box.slices]) for name, pieces in state.items() for p in pieces)
    return len(refused), extra["tokens"], equal


def some_ranks_cannot_write(folder: str) -> str:
    group = dist.new_group(backend="gloo")
    checkpointer = Checkpointer(Path(folder), group=group, keep=2, asynchronous=True)
    rank = dist.get_rank()
    odd = torch.ones(2, dtype=torch.complex64 if rank else torch.float32)
    checkpointer.save(7, {"w": [Piece((6,), Box((2 * rank,), (2,)), odd)]}, {})
    try:
        checkpointer.close()
    except CheckpointError as error:
        return str(error)
    return "nothing"


def save_without_rank_1(folder: str) -> None:
    rank = dist.get_rank()
    checkpointer = Checkpointer(Path(folder), group=dist.new_group(backend="gloo"), keep=2, asynchronous=True)
    remaining = dist.new_group([0, 2], backend="gloo")
    state = {"w": [Piece((4,), Box((rank,), (2,)), torch.ones(2) * rank)] if rank != 1 else []}
    checkpointer.save(1, state, {}, block=True)
    if rank != 1:
        checkpointer.regroup(remaining)
        checkpointer.save(2, state, {}, block=True)
    checkpointer.close()


def test_the_ranks_that_remain_save_without_the_lost_one(pool, tmp_path):
    pool.run(save_without_rank_1, 3, str(tmp_path))
    for step in (1, 2):
        assert load_checkpoint(tmp_path / f"step-0000000{step}")["w"].tolist() == [0, 0, 2, 2]


def test_ranks_save_and_another_number_of_ranks_loads(pool, tmp_path):
    pool.run(save_on_ranks, 3, str(tmp_path), 5)
    assert sorted(p.name for p in tmp_path.glob("[!.]*")) == ["step-00000002", "step-00000003"]
    assert pool.run(load_on_ranks, 2, str(tmp_path), 5) == [(0, 300, True)] * 2
    file = next((tmp_path / "step-00000003").glob("rank-*"))
    file.write_bytes(file.read_bytes()[:-1])
    assert pool.run(load_on_ranks, 4, str(tmp_path), 5) == [(1, 200, True)] * 4


@pytest.mark.parametrize("ranks, who", [(2, "rank 1"), (3, "rank 1 and 1 more")])
def test_ranks_that_fail_are_told_to_all_and_none_waits_for_them(pool, tmp_path, ranks, who):
    for message in pool.run(some_ranks_cannot_write, ranks, str(tmp_path)):
        assert f"saving step 7 failed: {who}: tensor 'w' is torch.complex64" in message
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]
