"""Mistakes in a definition that only its values show: they are named, with the file and line of its code."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shoal.base.errors import UsageError
from shoal.engine.own.definition import OwnModel, load_own_model, save_own_model
from shoal.spec.config import RunConfig
from shoal.testing.verify.compare import Mismatch
from shoal.testing.verify.own_model import describe_scale
from shoal.testing.verify.verify import Verification, verify

ROWS = torch.randn(32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def summed(model: nn.Module, rows: Tensor) -> tuple[Tensor, int]:
    return model(rows).square().sum(), len(rows)


def averaged(model: nn.Module, rows: Tensor) -> tuple[Tensor, int]:
    return model(rows).square().mean(), len(rows)


def averaged_once(model: nn.Module, rows: Tensor) -> tuple[Tensor, int]:
    return model(rows).square().mean(), 1


def penalised(model: nn.Module, rows: Tensor) -> tuple[Tensor, int]:
    return model(rows).square().sum() + model.weight.square().sum(), len(rows)


def narrow(model: nn.Module, rows: Tensor) -> tuple[Tensor, int]:
    return model(rows).gather(1, torch.full((len(rows), 1), 3)).sum(), len(rows)


def linear() -> nn.Module:
    return nn.Linear(4, 4)


class Counting(nn.Linear):
    """Grows with each pass."""

    passes = 0

    def forward(self, rows: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(rows) * self.passes


class ScaleGradient(torch.autograd.Function):
    """A collective of one's own whose backward sums what is equal on all ranks."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * (torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1)


def scaled(model: nn.Module, rows: Tensor) -> tuple[Tensor, int]:
    return ScaleGradient.apply(100 * model(rows).square().sum()), len(rows)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def config_of(own: OwnModel, folder: Path, **layout: int) -> RunConfig:
    save_own_model(own, folder / "model.pkl")
    return RunConfig.model_validate({
        "model": {"module": str(folder / "model.pkl")}, "parallel": {"micro_batch": 4, **layout},
        "train": {"global_batch": 8, "device": "cpu"},
    })  # fmt: skip


@pytest.mark.parametrize(("model", "loss", "note"), [
    (linear, summed, ""), (normed, summed, ""),
    (linear, averaged, "1 times the loss and 2 times the terms: loss() returns no sums"),
    (linear, averaged_once, "1 times the loss and 1 times the terms"),
    (linear, penalised, "depends on micro_batch"),
    (lambda: Counting(4, 4), summed, "another loss in a second pass"),
])  # fmt: skip
def test_a_loss_that_is_no_sum_is_noted(model: object, loss: object, note: str, tmp_path: Path) -> None:
    """The same on all layouts of one micro-batch, so that no comparison of layouts finds it."""
    said = describe_scale(config_of(OwnModel(model, loss, ROWS), tmp_path))
    assert note in said and bool(said) == bool(note)


def test_verify_prints_the_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = verify(config_of(OwnModel(linear, averaged, ROWS), tmp_path, dp=2), steps=1, show=True)
    said = " ".join(capsys.readouterr().out.split())
    assert found.same and "note with each sample twice, a batch has 1 times the loss" in said


def test_a_factor_of_all_gradients_is_found_before_they_are_clipped(tmp_path: Path) -> None:
    """The loss is right, and gradients clipped to the same norm are equal."""
    found = verify(config_of(OwnModel(linear, scaled, ROWS), tmp_path, dp=2), steps=1)
    assert [each.phase for each in found.findings] == ["gradient norm"]
    assert found.findings[0].error == pytest.approx(1.0) and "which clipping hides" in found.findings[0].text


def test_an_error_names_the_file_of_code_that_was_sent_to_the_ranks(tmp_path: Path) -> None:
    """cloudpickle gives such code no file."""
    save_own_model(OwnModel(nn.Linear, narrow, ROWS), tmp_path / "model.pkl")
    code = load_own_model(str(tmp_path / "model.pkl")).loss.__code__
    assert (code.co_filename, code.co_firstlineno) == (__file__, narrow.__code__.co_firstlineno)


def test_a_part_of_the_logits_is_said_to_be_of_split_layers(tmp_path: Path) -> None:
    """Without values no index is out of bounds, so that the step is the first to see it."""
    own = OwnModel(lambda: nn.Sequential(linear()), narrow, ROWS, tensor_parallel={"0": "colwise"})
    place = re.escape(f"({__file__}:{narrow.__code__.co_firstlineno + 1})")
    with pytest.raises(UsageError, match=rf"with layers split over parallel.tp = 2 fails: .* {place}"):
        verify(config_of(own, tmp_path, tp=2), steps=1)


def test_a_verification_shows_its_first_finding() -> None:
    found = [Mismatch(0, "adamw", "weight", str(i), 1.0, (), f"weight {i}") for i in range(100)]
    shown = repr(Verification(1, 1, 0.5, tuple(found)))
    assert "100 findings, the first: weight 0" in shown and len(shown) < 200
