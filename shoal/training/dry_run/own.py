"""Dry run of a model of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shoal.base.errors import UsageError
from shoal.engine.collectives.group import Group
from shoal.engine.own.definition import OwnModel
from shoal.engine.own.samples import OwnBatch
from shoal.engine.own.trial import needs_values
from shoal.engine.parallel.apply import LocalStage
from shoal.engine.parallel.zero.rank_parameters import RankParameters
from shoal.training.step.own_engine import Found, OwnEngine


class DryOwnModel(OwnModel):
    """Definition whose modules have no values."""

    def build(self, seed: int) -> nn.Module:
        with unset_fake_temporarily():
            module = self.build_empty()
        fakes: dict[Tensor, Tensor] = {}
        for owner in module.modules():
            for name, x in [*owner._parameters.items(), *owner._buffers.items()]:
                if x is not None and (x.is_meta or x.is_floating_point()):
                    if x not in fakes:
                        fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
                        fakes[x] = nn.Parameter(fake, x.requires_grad) if isinstance(x, nn.Parameter) else fake
                    setattr(owner, name, fakes[x])
        return module


class DryOwnEngine(OwnEngine):
    """Engine of a model of one's own whose parameters have no values: a batch has one term, and no metrics."""

    def build_stages(self, trained: bool) -> tuple[list[LocalStage], RankParameters]:
        self.own = DryOwnModel(**{field.name: getattr(self.own, field.name) for field in fields(self.own)})
        return super().build_stages(trained)

    def explore(self, look: Callable[[OwnBatch], Found]) -> Found:
        with unset_fake_temporarily():
            return super().explore(look)

    def initialise(self) -> None:
        self.parameters.gather()

    def _totals(self, replicas: Group | None) -> tuple[float, dict[str, float]]:
        stage = self.stages[-1]
        self._sum(stage.counted.new_zeros(3), replicas)
        if stage.names:
            self._sum(stage.counted.new_zeros(len(stage.names), 2), replicas)
        return 1.0, {}

    def _move(self, batches: Any, sequences: float) -> list[Any]:
        return [batch.map(lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)) for batch in batches]


@contextmanager
def count_own() -> Iterator[None]:
    """Explain errors of a module that reads values, of which a dry run has none.

    Raises:
        UsageError: it does.
    """
    try:
        yield
    except Exception as error:
        if not needs_values(error):
            raise
        what = str(error).removeprefix("model.module: ").removesuffix(".")
        raise UsageError(f"model.module: {what}, since a dry run has no values.\n  Leave out the dry run, or "
                         "compute without reading values: by torch.where instead of a condition, by grouped products "
                         "instead of a loop over experts.") from None
