"""A first batch and a loss without values, before ranks start."""

from __future__ import annotations

import torch

from shoal.base.errors import UsageError
from shoal.engine.own.definition import OwnModel, drawing, explain
from shoal.engine.own.samples import OwnBatch, OwnDataset


def try_out(own: OwnModel, seed: int, micro_batch: int) -> None:
    """Make the first micro-batch of each split, and compute its loss on the meta device if the module can.

    Raises:
        UsageError: no batch can be made, or the loss is not as `OwnModel` says.
    """
    batches: list[OwnBatch] = []
    for split in ("train", "validation"):
        try:
            batches.append(OwnDataset(own, split, seed).batch(range(micro_batch)))
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"model.module: its first {split} batch fails: {explain(error)}.") from error
    module = own.build_empty().train()
    if not all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return
    try:
        with drawing(seed), torch.device("meta"):
            own.compute(module, batches[0].map(lambda tensor: tensor.to("meta")).values)
    except UsageError:
        raise
    except Exception:  # many operators need values
        return
