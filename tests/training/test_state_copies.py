"""Copies of the state for checkpoints, made as late as a side stream may make them."""

import threading
from pathlib import Path

import pytest
import torch

from shoal.engine.checkpoint import load, save
from shoal.training.resilience import memory_checkpoint
from shoal.training.resilience.host_memory_dir import run_dir
from shoal.training.resilience.restore import restore
from shoal.training.state_manager import StateManager
from tests.engine.late_stream import LateMark, LateStream
from tests.engine.parallel.counting import engine_of
from tests.testing.verify.runs import small_run


class Gate(LateStream):
    """A late stream whose background thread waits for the copy only once it is open; then the copy is too late."""

    opened = threading.Event()

    def run(self, work):
        return GatedMark(self, super().run(work).number)


class GatedMark(LateMark):
    def synchronize(self) -> None:
        Gate.opened.wait(60)
        self.wait()




def train_and_save(folder: str, name: str, precision: str) -> None:
    """Save to disk and to memory after step 2, train on, and compare what was saved with the state of step 2."""
    config = small_run({}, precision=precision)
    Path(folder, "memory").mkdir()
    failover = config.failover.model_copy(update={"memory_every": 1, "memory_folder": Path(folder, "memory")})
    optimizer = config.optimizer.model_copy(update={"name": name} | ({"hessian_every": 1} if "sophia" in name else {}))
    config = config.model_copy(update={"failover": failover, "optimizer": optimizer})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "SideStream", Gate)
        patch.setattr(memory_checkpoint, "SideStream", Gate)
        Gate.opened.clear()
        engine = engine_of(config)
        states = StateManager(engine, Path(folder), fresh=True, report=print)
        for step in range(2):
            engine.step(step)
        expected = {key: [piece.tensor.clone() for piece in pieces] for key, pieces in engine.state().items()}
        states.save(2, block=False)
        assert states.memory is not None
        states.remember(2)
        assert len(engine.optimizer.reads) == 2
        engine.step(2)
        assert not engine.optimizer.reads
        Gate.opened.set()
        states.wait()
    kinds = engine.state().items()
    pairs = [(p.tensor, old) for key, pieces in kinds for p, old in zip(pieces, expected[key], strict=True)]
    assert not all(torch.equal(now, old) for now, old in pairs)
    home = run_dir(Path(folder), failover)
    for source in ("disk", "memory"):
        for pieces in engine.state().values():
            for piece in pieces:
                piece.tensor.zero_()
        if source == "disk":
            load(Path(folder) / "checkpoints" / "step-00000002", engine.state())
        else:
            found, _ = restore(Path(folder) / "none", home, engine.state(), group=None,
                               model=engine.shape.model_dump(mode="json"))
            assert found is not None and found.step == 2
        for key, pieces in engine.state().items():
            assert all(torch.equal(p.tensor, before) for p, before in zip(pieces, expected[key], strict=True)), key
    states.close()


@pytest.mark.parametrize(("name", "precision"), [("adamw", "bf16"), ("muon", "fp32"), ("sophia-h", "fp32")])
def test_late_copies_hold_the_state_of_their_step(pool, tmp_path: Path, name: str, precision: str) -> None:
    pool.run(train_and_save, 1, str(tmp_path), name, precision)
