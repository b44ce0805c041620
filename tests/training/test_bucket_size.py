"""`bucket_mb = "auto"`: a size that all ranks agree on, kept by the run folder, and a resume that goes on with it."""

import json
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shoal.base.section import plain
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.data.batches import open_dataset
from shoal.spec.config import build_config
from shoal.spec.layout import Layout
from shoal.training import bucket_size
from shoal.training.bucket_size import BUCKET_FILE
from shoal.training.check import check
from shoal.training.step.engine import Engine
from tests.trainings.runs import checkpoints, copy_until, same_bits, small_config, train_in

SMALL = (0.005, 0.02, 0.08, 8.0, 64.0)  # MiB: the model has 0.15


def swept(values: dict) -> tuple[dict[float, float], bool]:
    """Seconds by size, and whether a live engine's weights are as before."""
    config = build_config(values)
    samples = open_dataset(config.data, seed=0, split="train")
    mesh = Mesh(config.parallel, dist.get_rank())
    engine = Engine(config, check(config), mesh, samples)
    before = [bucket.full.clone() for bucket in engine.parameters.buckets]
    with patch.object(bucket_size, "SIZES", SMALL):  # its process runs other tests too
        seconds = bucket_size.sweep(config, check(config), mesh, samples)
    return seconds, all(map(torch.equal, before, [bucket.full for bucket in engine.parameters.buckets]))


def test_sizes_that_cut_alike_are_measured_once_and_all_ranks_agree(pool) -> None:
    values = {
        "model": {"name": "tiny", "layers": 3, "hidden": 32, "heads": 2, "ffn": 64},
        "parallel": {"dp": 2, "pp": 2, "micro_batch": 1, "bucket_mb": "auto"},
        "data": {"source": "synthetic", "sequence_length": 16}, "train": {"global_batch": 4},
    }
    found = pool.run(swept, 4, plain(build_config(values)))
    for seconds, untouched in found:
        assert seconds == found[0][0] and untouched
        assert set(seconds) < set(SMALL) and 64.0 not in seconds
        assert all(a < b for a, b in pairwise(seconds)) and min(seconds.values()) > 0


def test_a_resumed_run_takes_the_size_of_its_folder(pool, corpus, tmp_path) -> None:
    config = small_config(corpus, {"dp": 2, "micro_batch": 2, "bucket_mb": "auto"}, train={"steps": 8})
    folder = train_in(pool, config, tmp_path / "run")
    found = json.loads((folder / BUCKET_FILE).read_text())
    assert found["bucket_mb"] in found["seconds"] or str(found["bucket_mb"]) in found["seconds"]
    again = copy_until(folder, tmp_path / "again", 4)
    train_in(pool, config, again, resume=True)
    assert json.loads((again / BUCKET_FILE).read_text()) == found  # not measured anew
    assert same_bits(checkpoints(folder)[8], checkpoints(again)[8])


@pytest.mark.parametrize("content", ["", '{"bucket_mb": 4.0', '{"bucket_mb": "x", "measured on": {}}', "[1]", "{}"])
def test_a_damaged_size_is_measured_anew(content, tmp_path) -> None:
    (tmp_path / BUCKET_FILE).write_text(content)
    assert bucket_size._kept(build_config({"parallel": {"dp": 2, "bucket_mb": "auto"}}), tmp_path) is None


@pytest.mark.parametrize("parallel", [{}, {"dp": 2, "zero": 3}], ids=["alone", "ZeRO-3"])
def test_where_there_are_no_buckets_to_choose_nothing_is_measured(pool, corpus, tmp_path, parallel) -> None:
    config = small_config(corpus, {"micro_batch": 2, "bucket_mb": "auto", **parallel}, train={"steps": 2})
    folder = train_in(pool, config, tmp_path / "run")
    assert not (folder / BUCKET_FILE).exists()


def test_until_it_is_measured_auto_is_the_default() -> None:
    assert Layout(bucket_mb="auto").bucket_bytes == Layout().bucket_bytes == 25 * 2**20
