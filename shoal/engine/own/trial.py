"""A first batch and a loss without values, before ranks start."""

from __future__ import annotations

import torch

from shoal.base.errors import UsageError
from shoal.engine.own.definition import OwnModel, drawing
from shoal.engine.own.samples import OwnDataset
from shoal.engine.own.tensor import SplitRanks, apply_table
from shoal.engine.own.user_code import explained


def try_out(own: OwnModel, seed: int, micro_batch: int, tp: int = 1) -> None:
    """Make the first micro-batch of each split, and compute its loss on the meta device if the module can.

    With ``tp`` ranks that split the module, compute it with one rank's part too.

    Raises:
        UsageError: no batch can be made, the loss is not as `OwnModel` says, or parts of layers do not fit together.
    """
    batches = [OwnDataset(own, split, seed).batch(range(micro_batch)) for split in ("train", "validation")]
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
    what = f"its loss() with layers split over parallel.tp = {tp}"
    with explained(what, FITTING), drawing(seed), torch.device("meta"):
        own.compute(module, batches[0].map(lambda tensor: tensor.to("meta")).values)


FITTING = ("Where heads are split, tp divides their number, also that of keys and values; each layer whose output is "
           "split needs one that takes it.")
