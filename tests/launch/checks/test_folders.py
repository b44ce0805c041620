"""What a run needs is what its parts hold, and what there is no room for is refused before anything is made."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.engine.models.transformer import Transformer
from shoal.engine.optim.build import RULES, build
from shoal.engine.optim.shards import Shards
from shoal.launch.checks.folders import check_disk, checkpoint_bytes, most_checkpoints
from shoal.launch.checks.memory import count_rank_memory
from shoal.planning.cost.memory.optimizer_state import least
from shoal.spec.config import build_config as config_of

SIZES = {
    "name": "tiny", "layers": 2, "hidden": 64, "ffn": 300,
    "experts": {"count": 3, "per_token": 2, "ffn": 70, "first": 1},  # matrices of every kind, in 8 bits and not
}


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_checkpoint_takes_the_weights_and_all_that_a_rule_keeps(rule: str) -> None:
    config = config_of({"model": SIZES, "optimizer": {"name": rule}})
    shape = config.model.shape(vocab=259, sequence_length=8)
    model = Transformer(shape)
    named = [(name, w.detach(), torch.zeros_like(w)) for name, w in model.named_parameters()]
    kept = build(config.optimizer, Shards.from_parameters(named, lambda name, tensor: 0.0)).bytes()
    parameters = sum(w.numel() for w in model.parameters())
    assert checkpoint_bytes(config, shape) == 4 * parameters + kept
    assert least(rule, 4) * parameters <= kept, "a bound, which a search of layouts goes by"


@pytest.mark.parametrize("rule", ["adafactor", "muon"])
@pytest.mark.parametrize(("existing", "most"), [(0, 3), (2, 1)])
def test_checkpoints_that_have_no_room_are_refused(
    rule: str, existing: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a disk that has a byte too few for those that are still to be kept at once; there are never more than two and
    the one that is being written."""
    config = config_of({"optimizer": {"name": rule}, "train": {"steps": 100}, "checkpoint": {"every": 10, "keep": 2}})
    shape = config.model.shape(vocab=259, sequence_length=8)
    room = most * checkpoint_bytes(config, shape)
    for free in (room, room - 1):
        monkeypatch.setattr("shutil.disk_usage", lambda folder, free=free: (10**15, 0, free))
        if free == room:
            check_disk(config, shape, tmp_path, existing)
            continue
        with pytest.raises(UsageError, match=rf"checkpoints: {most} of .* are kept together"):
            check_disk(config, shape, tmp_path, existing)


@given(steps=st.integers(1, 60), every=st.integers(0, 20), keep=st.integers(1, 8))
def test_a_run_has_a_checkpoint_more_at_once_than_it_keeps_if_it_saves_as_many(steps, every, keep):
    config = config_of({"train": {"steps": steps}, "checkpoint": {"every": every, "keep": keep}})
    saved = {step for step in range(1, steps + 1) if step == steps or (every and step % every == 0)}
    assert most_checkpoints(config) == min(len(saved), keep + 1)


def test_a_rank_holds_the_numbers_of_an_estimate_of_the_curvature_besides() -> None:
    held = {}
    for rule in ("sophia-g", "sophia-h"):
        config = config_of({"optimizer": {"name": rule}})
        shape = config.model.shape(vocab=259, sequence_length=8)
        (held[rule],) = count_rank_memory(config, shape, torch.device("cpu"))
    assert held["sophia-h"].total - held["sophia-g"].total == 2 * 4 * shape.parameters()
