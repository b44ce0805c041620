"""The verdict on one expert among others."""

import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from shoal.base.boxes import Box, Piece
from shoal.spec.layout import Layout
from shoal.testing.verify.compare import judge
from shoal.testing.verify.rank import RankReport, RankStep, compare_pieces
from shoal.testing.verify.reference import StepFacts

NAME = "layers.0.mlp.experts.up"


def found_with(gradients: dict[str, float], wrong: dict[str, float], precision: str = "fp64") -> list[str]:
    """Places that differ, where the reference's largest elements and the differences are these."""
    nothing = torch.zeros(0, 3)
    fact = StepFacts(1.0, 1.0, nothing, {}, nothing, (1,), gradients, {"head.weight": 1.0})
    step = RankStep(1.0, 1.0, nothing, {}, nothing, [[0]], {f"gradient/{name}": d for name, d in wrong.items()})
    box = Box.full((1,))
    held = [(name, (1,), box, True) for name in gradients if "[" not in name]
    report = RankReport("rank 0", 0, held, {("plain-sgd", 0): step})
    return [finding.place for finding in judge(Layout(), 1, precision, {"plain-sgd": [fact]}, [report]).findings]


def test_each_expert_is_held_to_its_own_size() -> None:
    sizes = {"head.weight": 1.0, NAME: 0.1, f"{NAME}[0]": 0.1, f"{NAME}[1]": 1e-5}
    off = {"head.weight": 0.0, NAME: 1e-12, f"{NAME}[0]": 1e-14, f"{NAME}[1]": 1e-12}
    assert found_with(sizes, off) == [f"{NAME}[1]"]  # by 1e-7 of its size, 1e-11 of the largest
    assert found_with(sizes, off, "bf16") == []


@pytest.mark.parametrize(("difference", "places"), [(0.0, []), (1e-15, [f"{NAME}[1]"]), (1e-17, [])])
def test_an_expert_without_tokens_has_no_gradient(difference: float, places: list[str]) -> None:
    sizes = {NAME: 0.1, f"{NAME}[0]": 0.1, f"{NAME}[1]": 0.0}
    off = {NAME: difference, f"{NAME}[0]": 0.0, f"{NAME}[1]": difference}
    assert found_with(sizes, off) == places


def test_a_rank_says_which_expert_differs(tmp_path) -> None:
    """Of a box that begins at expert 1 and of a run of numbers in expert 3, as shards are cut."""
    whole = torch.arange(24.0, dtype=torch.float64).view(4, 3, 2)
    save_file({f"gradient/{NAME}": whole, f"weight/{NAME}": whole.clone()}, tmp_path / "step")
    middle, rest = Box((1, 0, 0), (2, 3, 2)), Box((3, 1, 0), (1, 1, 2))
    pieces = [Piece((4, 3, 2), box, whole[box.slices].clone()) for box in (middle, rest)]
    pieces[0].tensor[1, 2, 0] += 0.25
    pieces[1].tensor[0, 0, 1] -= 0.5
    with safe_open(tmp_path / "step", "pt") as file:
        found = compare_pieces(file, "gradient", NAME, pieces)
        assert found == {f"gradient/{NAME}": 0.5} | {
            f"gradient/{NAME}[{e}]": off for e, off in ((1, 0.0), (2, 0.25), (3, 0.5))
        }
        assert compare_pieces(file, "in use", NAME, [Piece((3, 3, 2), middle, pieces[0].tensor)]) == {
            f"in use/{NAME}": math.inf
        }
