"""Definitions that are wrong are refused in one sentence, and what fails in a step leaves no trace."""

import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shoal.base.errors import UsageError
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.own.definition import OwnModel, seed_generators
from shoal.engine.own.samples import OwnDataset
from shoal.engine.own.trial import try_out
from shoal.spec.config import RunConfig
from shoal.training.bucket_size import settle_bucket_size
from shoal.training.check import check
from shoal.training.records.display import Display
from shoal.training.samples import open_samples
from shoal.training.step.optimizer_step import NonFinite
from shoal.training.step.own_engine import OwnEngine
from tests.testing.own import plain
from tests.testing.own.test_equality import config_of

ROWS = torch.arange(64.0).view(16, 4) / 64


def net() -> nn.Module:
    return nn.Linear(4, 4)


def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return plain.rebuilt(model, [batch])


def missing() -> nn.Module:
    raise RuntimeError("no such weights")


@pytest.mark.parametrize(("own", "says"), [
    (OwnModel(net, lambda model, batch: loss(model, batch)[0], ROWS), r"returns a tensor of float32 \[\], not the sum"),
    (OwnModel(net, lambda model, batch: None, ROWS), r"its loss\(\) returns NoneType None, not the sum"),
    (OwnModel(net, lambda model, batch: (model(batch), 1), ROWS), r"is a tensor of float32 \[2, 4\], not a sum"),
    (OwnModel(net, lambda model, batch: (model(batch).sum(), "1"), ROWS), r"the number of terms .* is str '1'"),
    (OwnModel(net, lambda model, batch: (*loss(model, batch), {"a": 1}), ROWS), "is no dict of metrics and their .sum"),
    (OwnModel(net, lambda model, batch: (*loss(model, batch), (1, 2)), ROWS), "is no dict of metrics and their .sum"),
    (OwnModel(net, lambda model, batch: (batch.sum(), 1), ROWS), "has no gradient: it was detached, or uses no param"),
    (OwnModel(lambda: nn.Linear(5, 4), loss, ROWS), r"its loss\(\) fails.*: RuntimeError: .* same reduction dim"),
    (OwnModel(net, lambda model, batch: (model(batch) - batch[:, :3]).sum(), ROWS), r"fails: .* broadcast a dimension"),
    (OwnModel(net, lambda model, batch: (model(batch).view(7).sum(), 1), ROWS), "is invalid for input of size"),
    (OwnModel(lambda: 3, loss, ROWS), "returns int, not an nn.Module"),
    (OwnModel(missing, loss, ROWS), r"its model\(\) fails: RuntimeError: no such weights \(.*_definitions.py:\d+\)"),
    (OwnModel(lambda: nn.LazyLinear(4), loss, ROWS), "weight of its model has no shape yet"),
    (OwnModel(lambda: nn.Linear(4, 4, dtype=torch.complex64), loss, ROWS), "weight of its model is complex"),
    (OwnModel(net, loss, lambda: iter(ROWS)), "its train data is .*iterator, which has no length"),
    (OwnModel(net, loss, DataLoader(ROWS)), r"its train data is DataLoader, which has no data\[i\]"),
    (OwnModel(net, loss, ROWS[:0]), "its train data is empty"),
    (OwnModel(net, loss, ROWS, ROWS[:0]), "its validation data is empty"),
    (OwnModel(net, loss, [ROWS[0], ROWS]), "its train batch of samples .* fails: RuntimeError: stack exp"),
    (OwnModel(net, loss, [None]), "its train batch of samples 0 fails: TypeError: default_collate"),
    (OwnModel(plain.Odd, loss, ROWS, blocks=("layers",)), "'layers' is a list of .*\n.*layers.0, layers.1, layers.2"),
    (OwnModel(plain.Odd, loss, ROWS, blocks=("layers.0", "layers.0.0")), "is a part of block 'layers.0'"),
    (OwnModel(plain.Odd, loss, ROWS, blocks=("last", "last")), "is named twice"),
])  # fmt: skip
def test_a_wrong_definition_is_refused_before_a_rank_starts(own, says):
    with pytest.raises(UsageError, match=says):
        try_out(own, 0, micro_batch=2)


class Chain(nn.Module):
    """Linear layers, called as a list of their numbers says; a negative one is used without its forward."""

    def __init__(self, order: tuple[int, ...]):
        super().__init__()
        self.order, self.layers = order, nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for i in self.order:
            x = self.layers[i](x) if i >= 0 else F.linear(x, self.layers[i].weight)
        return x


def chain(*order: int) -> OwnModel:
    return OwnModel(lambda: Chain(order), loss, ROWS, blocks=("layers.0", "layers.1", "layers.2"))


in_order, backwards, twice, without = chain(0, 1, 2), chain(2, 1, 0), chain(0, 1, 0), chain(0, 1)
outside_before, outside_after = chain(-1, 0, 1, 2), chain(0, 1, 2, -3)
no_terms = OwnModel(net, lambda model, batch: (loss(model, batch)[0], 0), ROWS)


class Misfit(Chain):
    """A layer that does not take what it gets, which only values show: one is read before."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](x[:, :3] if x[0, 0].item() < 2 else x)


def changed_in_place(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    y = model(batch).exp()
    total = y.sum()
    y.add_(1)
    return total, len(batch)


def lost_rank(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    raise dist.DistError("Connection closed by peer")


class Moving(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        self[1].weight.data = self[1].weight.data.clone()
        return super().forward(x)


moving = OwnModel(lambda: Moving(nn.Linear(4, 4), nn.Linear(4, 4)), loss, ROWS)
misfit, in_place = OwnModel(lambda: Misfit((0,)), loss, ROWS), OwnModel(net, changed_in_place, ROWS)
no_text, lost = OwnModel(net, lambda model, batch: batch["text"], ROWS), OwnModel(net, lost_rank, ROWS)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("place", torch.ones(4))
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + self.place)


def bad_from_the_second(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    total, terms = loss(model, batch)
    return total * (torch.nan if model.layers[2].num_batches_tracked > 1 else 1), terms


normed = OwnModel(Normed, bad_from_the_second, ROWS)


def named(name: str, **sections: dict) -> RunConfig:
    config = config_of("lstm", {"dp": 1, "zero": 3}, **sections)
    model = config.model.model_copy(update={"module": f"{__file__}:{name}"})
    return config.model_copy(update={"model": model})


def start(config: RunConfig) -> OwnEngine:
    return OwnEngine(config, check(config), Mesh(config.parallel, dist.get_rank()), open_samples(config, "train"))


def refusal(config: RunConfig) -> str:
    try:
        engine = start(config)
        for step in range(2):
            engine.step(step)
    except UsageError as error:
        return str(error)
    except dist.DistError:
        return "DistError"
    return "accepted"


@pytest.mark.parametrize(("name", "says"), [
    ("in_order", "accepted"),
    ("backwards", "its block 'layers.2' runs first in the forward"),
    ("twice", "its block 'layers.0' runs after 'layers.1' in the forward"),
    ("without", "its block 'layers.2' does not run in the forward"),
    ("outside_before", "a parameter of its block 'layers.2', of shape .4, 4., is used outside of the block's forward"),
    ("outside_after", "a parameter of its block 'layers.0', of shape .4, 4., is used outside of the block's forward"),
    ("no_terms", "in step 0 are 0, with a loss of"),
    ("misfit", r"its loss\(\) fails in layers.1, a Linear: RuntimeError: mat1 and mat2 .*/test_definitions.py:\d+\)"),
    ("no_text", r"its loss\(\) fails: IndexError: .*/test_definitions.py:\d+\)"),
    ("in_place", "the backward of its loss fails: RuntimeError: one of the variables needed for gradient"),
    ("moving", "its forward moves 1.weight to other memory, where no update reaches it"),
    ("lost", "DistError"),  # the definition is right: the run continues without the rank
])  # fmt: skip
def test_what_only_a_step_shows_is_refused_by_it(name, says, pool):
    """Blocks in another order than the forward's would have wrong gradients."""
    (found,) = pool.run(refusal, 1, named(name))
    assert re.search(says, found), found


def losses_of_recurrent(config: RunConfig) -> list[list[float]]:
    """Return the losses of steps with weights that a recurrent layer leaves, and would move, as on CUDA."""

    def move(layer: nn.RNNBase) -> None:
        for name in layer._flat_weights_names:
            weight = getattr(layer, name)
            weight.data = weight.data.clone()

    found = []
    for flatten in (lambda layer: None, move):
        with patch.object(nn.RNNBase, "flatten_parameters", flatten):
            engine = start(config)
            found.append([engine.step(step).loss for step in range(3)])
    return found


def test_recurrent_layers_leave_their_weights_in_the_buckets(pool):
    ((kept, moved),) = pool.run(losses_of_recurrent, 1, config_of("lstm", {"dp": 1}))
    assert moved == kept


def buffers_around(config: RunConfig) -> list[dict[str, Tensor]]:
    """Return the buffers after a step, after an evaluation and a dry step, and after a step that failed."""
    engine, seen = start(config), []

    def look() -> None:
        seen.append({name: buffer.clone() for name, buffer in engine.stages[0].statistics.buffers.items()})

    engine.step(0)
    look()
    engine.evaluate(engine.samples)
    engine.step(1, dry=True)
    look()
    with pytest.raises(NonFinite):
        engine.step(1)
    look()
    return seen


def test_evaluations_and_steps_that_fail_leave_the_buffers(pool):
    (seen,) = pool.run(buffers_around, 1, named("normed", train={"global_batch": 4}))
    assert seen[0]["layers.2.running_mean"].any()
    for later in seen[1:]:
        for name, buffer in later.items():
            assert torch.equal(buffer, seen[0][name]), name


def learn(config: RunConfig) -> tuple[list[float], torch.dtype, float]:
    engine = start(config)
    losses = [engine.step(step).loss for step in range(24)]
    scale = engine.loss_scale.value if engine.loss_scale else 0
    return losses, engine.stages[0].module.layers[2].running_var.dtype, scale


def of_many_terms(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    total, terms = loss(model, batch)
    return total * 4096, terms * 4096


healthy = OwnModel(Normed, of_many_terms, ROWS)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_normalisations_and_sums_are_in_float32_in_mixed_precision(precision, pool):
    sections = {"train": {"global_batch": 4, "precision": precision}, "optimizer": {"learning_rate": 0.05}}
    ((losses, dtype, scale),) = pool.run(learn, 1, named("healthy", **sections))
    assert dtype == torch.float32
    assert losses[-1] < losses[0]
    assert scale > 16 or precision == "bf16"  # as of the mean: it does not shrink with the number of terms


def freed(config: RunConfig) -> list[bool]:
    engine = start(config)
    engine.step(0)
    return [bucket.gathered for bucket in engine.stages[0].parameters.buckets]


def test_recomputation_gathers_no_block_that_stays(pool):
    config = config_of("odd", {"dp": 1, "zero": 3, "prefetch": 2})
    assert pool.run(freed, 1, config) == [[False] * 4]


def settled(config: RunConfig, folder: Path) -> float | str:
    mesh = Mesh(config.parallel, dist.get_rank())
    found, _ = settle_bucket_size(config, check(config), mesh, open_samples(config, "train"), folder, resume=False)
    return found.parallel.bucket_mb


def test_the_bucket_size_can_be_measured(pool, tmp_path):
    first, second = pool.run(settled, 2, config_of("unet", {"dp": 2, "zero": 1, "bucket_mb": "auto"}), tmp_path)
    assert first == second == 1.0  # all sizes give one bucket


def by_sample(model: nn.Module, batch: Tensor) -> tuple[Tensor, int, dict[str, tuple[float, int]]]:
    """A loss whose metrics have the name of its micro-batch's half of the samples."""
    return *loss(model, batch), {"low" if batch.min() < 0.5 else "high": (1.0, 1)}


def by_replica(model: nn.Module, batch: Tensor) -> tuple[Tensor, int, dict[str, tuple[float, int]]]:
    """A loss with a metric on one rank alone, and one without terms."""
    return *loss(model, batch), {"empty": (0.0, 0), "a": (3.0, 1)} | ({"b": (1.0, 1)} if dist.get_rank() else {})


one_name = OwnModel(net, lambda model, batch: (*loss(model, batch), {"empty": (0.0, 0), "a": (3.0, 1)}), ROWS)
two_names, some_names = OwnModel(net, by_sample, ROWS), OwnModel(net, by_replica, ROWS)


def metrics_or_refusal(config: RunConfig) -> str:
    engine = start(config)
    try:
        engine.step(0)
    except UsageError as error:
        return str(error)
    return str(engine.metrics)


@pytest.mark.parametrize(("name", "dp", "says"), [
    ("one_name", 2, r"^{'a': 3.0}$"),
    ("two_names", 1, r"the metrics of its loss\(\) are \w+, and of another batch \w+.\n  Return all of them"),
    ("some_names", 2, r"are a, (b, )?empty on this rank, and others on another.\n  Return all of them for each batch"),
])  # fmt: skip
def test_metrics_have_the_same_names_in_all_batches(name, dp, says, pool):
    config = named(name, train={"global_batch": 16})
    layout = config.parallel.model_copy(update={"dp": dp, "zero": 0})
    for found in pool.run(metrics_or_refusal, dp, config.model_copy(update={"parallel": layout})):
        assert re.search(says, found), found


def test_samples_that_draw_are_those_of_the_seed_and_are_not_made_by_a_thread():
    first, again = (OwnDataset(plain.odd, "train", 0) for _ in range(2))
    assert first.draws and first.fingerprint == again.fingerprint
    assert torch.equal(first.batch(range(4)).values, again.batch(range(4)).values)
    assert not torch.equal(first.batch(range(4)).values, OwnDataset(plain.odd, "train", 1).batch(range(4)).values)
    assert not OwnDataset(OwnModel(net, loss, ROWS), "train", 0).draws


def test_generators_of_the_devices_in_use_are_seeded(monkeypatch):
    seed, devices = (1 << 64) - 3, []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", devices.append)
    for used in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda used=used: used)
        seed_generators(seed)
        drawn = torch.rand(4)
        assert devices == [(1 << 63) - 3] * used
    torch.manual_seed((1 << 63) - 3)
    assert torch.equal(drawn, torch.rand(4))


def test_other_samples_of_the_same_number_are_noticed():
    first, other = (OwnDataset(OwnModel(net, loss, rows), "train", 0) for rows in (ROWS, ROWS + 1))
    assert first.fingerprint != other.fingerprint


def test_commands_that_need_a_shape_say_so():
    with pytest.raises(UsageError, match=r"(?s)model.module: this needs a shape of the catalog.*plan auto --module"):
        config_of("lstm", {}).model.shape(vocab=64, sequence_length=8)


def test_a_run_without_a_name_has_the_name_of_its_file_and_counts_samples():
    config = RunConfig.model_validate({"model": {"module": "runs/mine.py:own"}, "train": {"global_batch": 4}})
    console = Console(record=True, width=100)
    display = Display(console, config.counted)
    display.banner(config, parameters=10, device="cpu", threads=1, folder=Path("runs/one"))
    assert "mine, 10 parameters, 4 samples per step" in console.export_text()
