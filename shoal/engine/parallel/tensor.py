"""Tensor and sequence parallelism: a table of module patterns, and what each kind of split does to a module.

Column then row (Shoeybi et al. 2019, "Megatron-LM", section 3): a block's first matrices are split by output, so that
each rank computes its own heads or hidden units; its last is split by input, so that the ranks' outputs are partial
sums. Two collectives a block and direction remain: one where a block is entered, one where it is left.

With sequence parallelism (Korthikanti et al. 2022, section 4.2.2) the activations between the blocks are split along
the sequence: entering gathers them, leaving sums and scatters. The bytes are the same; norms and residuals are not
computed and stored tp times.

Where the layout overlaps (`shoal.engine.parallel.overlap`), the collective and the products next to it are one
function: the modules at a region's edges then have a `Passage` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor, nn

from shoal.base.boxes import Box
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_gather, copy_to, gather_from, reduce_from, scatter_to
from shoal.engine.models.experts.layer import MoE
from shoal.engine.models.loss import IGNORE, SummedCrossEntropy
from shoal.engine.models.projections import JointProjections
from shoal.engine.models.transformer import Transformer
from shoal.engine.parallel.overlap import SEQUENCE, ChunkedEntry, ChunkedExit, RingEntry, RingExit
from shoal.engine.parallel.placement import ParamPlacement
from shoal.engine.parallel.replace import replace_forward
from shoal.engine.parallel.weight_grad import Passage, Postponed, look_up, product, project
from shoal.spec.catalog import ModelShape


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place among the ranks that split one layer.

    Attributes:
        postponed: made in the backward of a region's entry, while its collective is on its way.
        overlap: whether the edges of regions are passages.
    """

    group: Group
    rank: int
    size: int
    sequence_parallel: bool
    shape: ModelShape
    postponed: Postponed
    overlap: bool = False

    def entry(self, tokenwise: bool = False) -> Passage:
        """Into the products of a region; ``tokenwise``, of one that works on each token by itself."""
        return RingEntry(self.group, tokenwise) if self.sequence_parallel else ChunkedEntry(self.group)

    def exit(self, tokenwise: bool = False) -> Passage:
        """Out of its last product."""
        return RingExit(self.group, tokenwise) if self.sequence_parallel else ChunkedExit(self.group)

    def enter(self, x: Tensor) -> Tensor:
        """Into a block, where every rank needs all of x: [b, s, h] (or [b, s/tp, h]) -> [b, s, h]."""
        if self.sequence_parallel:
            return gather_from(x, self.group, SEQUENCE, self.postponed.make)
        return copy_to(x, self.group, self.postponed.make)

    def leave(self, x: Tensor) -> Tensor:
        """Out of a block: sum the partial outputs. [b, s, h] -> [b, s, h] or [b, s/tp, h]."""
        return scatter_to(x, self.group, SEQUENCE) if self.sequence_parallel else reduce_from(x, self.group)

    def enter_whole(self, x: Tensor) -> Tensor:
        """Into a product over all of h: what this rank has of the hidden state -> [b, s, h]."""
        return self.enter(x)

    def leave_whole(self, x: Tensor) -> Tensor:
        """Out of a sum over all ranks: [b, s, h] -> what this rank has of the hidden state."""
        return self.leave(x)


# ---- the kinds of split ----------------------------------------------------------------------------------------


Rank = TypeVar("Rank", bound=TensorParallel)
RankOfStyle = TypeVar("RankOfStyle", bound=TensorParallel, contravariant=True)


class ParallelStyle(Protocol[RankOfStyle]):
    """What becomes of a module."""

    def apply(self, module: nn.Module, name: str, at: RankOfStyle) -> list[ParamPlacement]:
        """Split it in place; returns how its parameters are split."""


@dataclass(frozen=True)
class TensorParallelRegion:
    """A module entered through one collective, shared by all the column splits inside it.

    Attributes:
        tokenwise: it works on each token by itself, so that their order inside it is free.
    """

    tokenwise: bool = False

    def apply(self, module: nn.Module, name: str, at: TensorParallel) -> list[ParamPlacement]:
        if at.overlap and isinstance(module, JointProjections):
            module.project = lambda x: project(module, x, at.entry(self.tokenwise))
            return []
        module.register_forward_pre_hook(lambda _, args: (at.enter(args[0]), *args[1:]))
        return []


class FeedForward(TensorParallelRegion):
    """The same, where the block is dense; what tokens do between experts is `shoal.engine.parallel.expert`'s."""

    def apply(self, module: nn.Module, name: str, at: TensorParallel) -> list[ParamPlacement]:
        return [] if isinstance(module, MoE) else super().apply(module, name, at)


class Column:
    """Split by output: rank r holds the r-th part of the rows of the weight and of the bias."""

    def apply(self, module: nn.Module, name: str, at: TensorParallel) -> list[ParamPlacement]:
        return [keep_rows(module, name, part, at, at.size) for part, _ in list(module.named_parameters())]


class KeyValue:
    """`Column` for keys and values. Where tp exceeds their heads, neighbours in tp hold the same head."""

    def apply(self, module: nn.Module, name: str, at: TensorParallel) -> list[ParamPlacement]:
        parts = min(at.size, at.shape.kv_heads)
        return [keep_rows(module, name, part, at, parts) for part, _ in list(module.named_parameters())]


@dataclass(frozen=True)
class Row:
    """Split by input: rank r holds columns r of the weight; the bias is added once, after the sum.

    Attributes:
        tokenwise: as of the `TensorParallelRegion` that it leaves.
    """

    tokenwise: bool = False

    def apply(self, module: nn.Module, name: str, at: TensorParallel) -> list[ParamPlacement]:
        assert isinstance(module, nn.Linear)
        out_features, in_features = module.weight.shape
        part = in_features // at.size
        box = Box((0, at.rank * part), (out_features, part))
        module.weight = empty_like(module.weight, box.shape)
        replace_forward(module, lambda x: _row_forward(module, x, at, self.tokenwise))
        return [ParamPlacement(f"{name}.weight", (out_features, in_features), box, box.shape)]


def _row_forward(module: nn.Linear, x: Tensor, at: TensorParallel, tokenwise: bool) -> Tensor:
    y = product(module, x, at.exit(tokenwise)) if at.overlap else at.leave(product(module, x))
    return y if module.bias is None else y + module.bias


class VocabularyEmbedding:
    """Split by token id: a rank looks up its own ids, gives zeros for the others, and the sum is complete."""

    def apply(self, module: nn.Module, name: str, at: TensorParallel) -> list[ParamPlacement]:
        assert isinstance(module, nn.Embedding)
        split = keep_rows(module, name, "weight", at, at.size)
        start = split.box.offset[0]
        replace_forward(
            module, lambda tokens: at.leave_whole(_look_up(module, tokens - start, split.box.shape[0]))
        )
        return [split]


def _look_up(module: nn.Embedding, ids: Tensor, here: int) -> Tensor:
    foreign = (ids < 0) | (ids >= here)
    return look_up(module, ids.masked_fill(foreign, 0)).masked_fill(foreign.unsqueeze(-1), 0)


class SequencePart:
    """A table of positions: with sequence parallelism a rank needs its own part of the sequence."""

    def apply(self, module: nn.Module, name: str, at: TensorParallel) -> list[ParamPlacement]:
        assert isinstance(module, nn.Embedding)
        if at.sequence_parallel:
            replace_forward(module, lambda positions: look_up(module, positions.chunk(at.size)[at.rank]))
        return []


class VocabularyHead:
    """The output matrix split by token id: each rank has the logits of its own ids."""

    def apply(self, module: nn.Module, name: str, at: TensorParallel) -> list[ParamPlacement]:
        assert isinstance(module, nn.Linear)
        if at.overlap:
            replace_forward(module, lambda x: product(module, x, at.entry()))
        else:
            module.register_forward_pre_hook(lambda _, args: (at.enter_whole(*args),))
        return [keep_rows(module, name, "weight", at, at.size)]


class VocabularyLoss:
    """Cross-entropy over logits that are split by token id."""

    def apply(self, module: nn.Module, name: str, at: TensorParallel) -> list[ParamPlacement]:
        rows = -(-at.shape.vocab // at.size)
        here = min(rows, max(0, at.shape.vocab - at.rank * rows))
        replace_forward(module, lambda logits, targets: SummedCrossEntropy.apply(
            logits, targets - at.rank * rows, targets != IGNORE, here, lambda x: all_gather(x.unsqueeze(0), at.group)
        ))
        return []


TENSOR_PARALLEL: dict[str, ParallelStyle[TensorParallel]] = {
    "embed.token": VocabularyEmbedding(),
    "embed.position": SequencePart(),
    "layers.*.attention": TensorParallelRegion(),
    "layers.*.attention.q": Column(),  # heads are split, so there is no collective until `out`
    "layers.*.attention.{k,v}": KeyValue(),
    "layers.*.attention.out": Row(),
    "layers.*.mlp": FeedForward(tokenwise=True),
    "layers.*.mlp.{gate,up}": Column(),
    "layers.*.mlp.down": Row(tokenwise=True),
    "layers.*.mlp.shared": TensorParallelRegion(),
    "layers.*.mlp.shared.{gate,up}": Column(),
    "layers.*.mlp.shared.down": Row(),
    "head": VocabularyHead(),
    "loss": VocabularyLoss(),
}


def apply_tensor_parallel(
    model: Transformer, shape: ModelShape, mesh: Mesh, postponed: Postponed | None = None, *, overlap: bool = False
) -> dict[str, ParamPlacement]:
    """Split a model on the meta device in place over the mesh's tp axis.

    Args:
        model: a `Transformer`, or the part of one that a pipeline stage keeps.
        postponed: has its regions' entries make what it holds, in backward.
        overlap: make products and collectives part by part, together.

    Returns:
        For each parameter's name, how it is split. Parameters that no rule splits are whole on every rank; with
        sequence parallelism their gradients are partial sums, since each rank sees its own part of the sequence.
    """
    group, rank, size = mesh.group("tp"), mesh.index("tp"), mesh.size("tp")
    in_parts, splits = mesh.layout.sequence_parallel, {}
    if group is not None:
        at = TensorParallel(group, rank, size, in_parts, shape, postponed or Postponed(), overlap)
        splits = split_modules(model, TENSOR_PARALLEL, at)
    for name, parameter in model.named_parameters():
        if name not in splits:
            whole = tuple(parameter.shape)
            splits[name] = ParamPlacement(
                name, whole, Box.whole(whole), whole,
                sum_over=("tp",) if in_parts else (), copies=size, primary=rank == 0,
            )
    return {name: splits[name] for name, _ in model.named_parameters()}


def split_modules(
    model: Transformer, table: Mapping[str, ParallelStyle[Rank]], at: Rank
) -> dict[str, ParamPlacement]:
    """Split the modules that a table names; returns how each of their parameters is, by its name."""
    splits: dict[str, ParamPlacement] = {}
    for name, module in list(model.named_modules()):
        for pattern, kind in table.items():
            if matches(pattern, name):
                splits |= {split.name: split for split in kind.apply(module, name, at)}
    if at.shape.tied and model.embed is not None and model.head is not None:
        model.head.weight = model.embed.token.weight
    return {name: splits[name] for name, _ in model.named_parameters() if name in splits}


def matches(pattern: str, name: str) -> bool:
    """Whether a module's name fits a pattern: ``*`` is one component, ``{a,b}`` a choice.

    >>> matches("layers.*.attention.{k,v}", "layers.3.attention.k"), matches("layers.*", "layers.3.mlp")
    (True, False)
    """
    choices = [part.strip("{}").split(",") for part in pattern.split(".")]
    parts = name.split(".")
    return len(parts) == len(choices) and all(p in c or c == ["*"] for p, c in zip(parts, choices, strict=True))


def keep_rows(module: nn.Module, name: str, part: str, at: TensorParallel, parts: int) -> ParamPlacement:
    """Keep one of ``parts`` equal runs of rows of a parameter; the last runs may be short and are padded."""
    parameter = getattr(module, part)
    whole = tuple(parameter.shape)
    copies = at.size // parts
    rows = -(-whole[0] // parts)
    start = min(at.rank // copies * rows, whole[0])
    box = Box((start, *(0 for _ in whole[1:])), (min(rows, whole[0] - start), *whole[1:]))
    local = (rows, *whole[1:])
    setattr(module, part, empty_like(parameter, local))
    return ParamPlacement(
        f"{name}.{part}", whole, box, local,
        sum_over=(f"tp/{copies}",) if copies > 1 else (), copies=copies, primary=at.rank % copies == 0,
    )


def empty_like(parameter: Tensor, shape: tuple[int, ...]) -> nn.Parameter:
    """Another of this shape, with no values yet."""
    return nn.Parameter(parameter.new_empty(shape))
