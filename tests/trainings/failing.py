"""Trainings in the pool to which something happens."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from shoal.base.section import plain
from shoal.spec.config import RunConfig, save_config
from shoal.training.resilience import silent_failure_checks
from shoal.training.resilience.replicas import SilentFailure
from shoal.training.resilience.spikes import Skips
from shoal.training.trainer import Trainer
from tests.trainings.runs import train_here

DEATH, BAD = 10, 9
"""The step after which a rank is lost; the batch that makes a spike."""

BAD_LOSS, FAR = 1e4, 1000
"""Of that spike, nats; and from how many deviations on one counts: more than any batch makes by itself."""


class Tells(Trainer):
    """Says where it went on from."""

    found = ""

    def run(self) -> None:
        Tells.found = f"step {self.step}, {self.source}"
        super().run()


class Dies(Tells):
    """Loses a rank after a step, when it has kept what it keeps of it."""

    def _after_step(self, *args: Any, **options: Any) -> None:
        super()._after_step(*args, **options)
        if self.step == DEATH:
            if self.states.memory:
                self.states.memory.wait()
            raise RuntimeError(f"rank {dist.get_rank()} is lost")


class Drifts(Tells):
    """On rank 1, a parameter changes after step 7."""

    def _after_step(self, *args: Any, **options: Any) -> None:
        if self.step == 7 and dist.get_rank() == 1:
            parameter = next(self.engine.stages[0].module.parameters())
            parameter.data.view(-1)[3] += 1e-3
        super()._after_step(*args, **options)


class ComputesOtherwise(Tells):
    """Step 8, computed twice, gives two results."""

    def run(self) -> None:
        twice = silent_failure_checks.reexecute

        def otherwise(engine: Any, step: int, *arguments: Any) -> None:
            twice(engine, step, *arguments)
            if step == 8:
                raise SilentFailure(f"step {step}: another result on rank 1", "silent corruption", [1])

        with mock.patch.object(silent_failure_checks, "reexecute", otherwise):
            super().run()


class Spikes(Tells):
    """One batch spoils the weights, and shows in the loss."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        engine, step = self.engine, self.engine.step

        def spoiling(number: int, **options: Any):
            result = step(number, **options)
            if engine.skips.batch(number) != BAD:
                return result
            for _, weights, _ in engine.parameters.shards():
                weights.mul_(3)
            engine.parameters.gather()
            return replace(result, loss=BAD_LOSS)

        engine.step = spoiling


class SpikesAndDies(Spikes, Dies):
    """The same, and is lost some steps later."""


class LeavesOut(Tells):
    """Without the batches 6 to 9 from the beginning."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.engine.skip(Skips([(6, 10)]))


def train_as(trainer: type[Trainer], values: dict[str, Any], folder: Path, resume: bool) -> str:
    """Train to the end; returns where it went on from."""
    with mock.patch("tests.trainings.runs.Trainer", trainer):
        train_here(values, folder, resume)
    return Tells.found


def train(pool, trainer: type[Trainer], config: RunConfig, folder: Path, *, resume: bool = False) -> str:
    """The same on all ranks of the layout."""
    if not resume:
        folder.mkdir(parents=True)
        save_config(config, folder / "run.toml")
    return pool.run(train_as, config.parallel.world_size, trainer, plain(config), folder, resume)[0]
