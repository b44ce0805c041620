"""What modules write in place, detach, or make by views is planned and run as one device computes it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.base.errors import UsageError
from shoal.engine.sharding.named_axes import NamedMesh
from shoal.labs.autoshard.execute import compare, find_worst
from shoal.planning.auto.capture.forward import export_forward
from shoal.planning.auto.capture.trace import differentiate
from tests.planning.auto.modules import beside_one_device, builder, random_plans


class Two(nn.Module):
    """Two matrices, a buffer, and what a function makes of them."""

    def __init__(self, forward):
        super().__init__()
        self.function = forward
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("c", torch.ones(8))

    def forward(self, x):
        return self.function(self, x)


def interleaved(m, x):
    h = m.a(x)
    out = torch.empty_like(h)
    out[..., 0::2] = h[..., 0::2] * 2
    out[..., 1::2] = -h[..., 1::2]
    return m.b(out).square()


def column(m, x):
    h = m.a(x) * 1.0
    h[:, 0] = 0.0
    return m.b(h).square()


def whole_view(m, x):
    h = m.a(x)
    h.view(-1).mul_(2.0)
    h += 1
    return m.b(h).square()


def mask(m, x):
    seen = torch.zeros(8, 8, dtype=x.dtype)
    seen[:, :4] = 1.0
    return m.b(m.a(x) * seen).square()


def mask_without_gradients(m, x):
    h = m.a(x)
    with torch.no_grad():
        seen = torch.zeros_like(h)
        seen[:, :4] = h[:, :4]
    return m.b(h) * seen


def mask_made_outside(m, x):
    """To which nothing flows back, whatever is written."""
    h = m.a(x)
    seen = torch.zeros_like(h)
    with torch.no_grad():
        seen[:, :4] = h[:, :4]
    return m.b(h) * seen


def detached_in_place(m, x):
    h = m.a(x) * 1.0
    h.detach_()
    return m.b(h) + m.a(x)


def nothing_left(m, x):
    """As partial rotary embeddings have it where the part is all."""
    h = m.a(x)
    turned, passed = h[:, :8], h[:, 8:]
    return m.b(torch.cat((turned.roll(1, -1), passed), -1))


def padded(m, x):
    """By torch itself, which writes through views."""
    return F.pad(m.a(x).unsqueeze(0), (1, 1), mode="circular") + m.b(x)[:, :1]


def turned(m, x):
    return m.b(m.a(x).permute(0, -1).square()).unsqueeze(0).permute(-2, 0, -1)


def windows(m, x):
    """Whose gradient reshapes a constant that is a view."""
    return m.b(m.a(x).unfold(0, 3, 1).transpose(1, 2))


def largest(m, x):
    """Given back as it comes out of an operator with several outputs."""
    return m.b(m.a(x)).max(0).values


@pytest.mark.parametrize("forward", [
    interleaved, column, whole_view, mask, mask_without_gradients, mask_made_outside, detached_in_place, nothing_left,
    padded, turned, windows, largest,
])  # fmt: skip
def test_a_module_is_planned_as_it_computes(pool, forward):
    torch.manual_seed(0)
    module, inputs = Two(forward).double(), (torch.randn(8, 8, dtype=torch.float64),)
    mesh = NamedMesh("x", (2,))
    forward = export_forward(module, inputs)
    (plan,) = random_plans(builder(differentiate(forward), "2xA100", mesh), np.random.default_rng(0))
    run = beside_one_device(plan, module, inputs, forward)
    assert find_worst(pool.run(compare, 2, *run))[0] < 1e-10


def outside(m, x):
    h = m.a(x) * 1.0
    with torch.no_grad():
        first, _ = h.chunk(2, -1)
        first.mul_(2.0)
    return m.b(h)


def past_detach(m, x):
    h = m.a(x) * 1.0
    h.detach()[:, :4] = 0.0
    return m.b(h)


def buffer(m, x):
    m.c[0] = 2.0
    return m.a(x) + m.c


def given(m, x):
    x[0] = 0.0
    return m.a(x)


@pytest.mark.parametrize("forward, words", [
    (outside, "aten.mul_.Tensor under torch.no_grad changes mul, which was made outside of it"),
    (past_detach, r"through .detach\(\) changes mul, which was made outside of it"),
    (buffer, "its forward pass changes c, which each device would do differently"),
    (given, "its forward pass changes x, which each device would do differently"),
])  # fmt: skip
def test_writes_that_others_would_see_are_refused(forward, words):
    with pytest.raises(UsageError, match=words):
        export_forward(Two(forward), (torch.randn(8, 8),))


def test_nothing_else_is_taken_apart():
    def block(m, x):
        h = F.rms_norm(F.layer_norm(m.a(x), (8,)), (8,)).view(2, 1, 4, 8)
        h = F.scaled_dot_product_attention(h, h, h)
        h = (h @ h.transpose(2, 3)).softmax(-1) @ h
        return F.cross_entropy(m.b(h).flatten(0, 2), torch.zeros(8, dtype=torch.int64))

    graph = export_forward(Two(block), (torch.randn(8, 8),)).module.graph
    found = {node.target._schema.name.removeprefix("aten::") for node in graph.nodes if hasattr(node.target, "_schema")}
    assert {"linear", "layer_norm", "rms_norm", "scaled_dot_product_attention", "matmul", "softmax",
            "cross_entropy_loss"} <= found  # fmt: skip
