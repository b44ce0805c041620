"""Record the output and the output gradient of every module, to find the first place that differs.

The same tracer watches the reference and each rank's part of a model. A parallel rank holds a part of what one device
has: other samples (dp), other layers (pp), a part of the sequence (sequence parallelism), a part of the vocabulary
(head). `part` says which.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from shoal.engine.collectives.mesh import Mesh
from shoal.engine.models.transformer import Transformer


def traced_modules(layers: int) -> list[str]:
    """The modules that are watched, in the order in which forward finishes them."""
    inside = ("attention_norm", "attention", "mlp_norm", "mlp")
    blocks = [name for i in range(layers) for name in (*(f"layers.{i}.{m}" for m in inside), f"layers.{i}")]
    return ["embed", *blocks, "norm", "head", "loss"]


class Tracer:
    """Records, for every micro-batch, the output of each module and the gradient with respect to it.

    Args:
        model: the whole model or a stage of it; each call of it is one micro-batch, from 0.
    """

    def __init__(self, model: Transformer):
        self._taken: dict[str, dict[int, Tensor]] = {}
        self._microbatch = -1
        self._hooks = [model.register_forward_pre_hook(self._next)]
        modules = dict(model.named_modules())
        some = tuple(f"layers.{i}." for i, layer in model.layers.items() if layer.depth is not None)
        for name in traced_modules(model.shape.layers):
            # Inside a layer that takes some tokens, a rank's are no part of a sequence that `part` could name.
            if modules.get(name) is not None and not name.startswith(some):
                self._hooks.append(modules[name].register_forward_hook(self._watch(name)))

    def _next(self, *_: object) -> None:
        self._microbatch += 1

    def _watch(self, name: str):
        def after(module: nn.Module, args: tuple, output: Tensor) -> None:
            m = self._microbatch
            if m in self._taken.setdefault(f"forward/{name}", {}):
                return  # computed again in backward, by activation recomputation
            self._take(f"forward/{name}", m, output)
            if output.requires_grad:
                output.register_hook(lambda gradient: self._take(f"backward/{name}", m, gradient))

        return after

    def _take(self, key: str, microbatch: int, value: Tensor) -> None:
        # A copy, since some outputs are changed in place later. Scalars get a dim for the samples.
        value = value.detach().clone()
        self._taken.setdefault(key, {})[microbatch] = value if value.dim() else value.view(1)

    def taken(self) -> dict[str, list[Tensor]]:
        """By ``forward/MODULE`` or ``backward/MODULE``: what each micro-batch gave, in order. Ends the recording."""
        for hook in self._hooks:
            hook.remove()
        return {key: [values[m] for m in sorted(values)] for key, values in self._taken.items()}


@dataclass(frozen=True)
class ForwardTrace:
    """A forward.

    Attributes:
        samples: the places of its samples in the global batch.
        microbatch: its number.
        tokens: which tokens of each sample are this rank's; None for all.
        part: which of those it takes.
    """

    samples: list[int]
    microbatch: int
    tokens: Tensor | None
    part: slice

    @property
    def whole(self) -> bool:
        """Whether it takes whole samples."""
        return self.tokens is None and self.part == slice(None)

    def of(self, reference: Tensor) -> Tensor:
        """This forward's part of a tensor of the global batch, [b, s, ...], or [b] for the loss."""
        mine = reference[self.samples]
        if mine.dim() == 1:
            return mine
        return (mine if self.tokens is None else mine[:, self.tokens])[:, self.part]


def part(key: str, whole: Tensor, mesh: Mesh, vocab: int) -> Tensor:
    """What this rank should have of a forward's reference.

    Args:
        whole: [b, s, ...] of the samples and tokens of the forward, or [b] for the loss.
    """
    phase, module = key.split("/", 1)
    tp, index = mesh.size("tp"), mesh.index("tp")
    if module == "loss":
        return whole.sum().view(1) if phase == "forward" else whole[:1]
    if module == "head":
        rows = -(-vocab // tp)
        return whole[..., index * rows : (index + 1) * rows]
    x, y = mesh.layout.tp_x, mesh.layout.tp_y
    if x > 1:
        whole = whole.chunk(x, dim=2)[index % x]
    return whole.chunk(y, dim=1)[index // x] if mesh.layout.sequence_parallel else whole


def trace_errors(
    tracer: Tracer, reference: Path, mesh: Mesh, vocab: int, passes: list[ForwardTrace], loss_scale: float = 1.0
) -> dict[str, tuple[float, float, int]]:
    """Compare what a rank's tracer took with the reference's.

    Args:
        reference: a trace file of the reference.
        passes: the forwards that the tracer saw, in order. The loss of some tokens is no part of a reference.
        loss_scale: that the loss was multiplied by.

    Returns:
        For each ``forward/MODULE`` and ``backward/MODULE``: the largest absolute difference, the reference's largest
        absolute value in the whole global batch, and the micro-batch with the difference.
    """
    errors = {}
    with safe_open(reference, "pt") as file:
        known = set(file.keys())
        for key, values in tracer.taken().items():
            if key not in known or (key == "forward/loss" and not all(each.whole for each in passes)):
                continue
            whole = file.get_tensor(key)
            differences = []
            for value, each in zip(values, passes, strict=False):
                expected = part(key, each.of(whole), mesh, vocab)
                value = value.double() / (loss_scale if key.startswith("backward") else 1.0)
                if key.endswith("/head"):  # behind a rank's own ids there may be padding
                    value = value[..., : expected.shape[-1]]
                differences.append(largest(value - expected) if value.shape == expected.shape else torch.inf)
            worst = max(range(len(differences)), key=differences.__getitem__)
            errors[key] = (differences[worst], largest(whole), passes[worst].microbatch)
    return errors


def largest(x: Tensor) -> float:
    """The largest absolute value; infinite where there is a NaN."""
    if x.numel() == 0:
        return 0.0
    value = x.abs().max().item()
    return value if value == value else torch.inf
