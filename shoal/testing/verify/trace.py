"""Record the output and the output gradient of every module, to find the first module that differs.

The same tracer records the reference and each rank's part of a model. A parallel rank holds a part of one device's
tensors: other samples (dp), other layers (pp), a part of the sequence (sequence parallelism) or of the vocabulary
(head); see `local_part`. `Choices` records the experts of all tokens as one number per layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from shoal.engine.collectives.mesh import Mesh
from shoal.engine.models.experts.router import Router, RoutingContext, find_modules
from shoal.engine.models.initial import uniform
from shoal.engine.models.transformer import Transformer
from shoal.spec.catalog import ModelShape


def traced_modules(layers: int) -> list[str]:
    """Return the traced modules in the order in which forward finishes them."""
    inside = ("attention_norm", "attention", "mlp_norm", "mlp")
    blocks = [name for i in range(layers) for name in (*(f"layers.{i}.{m}" for m in inside), f"layers.{i}")]
    return ["embed", *blocks, "norm", "head", "loss"]


class Tracer:
    """Recorder of each module's output and its gradient; each call of the model or stage is one micro-batch."""

    def __init__(self, model: Transformer):
        self._taken: dict[str, dict[int, Tensor]] = {}
        self._microbatch = -1
        self._hooks = [model.register_forward_pre_hook(self._next)]
        modules = dict(model.named_modules())
        skipping = tuple(f"layers.{i}." for i, layer in model.layers.items() if layer.depth is not None)
        for name in traced_modules(model.shape.layers):
            # Inside a Mixture-of-Depths layer, a rank's tokens are not a part that `local_part` could select.
            if modules.get(name) is not None and not name.startswith(skipping):
                self._hooks.append(modules[name].register_forward_hook(self._watch(name)))

    def _next(self, *_: object) -> None:
        self._microbatch += 1

    def _watch(self, name: str):
        def after(module: nn.Module, args: tuple, output: Tensor | tuple[Tensor, Tensor]) -> None:
            output = output[-1] if isinstance(output, tuple) else output  # a norm may return its input's sum, too
            m = self._microbatch
            if m in self._taken.setdefault(f"forward/{name}", {}):
                return  # recomputed in backward
            self._record(f"forward/{name}", m, output)
            if output.requires_grad:
                output.register_hook(lambda gradient: self._record(f"backward/{name}", m, gradient))

        return after

    def _record(self, key: str, microbatch: int, value: Tensor) -> None:
        value = value.detach().clone()  # some outputs are changed in place later
        self._taken.setdefault(key, {})[microbatch] = value if value.dim() else value.view(1)

    def taken(self) -> dict[str, list[Tensor]]:
        """End the recording; return the micro-batches' tensors by ``forward/MODULE`` or ``backward/MODULE``."""
        for hook in self._hooks:
            hook.remove()
        return {key: [values[m] for m in sorted(values)] for key, values in self._taken.items()}


@dataclass(frozen=True)
class ForwardTrace:
    samples: list[int]  # indices in the global batch
    microbatch: int
    tokens: Tensor | None  # this rank's tokens of each sample; None for all
    part: slice  # the slice of these that this forward takes

    def select(self, reference: Tensor) -> Tensor:
        """Return this forward's part of a tensor of the global batch, [b, s, ...], or [b] for the loss."""
        mine = reference[self.samples]
        if mine.dim() == 1:
            return mine
        return (mine if self.tokens is None else mine[:, self.tokens.cpu()])[:, self.part]


def local_part(key: str, x: Tensor, mesh: Mesh, shape: ModelShape) -> Tensor:
    """Return this rank's part of a forward's reference tensor, [b, s, ...], or [b] for the loss."""
    phase, module = key.split("/", 1)
    tp, index = mesh.size("tp"), mesh.index("tp")
    if module == "loss":
        return x.sum().view(1) if phase == "forward" else x[:1]
    if module == "head":
        rows = shape.vocabulary_rows(tp)
        return x[..., index * rows : (index + 1) * rows]
    tp_x, tp_y = mesh.layout.tp_x, mesh.layout.tp_y
    if tp_x > 1:
        x = x.chunk(tp_x, dim=2)[index % tp_x]
    return x.chunk(tp_y, dim=1)[index // tp_x] if mesh.layout.sequence_parallel else x


def trace_errors(
    tracer: Tracer, reference: Path, mesh: Mesh, shape: ModelShape, passes: list[ForwardTrace], loss_scale: float = 1.0
) -> dict[str, tuple[float, float, int]]:
    """Compare the tensors that a rank recorded with the reference's.

    Args:
        reference: trace file of the reference, which has losses of complete samples only.
        passes: the recorded forwards, in order.

    Returns:
        (largest absolute difference, reference's largest absolute value, micro-batch) by ``forward/MODULE`` and
        ``backward/MODULE``.
    """
    errors = {}
    with safe_open(reference, "pt") as file:
        known = set(file.keys())
        is_complete = all(each.tokens is None and each.part == slice(None) for each in passes)
        for key, values in tracer.taken().items():
            if key not in known or (key == "forward/loss" and not is_complete):
                continue
            full = file.get_tensor(key)
            differences = []
            for value, each in zip(values, passes, strict=False):
                expected = local_part(key, each.select(full), mesh, shape)
                value = value.cpu().double() / (loss_scale if key.startswith("backward") else 1.0)
                if key.endswith("/head"):  # a rank's last ids may be padding
                    value = value[..., : expected.shape[-1]]
                differences.append(largest(value - expected) if value.shape == expected.shape else torch.inf)
            worst = max(range(len(differences)), key=differences.__getitem__)
            errors[key] = (differences[worst], largest(full), passes[worst].microbatch)
    return errors


def largest(x: Tensor) -> float:
    """Return the largest absolute value; infinite if there is a NaN."""
    if x.numel() == 0:
        return 0.0
    value = x.abs().max().item()
    return value if value == value else torch.inf


# ---- routing ---------------------------------------------------------------------------------------------------------

WORD = 1 << 64


class Choices:
    """Recorder of the routers of a model or parts of one.

    Each (sample, position, expert) is hashed to 53 bits, and the hashes are summed as integers. Two tokens that swap
    experts change the sum with probability 1 - 2^-53.
    """

    def __init__(self, modules: Iterable[nn.Module], shape: ModelShape, sequence_length: int):
        self._shape, self._length = shape, sequence_length
        self._sums: dict[tuple[int, tuple[int, ...]], int] = {}  # by layer and samples, as recomputation repeats them
        self._hooks = [
            router.register_forward_hook(self._watch) for module in modules for router in find_modules(module, Router)
        ]

    def _watch(self, router: Router, args: tuple[Tensor, RoutingContext], output: tuple[Tensor, Tensor]) -> None:
        samples, chosen = args[1].samples, output[1]
        assert samples is not None, "training passes the numbers of its samples"
        places = torch.arange(self._shape.taken(router.layer, self._length), device=chosen.device)
        tokens = router.places.own(samples.unsqueeze(1) * self._length + places)  # [b, s], numbered over all samples
        pairs = tokens.unsqueeze(-1) * chosen.shape[-1] + torch.arange(chosen.shape[-1], device=chosen.device)
        hashes = (uniform(router.layer, pairs[chosen]) * 2.0**53).long()
        self._sums[router.layer, tuple(samples.tolist())] = int(hashes.sum())

    def taken(self) -> dict[int, int]:
        """End the recording; return each layer's number, a term of the sum over all ranks."""
        for hook in self._hooks:
            hook.remove()
        return sum_by_layer((layer, number) for (layer, _), number in self._sums.items())


def sum_by_layer(numbers: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Add the numbers of each layer, from (layer, number)."""
    sums: Counter[int] = Counter()
    for layer, number in numbers:
        sums[layer] = (sums[layer] + number) % WORD
    return dict(sums)
