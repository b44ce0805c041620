"""Weights & Biases and MLflow themselves, with stores on this machine: what they keep is what was logged."""

import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.spec.config.sections import MetricsConfig
from shoal.training.records.metrics import MetricsWriter, StepMetrics

FIRST = StepMetrics(1, 2, 5.5, 1e-3, 100.0, 50.0, 1 << 20, 9.0, gradient_norm=1.25, source_loss={"web": 2.5})
SECOND = replace(FIRST, step=2, loss=5.0, validation_loss=4.5, source_loss=None)
RUN = {"model": {"layers": 2}, "train": {"steps": 2}}


def log(folder: Path, tracker: str) -> None:
    with closing(MetricsWriter(folder, 0, MetricsConfig(tensorboard=False, **{tracker: "project"}), RUN)) as writer:
        writer.write(FIRST)
        writer.write(SECOND)


def read_wandb(file: Path) -> Iterator[bytes]:
    """The records of an offline run: after 7 bytes, a log of LevelDB's format, in blocks of 32 KiB."""
    content, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            yield record
            record = b""


def test_an_offline_run_of_wandb_has_every_value(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2 as messages

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log(tmp_path / "run", "wandb")
    [file] = (tmp_path / "run" / "wandb").rglob("*.wandb")
    steps, project = [], ""
    for content in read_wandb(file):
        record = messages.Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            steps.append({item.key or "/".join(item.nested_key): item.value_json for item in record.history.item})
        elif record.WhichOneof("record_type") == "run":
            project = record.run.project
    assert project == "project" and [step["_step"] for step in steps] == ["1", "2"]
    assert [float(step["loss/train"]) for step in steps] == [5.5, 5.0]
    assert float(steps[0]["loss_by_source/web"]) == 2.5 and float(steps[1]["loss/validation"]) == 4.5
    assert float(steps[0]["optimizer/gradient_norm"]) == 1.25


def test_a_local_store_of_mlflow_has_every_value(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    log(tmp_path / "run", "mlflow")
    client = mlflow.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    assert run.info.run_name == "run" and run.info.status == "FINISHED"
    assert run.data.params == {"model.layers": "2", "train.steps": "2"}
    history = client.get_metric_history(run.info.run_id, "loss/train")
    assert [(value.step, value.value) for value in history] == [(1, 5.5), (2, 5.0)]
    assert run.data.metrics["loss/validation"] == 4.5 and run.data.metrics["memory/peak_bytes"] == 1 << 20
