"""Metrics: every line is kept, and a resumed run has each step once."""

import json
import sys
from contextlib import closing
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.spec.config.sections import MetricsConfig
from shoal.training.records.metrics import BY_NAME, COUNTS, FILE_NAME, TAGS, MetricsWriter, StepMetrics, read_metrics
from tests.trainings.runs import small_config, train_in

PLAIN = MetricsConfig(tensorboard=False)
SAMPLE = StepMetrics(step=1, steps=20, loss=5.5, learning_rate=1e-3, gradient_norm=1.2, tokens_per_second=2e4,
                     tokens_per_second_per_rank=5e3, memory_bytes=1 << 30, seconds_left=61.0, mfu=0.4)


def test_records_come_back_as_written(tmp_path):
    written = [SAMPLE, replace(SAMPLE, step=2, mfu=None, validation_loss=2.5)]
    with closing(MetricsWriter(tmp_path, 0, PLAIN, {})) as writer:
        for record in written:
            writer.write(record)
            assert (tmp_path / FILE_NAME).read_text().endswith("}\n")  # at once, not when closed
    assert read_metrics(tmp_path) == written
    assert "mfu" not in json.loads((tmp_path / FILE_NAME).read_text().splitlines()[1])


@settings(max_examples=30, deadline=None)
@given(done=st.integers(0, 12), resume=st.integers(0, 12), torn=st.integers(1, 40))
def test_a_resumed_run_has_each_step_once(tmp_path_factory, done, resume, torn):
    folder = tmp_path_factory.mktemp("run")
    resume = min(resume, done)
    with closing(MetricsWriter(folder, 0, PLAIN, {})) as writer:
        for step in range(1, done + 1):
            writer.write(replace(SAMPLE, step=step))
    with open(folder / FILE_NAME, "a") as file:  # killed in the middle of the next line
        file.write(json.dumps({"step": done + 1, "loss": 4.25, "memory_bytes": 123456})[:torn])
    with closing(MetricsWriter(folder, resume, PLAIN, {})) as writer:
        for step in range(resume + 1, 16):
            writer.write(replace(SAMPLE, step=step, loss=1.0))
    records = read_metrics(folder)
    assert [r.step for r in records] == list(range(1, 16))
    assert [r.loss for r in records] == [5.5] * resume + [1.0] * (15 - resume)


def test_a_damaged_line_in_the_middle_is_not_hidden(tmp_path, capsys):
    with closing(MetricsWriter(tmp_path, 0, PLAIN, {})) as writer:
        writer.write(SAMPLE)
    path = tmp_path / FILE_NAME
    path.write_text("{torn\n" + path.read_text())
    assert read_metrics(tmp_path) == [SAMPLE]
    assert "left out line 1, which is no record of a step" in capsys.readouterr().err
    MetricsWriter(tmp_path, 1, PLAIN, {}).close()  # a run resumes
    assert read_metrics(tmp_path) == [SAMPLE] and capsys.readouterr().err.count("left out") == 1


def test_tensorboard_gets_every_value(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with closing(MetricsWriter(tmp_path, 0, MetricsConfig(), {})) as writer:
        writer.write(SAMPLE)
        writer.write(replace(SAMPLE, step=2, loss=5.0, validation_loss=2.5))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {*SAMPLE.values(), "loss/validation"}
    assert [(e.step, e.value) for e in events.Scalars("loss/train")] == [(1, 5.5), (2, 5.0)]


def test_every_number_has_a_tag_in_a_group():
    numbers = {field.name for field in fields(StepMetrics)} - {*COUNTS, *BY_NAME, "expert_load", "memory_by_rank"}
    assert numbers == {*TAGS} and len({*TAGS.values()}) == len(TAGS)
    assert all(tag.count("/") == 1 for tag in TAGS.values())


@pytest.mark.parametrize("extra", ["wandb", "mlflow"])
def test_a_missing_tracker_names_its_extra(tmp_path, monkeypatch, extra):
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(UsageError, match=rf"shoal\[{extra}\]"):
        MetricsWriter(tmp_path, 0, MetricsConfig(tensorboard=False, **{extra: "x"}), {})


class Recorder(SimpleNamespace):
    """Stands for a tracker's package: writes down what is called, and with what."""

    def __init__(self):
        super().__init__(calls=[])

    def __getattr__(self, name):
        def call(*args, **options):
            self.calls.append((name, args, options))
            return self

        return call


def tracked(folder, monkeypatch, extra) -> list[tuple[str, tuple, dict]]:
    """The calls that a tracker's package sees of a run of two steps."""
    package = Recorder()
    monkeypatch.setitem(sys.modules, extra, package)
    run = {"model": {"layers": 2}, "train": {"steps": 20, "seed": 3}}
    with closing(MetricsWriter(folder, 0, MetricsConfig(tensorboard=False, **{extra: "project"}), run)) as writer:
        writer.write(SAMPLE)
        writer.write(replace(SAMPLE, step=2, loss=5.0, validation_loss=2.5))
    assert [record.step for record in read_metrics(folder)] == [1, 2]
    return package.calls


def test_a_tracker_that_fails_gets_its_records_later(tmp_path, monkeypatch):
    written, said, full = [], [], OSError(28, "No space left on device")

    class Writer:
        def __init__(self, folder, purge_step):
            self.good = len(said) != 1 or written.append("opened again")

        def add_scalar(self, name, value, step):
            if step == 2 and not said:
                raise full
            written.extend([step] if name == "loss/train" else [])

        def close(self):
            raise full

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", Writer)
    with closing(MetricsWriter(tmp_path, 0, MetricsConfig(), {}, said.append)) as writer:
        for step in (1, 2, 3):
            writer.write(replace(SAMPLE, step=step))
    assert written == [1, "opened again", 2, 3] and len(said) == 1 and "No space left" in said[0]


SECOND = SAMPLE.values() | {"loss/train": 5.0, "loss/validation": 2.5}


def test_wandb_gets_every_value_and_the_settings(tmp_path, monkeypatch):
    start, *writes, end = tracked(tmp_path / "run-7", monkeypatch, "wandb")
    assert start == ("init", (), {
        "project": "project", "name": "run-7", "dir": tmp_path / "run-7", "id": "run-7", "resume": "allow",
        "config": {"model": {"layers": 2}, "train": {"steps": 20, "seed": 3}},
    })
    assert writes == [("log", (SAMPLE.values(),), {"step": 1}), ("log", (SECOND,), {"step": 2})]
    assert end == ("finish", (), {})


def test_mlflow_gets_every_value_and_the_settings(tmp_path, monkeypatch):
    experiment, start, model, train, *writes, end = tracked(tmp_path / "run-7", monkeypatch, "mlflow")
    assert experiment == ("set_experiment", ("project",), {})
    assert start == ("start_run", (), {"run_name": "run-7"})
    assert model == ("log_params", ({"model.layers": 2},), {})
    assert train == ("log_params", ({"train.steps": 20, "train.seed": 3},), {})
    assert writes == [("log_metrics", (SAMPLE.values(),), {"step": 1}), ("log_metrics", (SECOND,), {"step": 2})]
    assert end == ("end_run", (), {})


def test_what_routers_did_goes_into_the_record_and_lists_not_to_trackers(tmp_path):
    import torch

    from shoal.engine.models.experts.router import SUMS
    from shoal.spec.catalog import model_shape
    from shoal.training.step.routing import expert_metrics

    shape = model_shape("mixtral-8x7b")
    totals = torch.zeros(2, SUMS + 8, dtype=torch.float64)
    totals[:, 0], totals[:, SUMS], totals[:, SUMS + 1] = 4, 9, 3  # dropped; all tokens to the first two experts
    routed = expert_metrics(totals, shape, sequences=2, length=4)
    assert [routed[name] for name in ("dropped", "idle_experts", "busiest_expert")] == [8 / 32, 6 / 8, 8 * 9 / 12]
    record = StepMetrics(1, 2, 3.0, 0.1, 1.0, 10.0, 5.0, 100, 1.0, **routed)
    assert record.values()["experts/dropped"] == 0.25
    assert not any("load" in tag for tag in record.values())
    with closing(MetricsWriter(tmp_path, 0, PLAIN, {})) as writer:
        writer.write(record)
    (found,) = read_metrics(tmp_path)
    assert found.expert_load == [[0.75, 0.25, 0, 0, 0, 0, 0, 0]] * 2


def test_losses_of_sources_are_read_again_and_named_one_by_one_in_trackers(tmp_path):
    by_source = {"source_loss": {"web": 2.5, "code": 1.5}, "source_tokens": {"web": 64, "code": 32}}
    record = StepMetrics(1, 2, 3.0, 0.1, 1.0, 10.0, 5.0, 100, 1.0, **by_source)
    values = record.values()
    assert values["loss/train"] == 3.0 and values["tokens_by_source/web"] == 64
    assert (values["loss_by_source/web"], values["loss_by_source/code"]) == (2.5, 1.5)
    with closing(MetricsWriter(tmp_path, 0, PLAIN, {})) as writer:
        writer.write(record)
    assert read_metrics(tmp_path) == [record]


def test_a_step_that_validated_is_logged_whatever_is_due(corpus, pool, tmp_path):
    config = small_config(
        corpus, train={"steps": 10, "validate_every": 4}, metrics={"log_every": 5},
    )
    found = read_metrics(train_in(pool, config, tmp_path / "run"))
    assert [(record.step, record.validation_loss is not None) for record in found] == [
        (1, False), (4, True), (5, False), (8, True), (10, True),
    ]
