"""Damage is found and named; a state that is not the one saved is refused by name."""

import errno
import shutil
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.base.boxes import Box, Piece
from shoal.engine.checkpoint import CheckpointError, list_checkpoints, load, newest, newest_good, storage, verify
from tests.engine.checkpoint.cuts import cut, random_values, whole, write_checkpoint

VALUES = {
    "model.w": torch.arange(24.0).reshape(4, 6),
    "model.b": torch.ones(6, dtype=torch.bfloat16),
    "optimizer.count": torch.tensor(3),
}


@pytest.fixture
def path(tmp_path):
    return write_checkpoint(tmp_path / "step-00000001", cut(Random(1), VALUES, 2), extra={"model": {"layers": 2}})


def wanted(**changes):
    return whole({name: torch.zeros_like(t) for name, t in VALUES.items()} | changes)


def test_the_folder_of_a_run_is_refused_with_the_newest_checkpoint_named(path, tmp_path):
    newer = shutil.copytree(path, tmp_path / "run" / "checkpoints" / "step-00000002")
    shutil.copytree(path, newer.with_name("step-00000001"))
    for folder in (tmp_path / "run", newer.parent):
        with pytest.raises(CheckpointError, match=f"not a complete checkpoint: .*\n  Give .*, such as {newer}\\."):
            verify(folder)


# ---- damage ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_flipped_bit_is_found(tmp_path, data):
    path = tmp_path / "step-00000001"
    if not path.exists():
        write_checkpoint(path, cut(Random(1), VALUES, 2))
    file = data.draw(st.sampled_from(sorted(path.glob("*.*"))))
    good = file.read_bytes()
    length = 64 if file.suffix == ".sha256" else len(good)  # of manifest.sha256 only the digest counts
    bit = data.draw(st.integers(0, 8 * length - 1))
    bad = bytearray(good)
    bad[bit // 8] ^= 1 << bit % 8
    try:
        file.write_bytes(bad)
        named = "manifest.json" if file.suffix in (".json", ".sha256") else file.name
        with pytest.raises(CheckpointError, match=f"{named} is damaged"):
            verify(path)
        with pytest.raises(CheckpointError, match=f"{named} is damaged"):
            load(path, wanted())
    finally:
        file.write_bytes(good)


def test_a_flipped_bit_in_the_data_names_the_tensor(path):
    file = path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors is damaged: tensor '\S+' at \[.*not what was"):
        verify(path)


@pytest.mark.parametrize("keep", [0, 3, 8, 100, -1, None])
def test_a_file_that_is_truncated_or_longer_is_named(path, keep):
    file = path / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:keep] if keep is not None else file.read_bytes() + b" ")
    for attempt in (lambda: verify(path), lambda: load(path, wanted())):
        with pytest.raises(CheckpointError, match=r"rank-00001.safetensors is damaged: \d+ bytes"):
            attempt()


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "manifest.json", "manifest.sha256"])
def test_a_missing_file_is_named(path, file):
    (path / file).unlink()
    for attempt in (lambda: verify(path), lambda: load(path, wanted())):
        with pytest.raises(CheckpointError, match=file):
            attempt()


def test_the_file_of_another_checkpoint_is_found(path, tmp_path):
    other = random_values(Random(9), {"other": (8, 8)})
    write_checkpoint(tmp_path / "other", [whole(other)])
    shutil.copy(tmp_path / "other" / "rank-00000.safetensors", path / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors is damaged"):
        verify(path)


def test_verify_lists_all_that_is_wrong(path):
    for file in path.glob("rank-*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"(?s)rank-00000.*rank-00001"):
        verify(path)


def test_the_newest_good_one_is_found_and_the_refused_are_reported(path, tmp_path):
    for step in (2, 3):
        shutil.copytree(path, tmp_path / f"step-0000000{step}")
    (tmp_path / ".staging-step-00000009-01234567").mkdir()
    (tmp_path / "step-00000008").mkdir()  # no checkpoint in it
    (tmp_path / "step-00000003" / "rank-00001.safetensors").unlink()
    assert [step for step, _ in list_checkpoints(tmp_path)] == [1, 2, 3]
    assert newest(tmp_path).step == 3
    found, refused = newest_good(tmp_path)
    assert found == (2, tmp_path / "step-00000002")
    assert len(refused) == 1
    assert "step-00000003/rank-00001.safetensors cannot be read" in str(refused[0])
    assert newest(tmp_path / "nowhere") is None
    assert newest_good(tmp_path / "nowhere") == (None, [])


def test_a_checkpoint_that_cannot_be_looked_at_is_refused_by_name_and_not_overlooked(path, tmp_path):
    """A file server may be away for a moment. A run that resumes from an older checkpoint then says so."""
    (tmp_path / "step-00000002").symlink_to("step-00000002")
    assert newest(tmp_path).step == 2
    found, (refused,) = newest_good(tmp_path)
    assert found.step == 1 and "step-00000002 is not a complete checkpoint: Too many levels" in str(refused)


@pytest.mark.parametrize("part", ["whole", "data"])
def test_what_fails_while_it_is_read_is_refused_and_the_one_before_taken(path, tmp_path, monkeypatch, part):
    """The disk has a bad sector, or the store is away for a moment."""
    shutil.copytree(path, tmp_path / "step-00000002")
    function = "open_ranges" if part == "data" else "read"
    read = getattr(storage, function)

    def fail(file, *arguments):
        if "step-00000002" in str(file):
            raise OSError(errno.EIO, "Input/output error", str(file))
        return read(file, *arguments)

    monkeypatch.setattr(storage, function, fail)
    found, (refused,) = newest_good(tmp_path)
    assert found.step == 1 and "Input/output error" in str(refused)
    with pytest.raises(CheckpointError, match="Input/output error"):
        load(tmp_path / "step-00000002", wanted())


# ---- another state ---------------------------------------------------------------------------------------------------


def test_another_model_is_refused_before_anything_is_read(path):
    state = wanted()
    with pytest.raises(CheckpointError, match=r"layers: 2 saved, 3 in this run"):
        load(path, state, model={"layers": 3})
    assert state["model.w"][0].tensor.sum() == 0
    assert load(path, state, model={"layers": 2, "made_since": None}) == {"model": {"layers": 2}}
    with pytest.raises(CheckpointError, match=r"made_since: None saved, 1 in this run"):
        load(path, state, model={"layers": 2, "made_since": 1})


def test_a_tensor_that_was_not_saved_is_named(path):
    with pytest.raises(CheckpointError, match=r"no tensor 'model.ww' .*did you mean 'model.w'"):
        load(path, wanted() | whole({"model.ww": torch.ones(1)}))


def test_a_tensor_that_no_rank_loads_is_named_unless_its_prefix_is_ignored(path):
    state = wanted()
    del state["optimizer.count"]
    with pytest.raises(CheckpointError, match=r"'optimizer.count', which no rank loads"):
        load(path, state)
    assert load(path, state, ignore_prefixes=("optimizer.",)) == {"model": {"layers": 2}}
    assert torch.equal(state["model.w"][0].tensor, VALUES["model.w"])


def test_what_is_optional_may_be_on_either_side_and_have_another_shape(path):
    old = wanted()
    del old["optimizer.count"]
    new = whole({"optimizer.other": torch.full((2,), 5.0), "model.b": torch.full((7,), 5.0, dtype=torch.bfloat16)})
    state = old | new
    load(path, state, optional_prefixes=("optimizer.", "model.b"))
    assert torch.equal(state["model.w"][0].tensor, VALUES["model.w"])
    assert all((state[name][0].tensor == 5).all() for name in new)
    state = wanted()
    load(path, state, optional_prefixes=("optimizer.", "model.b"))
    assert all(torch.equal(state[name][0].tensor, VALUES[name]) for name in VALUES)


def test_a_piece_that_is_not_filled_by_what_is_stored_is_an_error(path):
    state = wanted() | {"model.w": [Piece((4, 6), Box((0, 0), (5, 6)), torch.zeros(5, 6))]}
    with pytest.raises(CheckpointError, match=r"stores 24 of the 30 elements of tensor 'model.w'"):
        load(path, state)


def test_another_shape_is_refused(path):
    with pytest.raises(CheckpointError, match=r"'model.w' was saved with shape \(4, 6\); this run has \(6, 4\)"):
        load(path, wanted(**{"model.w": torch.zeros(6, 4)}))


def test_another_dtype_is_refused_unless_conversion_is_asked_for(path):
    state = wanted(**{"model.b": torch.zeros(6, dtype=torch.float64)})
    with pytest.raises(CheckpointError, match=r"'model.b' was saved as BF16, but this run has F64"):
        load(path, state)
    load(path, state, convert=True)
    assert torch.equal(state["model.b"][0].tensor, torch.ones(6, dtype=torch.float64))
    with pytest.raises(CheckpointError, match=r"Only floating-point"):
        load(path, wanted(**{"optimizer.count": torch.tensor(0.0)}), convert=True)
