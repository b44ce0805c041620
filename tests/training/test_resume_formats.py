"""Number formats with a state or draws of their own go on in the middle, bit for bit; others take a state over."""

import pytest
import torch

from shoal.base.errors import UsageError
from shoal.training.check import check
from shoal.training.run_folder import check_resume, new_run
from tests.trainings.runs import checkpoints, copy_until, curve, same_bits, small_config, stored, train_in


@pytest.mark.parametrize(("precision", "sections"), [
    ("bf16-weights", {}), ("bf16-all", {}), ("fp8", {"float8": {"amax": "delayed", "history": 2}}),
])
def test_a_format_goes_on_where_it_was(precision, sections, corpus, pool, tmp_path):
    config = small_config(
        corpus, {"dp": 2, "zero": 1, "micro_batch": 4}, train={"precision": precision, "steps": 5, "validate_every": 0},
        model={"layers": 1}, checkpoint={"every": 3}, **sections,
    )
    whole = train_in(pool, config, tmp_path / "whole")
    part = train_in(pool, config, copy_until(whole, tmp_path / "part", 3), resume=True)
    assert curve(part) == curve(whole)
    assert same_bits(checkpoints(part)[5], checkpoints(whole)[5])


FORMATS = (
    ("fp32", {}, torch.float32), ("bf16-all", {}, torch.bfloat16),
    ("fp8", {"float8": {"amax": "delayed", "history": 2}}, torch.float32),
    ("fp8", {"float8": {"amax": "delayed", "history": 3}}, torch.float32), ("fp64", {}, torch.float64),
)


def test_a_run_goes_on_in_another_format(corpus, pool, tmp_path):
    folder = tmp_path / "run"
    for step, (precision, sections, dtype) in enumerate(FORMATS, 1):
        config = small_config(
            corpus, {"dp": 2, "zero": 1, "micro_batch": 4}, checkpoint={"every": 0},
            train={"precision": precision, "steps": step, "validate_every": 0}, **sections,
        )
        if step > 1:
            check_resume(config, check(config), folder)
        train_in(pool, config, folder, resume=step > 1)
        tensors = stored(checkpoints(folder)[step])
        amax = [tensor for name, tensor in tensors.items() if name.startswith("precision.amax")]
        assert {x.dtype for name, x in tensors.items() if not name.startswith("precision.")} == {dtype}
        assert {len(x) for x in amax} == {section["history"] for section in sections.values()}
        assert all((x[0] > 0).all() and (x[1:] == 0).all() for x in amax), "of this step alone"
    first, *_, last = losses = [loss for _, loss, _ in curve(folder)]
    assert len(losses) == len(FORMATS) and last < first - 0.1


def test_a_run_does_not_go_on_in_another_folder_of_checkpoints(corpus, tmp_path):
    """What was saved there would be forgotten by the next resume, and the records of those steps cut off."""
    config = small_config(corpus)
    new_run(config, tmp_path / "run")
    other = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"folder": "elsewhere"})})
    with pytest.raises(UsageError, match=r"(?s)checkpoint.folder = 'elsewhere', was ''.*after moving them"):
        check_resume(other, check(other), tmp_path / "run")
