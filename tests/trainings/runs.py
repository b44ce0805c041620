"""Small trainings: their settings, starting them as a user does or in the pool, and what they leave behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from shoal.base.section import plain
from shoal.engine.checkpoint.manifest import list_checkpoints
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.data.batches import open_dataset
from shoal.engine.data.prepare import prepare
from shoal.launch.supervisor import PROCESSES_FILE
from shoal.spec.config import RunConfig, build_config
from shoal.training.check import check
from shoal.training.records.metrics import StepMetrics, read_metrics
from shoal.training.run_folder import new_run
from shoal.training.samples import open_validation
from shoal.training.trainer import Trainer
from tests.trainings.forked import Command, command

ROOT = Path(__file__).parents[2]
FOUR_RANKS = {"dp": 2, "zero": 1, "tp": 2, "micro_batch": 2}
DEADLINE = 120.0  # seconds for one run, on a machine that is busy


def small_config(corpus: Path, parallel: dict[str, Any] | None = None, **sections: dict[str, Any]) -> RunConfig:
    """Two layers of width 32 and 256 tokens a step, every step logged, no restart; ``sections`` override.

    Without the sample at the end, which takes as long as the steps, and without TensorBoard: `base_run` has both.
    """
    values: dict[str, dict[str, Any]] = {
        "model": {"name": "tiny", "layers": 2, "hidden": 32, "heads": 2, "ffn": 64},
        "parallel": {"micro_batch": 2} if parallel is None else parallel,
        "data": {"source": "jsonl", "paths": [str(corpus)], "cache": str(corpus.parent / "cache"),
                 "sequence_length": 32, "validation_fraction": 0.1},
        "train": {"steps": 40, "global_batch": 8, "validation_sequences": 8, "validate_every": 20, "threads": 1},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 4},
        "checkpoint": {"every": 4, "keep": 100},
        "metrics": {"log_every": 1, "sample_prompt": "", "tensorboard": False},
        "failover": {"restarts": 0},
    }
    for name, changes in sections.items():
        values[name] = values.get(name, {}) | changes
    return build_config(values)


# ---- as a user does --------------------------------------------------------------------------------------------------


def start(
    *words: str | Path, agent: tuple[str, ...] = (), launcher: tuple[str, ...] = (), cwd: Path = ROOT,
    module: str = "shoal",
) -> subprocess.Popen | Command:
    """``shoal WORDS``, as a process of its own; stderr goes to its stdout's pipe.

    Args:
        agent: torchrun's words: under an agent, and it and its workers are forks.
        launcher: a module and its words, which starts it in interpreters of their own.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
    environment["PYTHONPATH"] = str(ROOT)
    if agent:
        return command(["-m", module, *map(str, words)], environment, cwd, agent)
    if not launcher and module == "shoal":
        return command([*map(str, words)], environment, cwd)
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, *(["-m"] if launcher else []), module, *map(str, words)],
        cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )


def shoal(*words: str | Path, **options: Any) -> tuple[int, str]:
    """Run ``shoal WORDS`` to its end (options as of `start`); returns the exit code and what it said."""
    process = start(*words, **options)
    output = process.communicate(timeout=DEADLINE)[0]
    return process.returncode, output


def interrupt(
    process: subprocess.Popen | Command, folder: Path, step: int, act: Callable[[list[psutil.Process]], None]
) -> tuple[int, str, float]:
    """Let a run log ``step``, then act on its processes (the parent, then the ranks in order).

    Returns the exit code, what was said, and the seconds from the act to the end of the parent; asserts that no rank
    outlives it.
    """
    wait_for(lambda: process.poll() is not None or logged(folder) >= step)
    assert process.poll() is None, process.communicate()[0]
    parent = psutil.Process(process.pid)
    ranks = [psutil.Process(pid) for pid in json.loads((folder / PROCESSES_FILE).read_text())["ranks"]]
    act([parent, *ranks])
    begin = time.monotonic()
    output = process.communicate(timeout=DEADLINE)[0]
    seconds = time.monotonic() - begin
    wait_for(lambda: not any(alive(rank) for rank in ranks), 10)
    return process.returncode, output, seconds


def send(which: int, signum: signal.Signals) -> Callable[[list[psutil.Process]], None]:
    """Signal the parent (0) or a rank (1 + rank)."""
    return lambda processes: processes[which].send_signal(signum)


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def wait_for(condition: Callable[[], bool], seconds: float = DEADLINE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


# ---- in the pool -----------------------------------------------------------------------------------------------------


def train_here(values: dict[str, Any], folder: Path, resume: bool) -> None:
    """One rank's training, in a process group that is there."""
    config = build_config(values)
    mesh = Mesh(config.parallel, dist.get_rank())
    samples = {split: open_dataset(config.data, seed=config.train.seed, split=split)
               for split in ("train", "validation")}
    here = dist.get_world_size()
    more = open_validation(config)
    Trainer(config, check(config), mesh, samples, folder, resume=resume, local_ranks=here, validation=more).run()


def train_in(pool, config: RunConfig, folder: Path, *, resume: bool = False) -> Path:
    """The same on all ranks of a layout, in the pool; returns the folder."""
    check(config)
    prepare(config.data)
    if not resume:
        new_run(config, folder)
    pool.run(train_here, config.parallel.world_size, plain(config), folder, resume, timeout=DEADLINE)
    return folder


# ---- what a run leaves behind ----------------------------------------------------------------------------------------


def logged(folder: Path) -> int:
    """The last step whose record is complete."""
    records = read_metrics(folder)
    return records[-1].step if records else 0


def curve(folder: Path) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of each record."""
    return [(r.step, r.loss, r.gradient_norm) for r in read_metrics(folder)]


def records(folder: Path) -> list[StepMetrics]:
    return read_metrics(folder)


def checkpoints(folder: Path) -> dict[int, Path]:
    """By step."""
    return {found.step: found.path for found in list_checkpoints(folder / "checkpoints")}


def stored(path: Path) -> dict[str, Tensor]:
    """Every box of a checkpoint, by its name and place."""
    boxes = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            boxes |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 -- not a mapping
    return boxes


def same_bits(one: Path, other: Path) -> bool:
    """Whether two checkpoints of one layout hold the same tensors, bit for bit."""
    a, b = stored(one), stored(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def copy_until(folder: Path, to: Path, step: int) -> Path:
    """A copy of a run as it was when the checkpoint of ``step`` was its newest."""
    shutil.copytree(folder, to)
    for later, path in checkpoints(to).items():
        if later > step:
            shutil.rmtree(path)
    return to
