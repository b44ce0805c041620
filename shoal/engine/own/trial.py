"""A first batch and a loss without values, before ranks start."""

from __future__ import annotations

import torch

from shoal.base.errors import UsageError
from shoal.engine.own.definition import OwnModel, drawing, explain
from shoal.engine.own.samples import OwnBatch, OwnDataset
from shoal.engine.own.tensor import SplitRanks, apply_table


def try_out(own: OwnModel, seed: int, micro_batch: int, tp: int = 1) -> None:
    """Make the first micro-batch of each split, and compute its loss on the meta device if the module can.

    With ``tp`` ranks that split the module, compute it with one rank's part too.

    Raises:
        UsageError: no batch can be made, the loss is not as `OwnModel` says, or parts of layers do not fit together.
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
    if tp == 1:
        return
    apply_table(module, own.tensor_parallel, SplitRanks(None, 0, tp))
    try:
        with drawing(seed), torch.device("meta"):
            own.compute(module, batches[0].map(lambda tensor: tensor.to("meta")).values)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"model.module: its loss() fails with layers split over parallel.tp = {tp}: {explain(error)}."
                         "\n  Where heads are split, tp divides their number, also that of keys and values; each layer "
                         "whose output is split needs one that takes it.") from error
