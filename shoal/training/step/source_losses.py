"""Loss of each source of a mixture, and how much of it was read."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce, to_host
from shoal.engine.data.batches import Batch, Dataset, MixtureDataset
from shoal.engine.models.loss import IGNORE, CrossEntropy
from shoal.engine.parallel.apply import LocalStage


class SourceLosses:
    """Sum of losses and number of targets of each source, over the steps since they were taken.

    Args:
        samples: the data; without a mixture nothing is summed.
    """

    def __init__(self, samples: Dataset, stages: list[LocalStage], mesh: Mesh):
        self._mesh, self._mixture = mesh, samples if isinstance(samples, MixtureDataset) else None
        self.names = self._mixture.blend.names if self._mixture else ()
        self._sums = torch.zeros(2, len(self.names), dtype=torch.float64, device=mesh.device)
        for stage in stages if self.names else ():
            if isinstance(loss := stage.module.loss, CrossEntropy):
                loss.keep_rows = True

    def add(self, batch: Batch, module: nn.Module) -> None:
        """Add a micro-batch whose loss the module has computed."""
        if batch.sources is None:
            return
        loss = module.loss
        assert isinstance(loss, CrossEntropy) and isinstance(loss.rows, Tensor)
        both = torch.stack((loss.rows.double(), (batch.targets != IGNORE).sum(1).double()))  # [2, b]
        self._sums.index_add_(1, batch.sources, both)

    def take(self) -> dict[str, float] | None:
        """Return the mean loss [nats per target] of each source that had any, and begin again from 0. Collective."""
        if not self.names:
            return None
        mine = self._sums * (self._mesh.index("tp") == 0)  # equal on all tensor-parallel ranks
        losses, targets = to_host(all_reduce(mine, self._mesh.group("world")))
        self.reset()
        return {
            name: loss / count for name, loss, count in zip(self.names, losses, targets, strict=True) if count
        }

    def reset(self) -> None:
        """Forget the losses since they were taken."""
        self._sums.zero_()

    def tokens(self, samples: int, length: int) -> dict[str, int] | None:
        """Return the tokens of each source in the first ``samples`` sequences of a run."""
        if self._mixture is None:
            return None
        return {name: drawn * length for name, drawn in self._mixture.blend.drawn(samples).items()}
