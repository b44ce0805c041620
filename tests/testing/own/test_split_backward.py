"""Where a schedule splits the backward, weight gradients are computed in the second half and equal autograd's."""

from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from shoal.engine.own.split_backward import LateGradients


class Mixed(nn.Module):
    """Every operator that waits, and what does not: ties, parameters of other operators, and recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6, padding_idx=2)
        self.first, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(requires_grad=False)
        self.matrix, self.offset = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4))
        self.down = nn.Conv2d(1, 4, 3, 2, 1, groups=1)
        self.up = nn.ConvTranspose2d(4, 2, 4, stride=2, padding=1, bias=False)
        self.same = nn.Conv1d(2, 2, 3, padding="same")
        self.unused = nn.Linear(2, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = checkpoint(lambda x: self.first(x).tanh(), self.table(ids), use_reentrant=False)
        x = self.frozen(self.first(x))  # a layer that runs twice
        x = F.linear(x, self.table.weight)  # a tied table
        y = torch.addmm(self.offset, x @ self.table.weight, self.matrix).relu()
        y = self.up(self.down(y[None, None]))
        return self.same(y.flatten(2)[0]) @ torch.ones(32, 3) + (self.matrix * self.matrix).sum()


class Parameters:
    """Gradients as `ShardedParameters` takes them."""

    def __init__(self, module: nn.Module):
        self.places, self.deferring = {p: None for p in module.parameters() if p.requires_grad}, False
        self.later: list = []

    @contextmanager
    def deferred(self):
        self.deferring = True
        yield
        self.deferring = False

    def add(self, parameters, term):
        self.later.append((parameters[0], term))


def test_weight_gradients_wait_and_are_autograds():
    torch.manual_seed(0)
    module, ids = Mixed().double(), torch.tensor([1, 2, 5, 1, 0, 7, 8, 3])
    loss = lambda: module(ids).square().sum()  # noqa: E731
    torch.set_default_dtype(torch.float64)
    try:
        with FlopCounterMode(display=False) as plain:
            loss().backward()
        wanted = {name: p.grad for name, p in module.named_parameters()}
        module.zero_grad()
        late, parameters = LateGradients(module), Parameters(module)
        late.connect(parameters)
        with FlopCounterMode(display=False) as first, parameters.deferred():
            loss().backward()
        with FlopCounterMode(display=False) as second:
            for parameter, term in parameters.later:
                total = torch.full_like(parameter, torch.nan)
                term(total, True)
                assert parameter.grad is None
                parameter.grad = total
        found = {name: p.grad for name, p in module.named_parameters()}
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, msg=name)
        assert first.get_total_flops() + second.get_total_flops() == plain.get_total_flops()
        late_names = {name for name, p in module.named_parameters() if any(p is q for q, _ in parameters.later)}
        assert late_names == {"first.weight", "down.weight", "up.weight"}
        module.zero_grad()
        loss().backward()  # a backward that is not split
        for name, p in module.named_parameters():
            torch.testing.assert_close(p.grad, wanted[name], msg=name)
    finally:
        torch.set_default_dtype(torch.float32)
