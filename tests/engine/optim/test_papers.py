"""The rules against the papers' algorithms, written down as they are printed, in float64, on whole parameters."""

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.engine.kernels.adam8bit import WIDTH, dynamic_map
from shoal.engine.optim.build import build
from shoal.engine.optim.muon import orthogonal
from shoal.engine.optim.shards import Shards
from shoal.spec.config import OptimizerConfig

STEPS, RATE, DECAY = 8, 0.03, 0.1
SHAPES = {
    "layers.0.mlp.up.weight": (48, 300), "norm.weight": (31,), "layers.1.attention.q.weight": (40, 104),
    "layers.1.mlp.experts.up": (3, 14, 11),
}


def sgd(w: Tensor, g: Tensor, s: dict, t: int, c: OptimizerConfig) -> Tensor:
    return -RATE * g


def momentum(w: Tensor, g: Tensor, s: dict, t: int, c: OptimizerConfig) -> Tensor:
    """Polyak 1964, equation 9, with the learning rate outside of the sum."""
    s["v"] = c.momentum * s.get("v", 0) + g
    return -RATE * s["v"]


def nesterov(w: Tensor, g: Tensor, s: dict, t: int, c: OptimizerConfig) -> Tensor:
    """Sutskever et al. 2013, equations 3 and 4, of the point that is looked at: theta + mu v."""
    s["v"] = c.momentum * s.get("v", 0) + g
    return -RATE * (g + c.momentum * s["v"])


def adagrad(w: Tensor, g: Tensor, s: dict, t: int, c: OptimizerConfig) -> Tensor:
    """Duchi et al. 2011, figure 1, with diagonal matrices; delta is beside the root."""
    s["s"] = s.get("s", 0) + g**2
    return -RATE * g / (c.eps + s["s"].sqrt())


def adam(w: Tensor, g: Tensor, s: dict, t: int, c: OptimizerConfig) -> Tensor:
    """Kingma & Ba 2015, algorithm 1."""
    beta1, beta2 = c.betas
    s["m"] = beta1 * s.get("m", 0) + (1 - beta1) * g
    s["v"] = beta2 * s.get("v", 0) + (1 - beta2) * g**2
    return -RATE * (s["m"] / (1 - beta1**t)) / ((s["v"] / (1 - beta2**t)).sqrt() + c.eps)


def sage(w: Tensor, g: Tensor, s: dict, t: int, c: OptimizerConfig) -> Tensor:
    """Liang et al. 2022, algorithm 2."""
    beta1, beta2 = c.betas
    sensitivity = (w * g).abs()
    s["i"] = c.sensitivity_beta * s.get("i", 0) + (1 - c.sensitivity_beta) * sensitivity
    variation = (sensitivity - s["i"]).abs()
    s["m"] = beta1 * s.get("m", 0) + (1 - beta1) * g
    s["v"] = beta2 * s.get("v", 0) + (1 - beta2) * g**2
    direction = (s["m"] / (1 - beta1**t)) / ((s["v"] / (1 - beta2**t)).sqrt() + c.eps)
    return -RATE * (variation + c.eps) / (s["i"] + c.eps) * direction


def adafactor(w: Tensor, g: Tensor, s: dict, t: int, c: OptimizerConfig) -> Tensor:
    """Shazeer & Stern 2018, algorithms 4 to 6; each expert's matrix by itself."""
    if w.dim() == 3:
        return torch.stack([adafactor(w[e], g[e], s.setdefault(e, {}), t, c) for e in range(len(w))])
    beta2 = 1 - t**-0.8
    alpha = max(1e-3, w.square().mean().sqrt().item()) * RATE
    square = g**2 + 1e-30
    if w.dim() == 2:
        s["r"] = beta2 * s.get("r", 0) + (1 - beta2) * square.sum(1)
        s["c"] = beta2 * s.get("c", 0) + (1 - beta2) * square.sum(0)
        v = torch.outer(s["r"], s["c"]) / s["r"].sum()
    else:
        s["v"] = v = beta2 * s.get("v", 0) + (1 - beta2) * square
    update = g / v.sqrt()
    return -alpha * update / max(1.0, update.square().mean().sqrt().item())


def muon(w: Tensor, g: Tensor, s: dict, t: int, c: OptimizerConfig) -> Tensor:
    """Jordan et al. 2024, with the scale of Liu et al. 2025, equation 4; AdamW for what is no matrix in a layer."""
    if w.dim() < 2:
        return adamw(w, g, s, t, c)
    if w.dim() == 3:
        return torch.stack([muon(w[e], g[e], s.setdefault(e, {}), t, c) for e in range(len(w))])
    s["m"] = c.momentum * s.get("m", 0) + g
    x = g + c.momentum * s["m"]
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T if x.size(0) <= x.size(1) else x.T @ x
        polynomial = -4.7750 * gram + 2.0315 * gram @ gram
        x = 3.4445 * x + (polynomial @ x if x.size(0) <= x.size(1) else x @ polynomial)
    return -RATE * 0.2 * math.sqrt(max(w.shape)) * x


def radam(w: Tensor, g: Tensor, s: dict, t: int, c: OptimizerConfig) -> Tensor:
    """Liu et al. 2020, algorithm 2, with the authors' threshold of 5."""
    beta1, beta2 = c.betas
    s["m"] = beta1 * s.get("m", 0) + (1 - beta1) * g
    s["v"] = beta2 * s.get("v", 0) + (1 - beta2) * g**2
    mean, longest = s["m"] / (1 - beta1**t), 2 / (1 - beta2) - 1
    length = longest - 2 * t * beta2**t / (1 - beta2**t)
    if length <= 5:
        return -RATE * mean
    adaptive = math.sqrt(1 - beta2**t) / (s["v"].sqrt() + c.eps)
    top, bottom = (length - 4) * (length - 2) * longest, (longest - 4) * (longest - 2) * length
    return -RATE * math.sqrt(top / bottom) * mean * adaptive


def adamw(w: Tensor, g: Tensor, s: dict, t: int, c: OptimizerConfig) -> Tensor:
    """Loshchilov & Hutter 2019, algorithm 2: Adam, but for the decay."""
    return adam(w, g, s, t, c)


def sophia(w: Tensor, g: Tensor, s: dict, t: int, c: OptimizerConfig) -> Tensor:
    """Liu et al. 2023, algorithm 3, with g^2 / 2 for the estimates."""
    beta1, beta2 = c.betas
    s["m"] = beta1 * s.get("m", 0) + (1 - beta1) * g
    if t % c.hessian_every == 1:
        s["h"] = beta2 * s.get("h", 0) + (1 - beta2) * g**2 / 2
    return -RATE * (s["m"] / torch.clamp(c.hessian_scale * s["h"], min=c.eps)).clamp(-1, 1)


def adam8bit(w: Tensor, g: Tensor, s: dict, t: int, c: OptimizerConfig) -> Tensor:
    """AdamW whose moments pass through the nearest code of their block (Dettmers et al. 2022, sections 1.3 and 2).

    Where a moment is all but half-way between two codes, either will do, and the rule's is taken.
    """
    update = adamw(w, g, s, t, c)
    if w.numel() >= 4096:
        s["m"], s["v"] = (
            rounded(s[kind], codes, dynamic_map(signed))
            for kind, codes, signed in zip("mv", s["codes"], (True, False), strict=True)
        )
    return update


def rounded(x: Tensor, codes: Tensor, levels: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for row in range(x.size(0)):
        for start in range(0, x.size(1), WIDTH):
            here = row, slice(start, start + WIDTH)
            scale = x[here].abs().max()
            relative = x[here] / scale
            distances = (relative[:, None] - levels).abs()
            nearest = (distances - torch.arange(256) * 1e-14).argmin(1)  # half-way goes up
            taken = codes[here].long()
            # Twice as far as it is from half-way:
            beyond = (relative - levels[taken]).abs() - (relative - levels[nearest]).abs()
            out[here] = levels[nearest.where(beyond > 2 * 2.0**-11 * relative.abs(), taken)] * scale
    return out


IN_THE_GRADIENT = (momentum, nesterov, adagrad, adam)  # is where these have weight decay


@pytest.mark.parametrize(
    "paper", [sgd, momentum, nesterov, adagrad, adam, adamw, sage, adafactor, muon, radam, adam8bit, sophia],
    ids=lambda paper: paper.__name__,
)
def test_a_rule_does_what_its_paper_says(paper) -> None:
    name = {sophia: "sophia-g", nesterov: "momentum"}.get(paper, paper.__name__)
    config = OptimizerConfig(
        name=name, betas=(0.8, 0.95), weight_decay=DECAY, hessian_every=3, hessian_scale=20.0,
        nesterov=paper is nesterov,
    )
    generator = torch.Generator().manual_seed(7)
    expected = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()
    }
    ours = {name: w.clone() for name, w in expected.items()}
    gradients = {name: torch.zeros_like(w) for name, w in ours.items()}
    rule = build(config, Shards.from_parameters(
        ((name, ours[name], gradients[name]) for name in SHAPES), lambda name, w: DECAY if w.dim() > 1 else 0.0
    ))
    states: dict[str, dict] = {name: {} for name in SHAPES}
    for t in range(1, STEPS + 1):
        drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
        for name, g in drawn.items():
            gradients[name].copy_(g)
        if paper is sophia and rule.due:
            rule.learn([shard.gradient.square() / 2 for shard in rule.shards.shards])
        rule.step(RATE)
        kept = rule.states()
        for name, w in expected.items():
            g = drawn[name]
            if paper is adam8bit and name in kept["exp_avg_code"]:
                states[name]["codes"] = [kept[f"{kind}_code"][name][0].tensor for kind in ("exp_avg", "exp_avg_sq")]
            decay = DECAY if w.dim() > 1 else 0.0
            if paper in IN_THE_GRADIENT:
                expected[name] = w + paper(w, g + decay * w, states[name], t, config)
            else:
                expected[name] = w * (1 - RATE * decay) + paper(w, g, states[name], t, config)
    for name in SHAPES:
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("shape", [(8, 8), (5, 30), (64, 16), (300, 311)])  # the last in parts
def test_orthogonal_makes_all_singular_values_about_one(shape) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    found = torch.linalg.svdvals(orthogonal(matrix))
    assert found.min() > 0.5
    assert found.max() < 1.3
    turned = left.T @ orthogonal(matrix) @ right.T  # the same singular vectors
    torch.testing.assert_close(turned, turned.diagonal().diag(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(40, 300), (200, 150), (150, 150)])
def test_products_of_polynomials_in_float32_are_those_of_steps_in_float64(shape) -> None:
    """Of a gradient of few directions above much smaller ones, which five steps make 480 times larger."""
    draw = torch.Generator().manual_seed(0)
    few = torch.randn(shape[0], 4, generator=draw, dtype=torch.float64) @ torch.randn(
        4, shape[1], generator=draw, dtype=torch.float64
    )
    matrix = few + 1e-3 * torch.randn(shape, generator=draw, dtype=torch.float64)
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    torch.testing.assert_close(orthogonal(matrix), x, rtol=0, atol=1e-11)
    found = orthogonal(matrix.float())
    assert (found - x).norm() < 0.01 * x.norm()


@pytest.mark.parametrize("given", [torch.float32, torch.float64, torch.bfloat16])
def test_orthogonal_is_made_in_bfloat16_on_cuda_of_float32_alone(given) -> None:
    seen = set()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
                seen.update(x.dtype for x in args)
            return function(*args, **(kwargs or {}))

    with FakeTensorMode(), Products():
        assert orthogonal(torch.empty(4, 6, dtype=given, device="cuda")).dtype == given
    assert seen == {torch.float64 if given == torch.float64 else torch.bfloat16}


def test_the_codes_are_as_the_paper_prints_them() -> None:
    signed, unsigned = dynamic_map(True), dynamic_map(False)
    assert len(signed) == len(unsigned) == len(set(signed.tolist())) == 256
    assert (signed.max(), unsigned.min(), unsigned.max()) == (1, 0, 1)
    assert signed.abs()[signed != 0].min() < 1e-6  # seven decades
