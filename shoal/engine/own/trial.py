"""Runs of a first micro-batch in one process, without values if that is possible."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.base.errors import UsageError, list_causes
from shoal.engine.own.definition import OwnModel, drawing
from shoal.engine.own.formats import prepare, widen
from shoal.engine.own.samples import OwnBatch, OwnDataset
from shoal.engine.own.tensor.layers import SplitRanks
from shoal.engine.own.tensor.table import apply_table
from shoal.engine.own.user_code import explained
from shoal.engine.precision.policy import Policy
from shoal.engine.sharding.loss import LossPlan

T = TypeVar("T")

FITTING = ("Where heads are split, tp divides their number, also that of keys and values; each layer whose output is "
           "split needs one that takes it.")

NEEDS_VALUES = (
    fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException, fake_tensor.UnsupportedOperatorException,
    fake_tensor.UnsupportedMutationAliasingException, NotImplementedError,
)  # fmt: skip
"""Errors of a fake tensor whose values are read, such as by ``item``, ``nonzero`` or an operator without shapes."""

SAYS_SO = re.compile("tensor subclass|fake ?tensor|fake impl|data pointer", re.IGNORECASE)
"""Messages of other errors for the same reason, such as ``numpy()`` and custom operators raise."""

MISFIT = re.compile(
    "same reduction dim|broadcast a dimension|is invalid for input of size|channel dimensions|normalized_shape|"
    "tensors must match|Expected size for first two|to match target batch_size|size mismatch"
)  # fmt: skip
"""Messages of the meta device about shapes that do not fit together, whatever the values."""


def try_out(own: OwnModel, seed: int, micro_batch: int, ranks: SplitRanks | None = None) -> None:
    """Make the first micro-batch of each split, and compute its loss on the meta device if the module can.

    With ranks that split the module, compute it with one rank's part too.

    Raises:
        UsageError: no batch can be made, shapes do not fit together, or the loss is not as `OwnModel` says.
    """
    batches = [OwnDataset(own, split, seed).batch(range(micro_batch)) for split in ("train", "validation")]
    module = own.build_empty().train()
    if not all(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        return
    with explained("its loss()"):
        try:
            with drawing(seed), torch.device("meta"):
                own.compute(module, batches[0].map(lambda tensor: tensor.to("meta")).values)
        except Exception as error:  # many operators need values
            if isinstance(error, UsageError) or MISFIT.search(str(error)):
                raise
            return
    if ranks is None or isinstance(own.tensor_parallel, LossPlan):
        return
    apply_table(module, own.tensor_parallel, ranks, experts=own.expert_parallel)
    what = f"its loss() with layers split over {ranks.describe()}"
    with explained(what, FITTING), drawing(seed), torch.device("meta"):
        own.compute(module, batches[0].map(lambda tensor: tensor.to("meta")).values)


def run_first(
    own: OwnModel, policy: Policy, seed: int, batch: OwnBatch, run: Callable[[nn.Module, OwnBatch], T],
    ranks: SplitRanks | None = None,
) -> tuple[T, bool]:
    """Build the module in the formats of a policy, on fake tensors, and run a function on it and a batch.

    A module that reads values is built and run with them on the CPU. One whose layers are split over ranks is not, as
    one rank's part has no right values.

    Returns:
        What the function returns, and whether values were needed.

    Raises:
        UsageError: the module or its loss fails.
    """
    what = f"its loss() with layers split over {ranks.describe()}" if ranks else "its loss()"
    with explained(what, f"{FITTING} It runs without values here." if ranks else ""):
        try:
            with drawing(seed), FakeTensorMode(allow_non_fake_inputs=True) as fake:
                module = own.checked(own.model())
                prepare(module, policy)
                if ranks:
                    apply_table(module, own.tensor_parallel, ranks, experts=own.expert_parallel)
                return run(module.train(), widen(batch.map(fake.from_tensor), policy)), False
        except Exception as error:
            if ranks or not needs_values(error):
                raise
    with drawing(seed), explained(what):
        module = own.build(seed)
        prepare(module, policy)
        return run(module.train(), widen(batch, policy)), True


def needs_values(error: Exception) -> bool:
    """Return whether an error comes from reading a value of a fake tensor."""
    return any(isinstance(each, NEEDS_VALUES) or SAYS_SO.search(str(each)) for each in list_causes(error))
