"""What 8-bit Adam asks of a device that is no CPU: the meta device stands for it."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.engine.kernels import adam8bit
from shoal.engine.optim.build import build
from shoal.engine.optim.rule import BLOCK
from shoal.engine.optim.shards import Shards
from shoal.spec.config import OptimizerConfig


class Copies(TorchDispatchMode):
    """Counts what goes from the host to the device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.is_meta:
            self.count += any(isinstance(x, torch.Tensor) and not x.is_meta for x in args)
        return found


def test_a_device_takes_a_shard_whole_and_has_its_tables(monkeypatch):
    rounded, quantise = [], adam8bit.quantise
    monkeypatch.setattr(adam8bit, "quantise", lambda x, *rest: (rounded.append(x.shape), quantise(x, *rest))[1])
    weights, gradient = torch.empty(2, 1024, 4 * BLOCK // 1024, device="meta")
    shards = Shards.from_parameters([("w", weights, gradient)], lambda name, w: 0.1)
    rule = build(OptimizerConfig(name="adam8bit"), shards)
    with Copies() as copies:
        rule.step(0.1)
    assert rounded == [weights.shape] * 2, "both moments, each once"
    assert copies.count == 0
