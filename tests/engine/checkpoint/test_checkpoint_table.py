"""`shoal checkpoint inspect`: each tensor of a checkpoint is a row, and what is no checkpoint is refused."""

import pytest
import torch

from shoal.base.boxes import Box, Piece
from shoal.cli.main import main
from tests.engine.checkpoint.cuts import write_checkpoint


def test_every_tensor_is_a_row(tmp_path, capsys):
    weight, name = torch.zeros(30, 50), "optimizer.exp_avg.layers.10.attention.out.weight"
    halves = [Box((0, 0), (20, 50)), Box((20, 0), (10, 50))]
    states = [{name: [Piece((30, 50), box, weight[box.slices])]} for box in halves]
    states[0]["count"] = [Piece((), Box((), ()), torch.tensor(3))]
    path = write_checkpoint(tmp_path / "step-00000001", states, box_bytes=1 << 20)
    assert main(["checkpoint", "inspect", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert sorted(rows) == [["count", "I64", "scalar", "8", "1", "1"], [name, "F32", "30 x 50", "6,000", "2", "2"]]
    assert lines[-1] == "step 1: 2 tensors, 6,008 bytes in 2 files"


@pytest.mark.parametrize("damaged", [True, False])
def test_what_is_no_checkpoint_is_refused(tmp_path, capsys, damaged):
    path = tmp_path / "step-00000001"
    if damaged:
        write_checkpoint(path, [{"w": [Piece((2,), Box((0,), (2,)), torch.ones(2))]}])
        (path / "manifest.json").write_text("{}")
    assert main(["checkpoint", "inspect", str(path)]) == 2
    assert ("is damaged" if damaged else "is not a complete checkpoint") in capsys.readouterr().err
