"""Steps that the host does not wait for: clipping and finiteness are decided on the device, and read one step late.

Each rank launches the next step while the device computes this one. A loss or gradient norm that is not finite sets a
flag on the device, and no later update changes weights or states, so that the host may learn of it afterwards. These
read the device in each step and are therefore not started this way (`starts_early`):

- loss scaling: the scale of the next step depends on the overflow in this one;
- asynchronous pipelines and relaxed data parallelism: stages and replicas decide on their own;
- delayed scales of fp8: their history would include values of a failed step;
- update rules without a kernel that reads the flag (`Rule.skips_on_device`), and rules on weights in host memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from shoal.engine.collectives.ops import all_reduce, to_host
from shoal.engine.streams import Mark, copy_later
from shoal.training.step.engine_state import EngineState
from shoal.training.step.optimizer_step import NonFinite, StepResult, sum_totals


def starts_early(engine: EngineState) -> bool:
    """Return whether steps run without the host waiting, on all ranks. Collective."""
    layout, device, history = engine.config.parallel, engine.mesh.device, engine.float8 and engine.float8.history
    decides_itself = layout.sync != "all-reduce" or engine.program.updates > 1
    if device.type != "cuda" or decides_itself or engine.loss_scale or history:
        return False
    # Ranks must agree: one without shards may have another rule.
    able = torch.tensor(float(engine.optimizer.skips_on_device), device=device)
    return to_host(all_reduce(able, engine.mesh.group("world"), ReduceOp.MIN)) > 0


@dataclass(frozen=True)
class StartedStep:
    """A step whose result is on its way to the host.

    Attributes:
        values: float64 [5] on the host after ``copied``: loss sum, stop requests, squared gradient norm, tokens, and
            0 after a failure.
    """

    step: int
    learning_rate: float
    values: Tensor
    copied: Mark

    def read(self) -> StepResult:
        """Wait for the result.

        Raises:
            NonFinite: on every rank; the weights are unchanged by this step and later ones.
        """
        self.copied.synchronize()
        loss, stops, square, tokens, good = self.values.tolist()
        mean, norm = loss / max(1, tokens), math.sqrt(square) if square >= 0 else math.nan
        if not good:
            raise NonFinite(f"step {self.step}: loss {mean:g}, gradient norm {norm:g}")
        return StepResult(mean, norm, self.learning_rate, int(tokens), stops > 0)


def update_on_device(
    engine: EngineState, step: int, counts: Tensor, rate: float, stop: bool, loss: Tensor
) -> StartedStep:
    """Clip the gradients by their norm over all stages and update the weights, unless a step was not finite.

    Args:
        counts: [1] unmasked targets in the global batch.
        loss: sum over this rank's micro-batches [nats].
    """
    failed, totals = engine.failed, sum_totals(engine, loss, stop, engine.parameters.square_norm())
    failed.copy_(torch.maximum(failed, (~torch.isfinite(totals).all()).float()))
    scale: Tensor | float = 1.0
    if clip := engine.config.optimizer.clip_norm:
        scale = (clip / totals[2].sqrt()).clamp(max=1)
    engine.optimizer.step(rate, scale, failed)
    engine.refresh_parameters()
    if engine.routing:
        engine.routing.rebalance(failed)
    values, copied = copy_later(torch.cat((totals, counts.double(), 1 - failed.double().view(1))))
    return StartedStep(step, rate, values, copied)
