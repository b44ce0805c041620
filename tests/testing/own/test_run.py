"""`shoal.Run`: trained on ranks that it starts, resumed on another layout, and continued after the loss of a rank."""

import os
import signal
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import shoal
from shoal.base.errors import UsageError
from shoal.base.files import LARGEST
from shoal.engine.optim.schedule import learning_rate
from shoal.engine.own.definition import OwnModel, load_own_model, save_own_model
from shoal.launch import train as train_module
from shoal.testing.own_run import RunResult
from shoal.training.resilience.events import read_events
from tests.testing.own.plain import Dense, Images, UNet, rebuilt
from tests.trainings.forked import command
from tests.trainings.runs import DEADLINE

STEPS = 6


class Deadly:
    """Samples that kill the process that first reads one of them."""

    def __init__(self, flag: Path):
        self.flag, self.images = flag, Images()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if i == 7 and self.flag.exists():
            self.flag.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.images[i]


def measured(model: torch.nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int, dict[str, tuple]]:
    loss, terms = rebuilt(model, batch)
    return loss, terms, {"root": (loss.detach(), terms), "samples": (torch.tensor([len(batch[0])]), 1)}


def run_of(
    data: object = Images, loss: object = rebuilt, own: dict | None = None, model: type = UNet, **layout: int
) -> shoal.Run:
    return shoal.Run(
        **own or {},
        model=model, loss=loss, data=data, layout=shoal.Layout(micro_batch=2, **layout), global_batch=4,
        optimizer=shoal.AdamW(lr=0.01), checkpoint={"every": 2}, metrics={"log_every": 1, "tensorboard": False},
        train={"device": "cpu", "validation_sequences": 4}, failover={"memory_every": 1},
    )


@pytest.fixture(scope="module", autouse=True)
def forked_ranks(rank_server):
    """Ranks are forks of one server, so that no test pays for its imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "start_rank_server", lambda config, device: nullcontext(rank_server))
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run_of(dp=2, zero=2).train(STEPS, folder=tmp_path_factory.mktemp("own") / "run")


def test_it_learns_and_returns_values(undisturbed):
    assert undisturbed.code == 0
    assert undisturbed.metrics[-1].loss < undisturbed.metrics[0].loss
    model = UNet()
    model.load_state_dict(undisturbed.weights())  # every parameter and buffer, also what is not trained
    assert model.down[1].num_batches_tracked == STEPS
    assert torch.isfinite(model(torch.randn(1, 3, 16, 16))).all()


class Tied(UNet):
    """Another name of one of its modules, as the head of a language model is of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.down


def test_tied_weights_are_saved_once_and_returned_by_each_name(tmp_path):
    with pytest.raises(UsageError, match=r"Run\.train: steps = 0"):
        run_of(model=Tied).train(0)
    weights = run_of(model=Tied).train(2, folder=tmp_path / "run").weights()
    Tied().load_state_dict(weights)
    assert torch.equal(weights["again.0.weight"], weights["down.0.weight"])


def test_it_goes_on_after_the_loss_of_a_rank_with_the_same_bits(undisturbed, tmp_path):
    flag = tmp_path / "flag"
    flag.touch()
    found = run_of(Deadly(flag), dp=2, zero=2).train(STEPS, folder=tmp_path / "run")
    assert found.code == 0 and not flag.exists()
    assert any(event["event"] == "recovered" for event in read_events(tmp_path / "run"))
    for name, value in found.weights().items():
        assert torch.equal(value, undisturbed.weights()[name]), name


class Three(Images):
    def __len__(self) -> int:
        return 3


def test_few_samples_of_a_validation_count_once(tmp_path):
    """Not as often as 64 samples would need: the mean of three is the mean of each."""
    run = shoal.Run(model=UNet, loss=rebuilt, data=Images, validation=Three, train={"device": "cpu"})
    found = run.train(1, folder=tmp_path / "run")
    model = UNet()
    model.load_state_dict(found.weights())
    batch = [torch.stack([Three()[i][0] for i in range(3)])]
    with torch.no_grad():
        loss, terms = rebuilt(model.eval(), batch)
    assert found.metrics[-1].validation_loss == pytest.approx(float(loss) / terms, rel=1e-5)


def test_a_run_of_python_has_the_defaults_of_the_command_line(undisturbed):
    run = shoal.Run(model=UNet, loss=rebuilt, data=Images, layout=shoal.Layout(dp=2, micro_batch=2))
    default = shoal.RunConfig().train
    assert run.config.train.model_copy(update={"global_batch": default.global_batch}) == default
    assert repr(record := undisturbed.metrics[-1]).startswith(f"StepMetrics(step={STEPS}, ")
    assert "None" not in repr(record)


def test_it_resumes_on_another_layout_by_its_folder_alone(undisturbed, tmp_path):
    """The copy of the definition in the run folder is enough, as for `shoal train --resume`.

    The user's AdamW, schedule and metrics give the same run as shoal's.
    """

    def note(*values: object) -> None:
        with open(tmp_path / "seen", "a") as file:
            file.write(" ".join(map(str, values)) + "\n")

    own = {
        "make_optimizer": lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.95)),
        "schedule": lambda step, steps: learning_rate(step, STEPS, shoal.AdamW(lr=0.01)),
        "on_step": lambda record: note(record.step, record.metrics),
        "on_validation": lambda record: note("validated", record.step, record.validation_metrics),
        "on_save": lambda step, folder: note("saved", step, folder.name),
    }
    half = run_of(loss=measured, own=own, dp=2, zero=2).train(STEPS // 2, folder=tmp_path / "run")
    seen = (tmp_path / "seen").read_text().splitlines()
    assert [line for line in seen if line[0].isdigit()] == [f"{each.step} {each.metrics}" for each in half.metrics]
    assert half.metrics[1].metrics == {"root": pytest.approx(half.metrics[1].loss), "samples": 2}
    assert half.metrics[2].validation_metrics["root"] == pytest.approx(half.metrics[2].validation_loss)
    assert [line for line in seen if line[0] == "v"] == [f"validated 3 {half.metrics[2].validation_metrics}"]
    assert [line for line in seen if line[0] == "s"] == ["saved 2 step-00000002", "saved 3 step-00000003"]
    config = shoal.load_config(tmp_path / "run" / "run.toml")
    assert Path(config.model.module).parent == tmp_path / "run"
    layout = config.parallel.model_copy(update={"dp": 1, "zero": 3})
    steps = config.train.model_copy(update={"steps": STEPS})
    changed = config.model_copy(update={"parallel": layout, "train": steps})
    assert shoal.train(changed, resume=tmp_path / "run") == 0
    assert [event["step"] for event in read_events(tmp_path / "run") if event["event"] == "resumed"] == [STEPS // 2]
    wanted = undisturbed.weights()
    for name, value in half.weights().items():
        if name not in ("down.0.bias", "middle.0.bias"):  # before batch norms: their gradients are rounding alone
            torch.testing.assert_close(value, wanted[name], rtol=1e-3, atol=1e-3, msg=name)


def test_a_split_of_operators_is_trained_and_its_checkpoints_fit_other_layouts(tmp_path):
    """A split run recovers from the loss of a rank. Its checkpoint resumes with data parallelism, and a checkpoint of
    data parallelism resumes with a split."""
    flag = tmp_path / "flag"
    flag.touch()

    def half(folder: str, data: object, **layout: int) -> RunResult:
        own = {"tensor_parallel": "auto"}
        return run_of(data, own=own, model=Dense, **layout).train(STEPS // 2, folder=tmp_path / folder)

    def resumed(run: RunResult, **layout: int) -> dict[str, torch.Tensor]:
        config = shoal.load_config(run.folder / "run.toml")
        steps = config.train.model_copy(update={"steps": STEPS})
        changed = config.model_copy(update={"parallel": shoal.Layout(micro_batch=2, **layout), "train": steps})
        assert shoal.train(changed, resume=run.folder) == 0
        return run.weights()

    split = half("split", Deadly(flag), tp=2)
    assert any(event["event"] == "recovered" for event in read_events(split.folder))
    replicated = half("replicated", Deadly(flag), dp=2, zero=1)
    assert split.metrics[-1].validation_loss == pytest.approx(replicated.metrics[-1].validation_loss, rel=1e-5)
    first, second = resumed(split, dp=2, zero=1), resumed(replicated, tp=2)
    assert "up.weight" in first
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-4, atol=1e-5, msg=name)


def test_another_model_does_not_resume_a_run(undisturbed):
    other = shoal.Run(model=lambda: torch.nn.Linear(16, 16), loss=rebuilt, data=Images, global_batch=4)
    differs = r"model.tensors = \[\['weight', \[16, 16\]\], \['bias', \[16\]\]\], was .*its checkpoint holds another"
    with pytest.raises(UsageError, match=differs):
        other.train(STEPS + 2, resume=undisturbed.folder)


@pytest.mark.parametrize(("arguments", "says"), [
    ({"loss": None}, "its loss is NoneType None"),
    ({"model": torch.nn.Linear(4, 1)}, "its model is a module, Linear.\\n  Give a function"),
    ({"blocks": "layers"}, "its blocks are the text 'layers'"),
    ({"trian": {}}, "Run: there is no key 'trian'; did you mean 'train'"),
    ({"train": {"stpes": 1}}, r"Run: there is no key 'train.stpes'; did you mean 'steps'"),
    ({"layout": {"dp": 2}}, r"Run: layout = {'dp': 2}.\n  Give shoal.Layout"),
    ({"layout": "Auto"}, "Run: layout = 'Auto'"),
    ({"optimizer": torch.optim.SGD}, r"Run: optimizer = <class 'torch.optim.sgd.SGD'>.\n  .* or make_optimizer="),
    ({"optimizer": "sgd"}, "Run: optimizer = 'sgd'"),
    ({"cluster": 8}, "cluster: name = 8 is of type int"),
    ({"train": 3}, "Run: train = 3: input should be a table"),
    ({"parallel": {"dp": 2}}, r"section \[parallel\] is given.\n  Give layout="),
])  # fmt: skip
def test_wrong_arguments_are_named(arguments, says):
    with pytest.raises(UsageError, match=says):
        shoal.Run(**{"model": UNet, "loss": rebuilt, "data": Images} | arguments)


@pytest.mark.parametrize(("own", "name"), [
    ({"on_step": threading.Lock().acquire}, "on_step"),
    ({"data": (image for image in ())}, "data"),
])
def test_what_cannot_reach_the_ranks_is_named(own, name, tmp_path):
    data = {"data": own.pop("data")} if "data" in own else {}
    with pytest.raises(UsageError, match=rf"its {name} cannot be sent to the ranks: TypeError: cannot pickle"):
        run_of(own=own, **data).train(1, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_it_trains_in_a_thread_and_resumes_there(tmp_path):
    """Which gets no signals, as in a server or a widget."""
    found = []
    for steps, where in ((1, {"folder": tmp_path / "run"}), (2, {"resume": tmp_path / "run"})):
        thread = threading.Thread(target=lambda steps=steps, where=where: found.append(run_of().train(steps, **where)))
        thread.start()
        thread.join()
    assert [(result.code, len(result.metrics)) for result in found] == [(0, 1), (0, 2)]
    [resumed] = [event for event in read_events(tmp_path / "run") if event["event"] == "resumed"]
    assert resumed["changed"] == {"train.steps": 2}, "the definition's new file is no change"


def test_a_wrong_field_of_the_optimizer_is_named():
    with pytest.raises(UsageError, match=r"AdamW: there is no key 'optimizer.momentun'; did you mean"):
        shoal.AdamW(momentun=0.9)


FIVE_LINES = """
import shoal, torch
run = shoal.Run(
    model=lambda: torch.nn.Linear(4, 1), loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
    data=torch.ones(16, 4), layout=shoal.Layout(dp=2, zero=1, micro_batch=4), optimizer=shoal.AdamW(lr=0.1),
    train={"device": "cpu"},
)
assert run.verify(steps=1).same
assert run.train(steps=2, folder="run").metrics[-1].loss > 0
"""


def test_functions_of_a_script_reach_the_ranks(tmp_path):
    """Which have no module that ranks could import, as in a notebook."""
    (tmp_path / "script.py").write_text(FIVE_LINES)
    done = command([], os.environ, tmp_path, script="script.py")
    said, _ = done.communicate(timeout=DEADLINE)
    assert done.returncode == 0, said


def test_samples_in_memory_may_be_larger_than_other_files(tmp_path):
    samples = torch.zeros(LARGEST + 1, 1, dtype=torch.uint8)
    save_own_model(OwnModel(UNet, rebuilt, samples), tmp_path / "own.pkl")
    assert len(load_own_model(str(tmp_path / "own.pkl")).samples("train")) == LARGEST + 1


def test_a_damaged_definition_is_refused(tmp_path):
    (tmp_path / "own.pkl").write_bytes(b"no pickle")
    with pytest.raises(UsageError, match=r"own\.pkl is damaged, or no run has written it"):
        load_own_model(str(tmp_path / "own.pkl"))
