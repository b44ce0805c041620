"""The experts of one layer, forward and backward, as one grouped computation against a plain loop over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from shoal.base.errors import UsageError
from shoal.engine.cpu_tuning import tune_process
from shoal.engine.device import pick_device, synchronize
from shoal.engine.models.experts.layer import MoE
from shoal.engine.models.experts.router import RoutingContext
from shoal.labs.bench.peak import DTYPES
from shoal.labs.bench.race import quartiles
from shoal.labs.bench.step.workload import BenchPrecision
from shoal.spec.catalog import Experts, model_shape

KINDS = ("grouped", "loop")

TARGETS = {8: 1.0, 64: 1.5}
"""How many times as fast as the loop the grouped experts are at least, on CPU, by experts of a layer."""


@dataclass(frozen=True)
class ExpertsTiming:
    """One number of experts.

    Attributes:
        ffn: width of an expert.
        device: on which it was measured.
        seconds: by kind, median of a forward and backward, router included.
        ratio: of the loop's time to the grouped one's, median over turns.
        spread: the first and third quartile of it.
        difference: largest difference of outputs and gradients, relative to the largest of each.
    """

    experts: int
    per_token: int
    ffn: int
    device: torch.device
    seconds: dict[str, float]
    ratio: float
    spread: tuple[float, float]
    difference: float

    @property
    def target(self) -> float | None:
        """What the ratio should be; None where nothing is asked for."""
        return TARGETS.get(self.experts) if self.device.type == "cpu" else None

    @property
    def missed(self) -> bool:
        """Whether the grouped experts are slower than they should be."""
        return self.target is not None and self.ratio < self.target


def measure(
    count: int, precision: BenchPrecision, device: torch.device, *,
    per_token: int, tokens: int, hidden: int, ffn: int, repeats: int,
) -> ExpertsTiming:
    """Time both in turn on the same weights and tokens."""
    experts = Experts(count=count, per_token=per_token, ffn=ffn)
    shape = model_shape("tiny").model_copy(update={"hidden": hidden, "experts": experts})
    generator = torch.Generator().manual_seed(0)
    layer = MoE(shape, 0)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    layer.to(device, DTYPES[precision])
    x, gradient = (torch.randn(1, tokens, hidden, generator=generator).to(device, layer.router.weight.dtype)
                   for _ in range(2))
    x.requires_grad_()
    held = layer.experts
    assert held.gate is not None, "the experts of the llama family are gated"
    loop = [[w.detach().clone().requires_grad_() for w in matrices]
            for matrices in zip(held.gate, held.up, held.down, strict=True)]
    weights = {"grouped": [held.gate, held.up, held.down], "loop": [w for matrices in loop for w in matrices]}
    run: dict[str, Callable[[], Tensor]] = {
        "grouped": lambda: layer(x, RoutingContext()), "loop": lambda: looped(layer, x, loop),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    results: dict[str, list[Tensor]] = {}
    for repeat in range(repeats + 2):
        for kind in KINDS:
            synchronize(device)
            start = time.perf_counter()
            y = run[kind]()
            gradients = torch.autograd.grad(y, [x, layer.router.weight, *weights[kind]], gradient)
            synchronize(device)
            if repeat > 1:  # the first ones warm up
                seconds[kind].append(time.perf_counter() - start)
            results[kind] = [y.detach(), *gradients[:2], *_stacked(kind, gradients[2:])]
    ratios = [slow / fast for fast, slow in zip(seconds["grouped"], seconds["loop"], strict=True)]
    difference = max(float((a - b).abs().max() / b.abs().max())
                     for a, b in zip(results["grouped"], results["loop"], strict=True))
    medians = {kind: median(times) for kind, times in seconds.items()}
    return ExpertsTiming(count, per_token, ffn, device, medians, median(ratios), quartiles(ratios), difference)


def looped(layer: MoE, x: Tensor, matrices: Sequence[Sequence[Tensor]]) -> Tensor:
    """What is written first: for each expert, pick its tokens, compute them, add them to the result."""
    weights, chosen = layer.router(x, RoutingContext())
    flat, rows = weights[0], x[0]
    out = torch.zeros_like(rows)
    for e, (gate, up, down) in enumerate(matrices):
        token = chosen[0, :, e].nonzero().squeeze(1)
        mine = rows[token]
        y = F.linear(F.silu(F.linear(mine, gate)) * F.linear(mine, up), down)
        out.index_add_(0, token, y * flat[token, e].to(y.dtype).unsqueeze(-1))
    return out.unsqueeze(0)


def _stacked(kind: str, gradients: tuple[Tensor, ...]) -> list[Tensor]:
    return list(gradients) if kind == "grouped" else [torch.stack(gradients[part::3]) for part in range(3)]


def measure_counts(
    counts: Sequence[int], precision: BenchPrecision, device: str, *,
    per_token: int, tokens: int, hidden: int, width: int, repeats: int,
) -> list[ExpertsTiming]:
    """Time layers of different numbers of experts.

    Args:
        device: auto, cpu or cuda.
        width: of all experts of a layer together.

    Raises:
        UsageError: there is no such device; a token goes to more experts than there are; or the width is no multiple.
    """
    chosen = pick_device(device)
    if per_token > min(counts):
        raise UsageError(f"bench experts --per-token {per_token}: more than --experts {min(counts)}.")
    if uneven := [count for count in counts if width % count]:
        raise UsageError(f"bench experts --width {width} is not a multiple of --experts {uneven[0]}.")
    tune_process()  # as training does, for both
    return [
        measure(
            count, precision, chosen, per_token=per_token, tokens=tokens, hidden=hidden, ffn=width // count,
            repeats=repeats,
        )
        for count in counts
    ]  # fmt: skip


def table(timings: Sequence[ExpertsTiming], tokens: int, hidden: int, precision: BenchPrecision) -> Table:
    """A row for each number of experts."""
    first = timings[0]
    title = f"{tokens} tokens, k {first.per_token}, h {hidden}, {precision} on {first.device.type}"
    view = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", title_justify="left", title=title
    )
    for column in ("experts", "width", "loop ms", "grouped ms", "loop / grouped", "quartiles", "wanted", "off"):
        view.add_column(column, justify="right")
    for found in timings:
        view.add_row(
            str(found.experts), str(found.ffn), f"{1e3 * found.seconds['loop']:.2f}",
            f"{1e3 * found.seconds['grouped']:.2f}", f"{found.ratio:.2f}", "{:.2f}-{:.2f}".format(*found.spread),
            f"{found.target:.1f}" if found.target else "", f"{found.difference:.0e}",
        )
    return view
