"""Expert parallelism: experts are spread over ranks, and tokens travel to them and back (Lepikhin et al. 2020).

The dp x cp x tp ranks of a pipeline stage form a second mesh for the experts. Along ep, ranks hold different experts.
Along etp, they split each expert's matrices. Along edp, they hold the same experts; gradients are summed and optimizer
state is sharded over it (Liu et al. 2025, "MoE parallel folding"). The degrees of the two meshes are independent.

    own tokens -> router -> all-to-all over ep -> all-gather over etp -> experts -> reduce-scatter -> all-to-all -> sum

Every rank sends its own tokens: its part of each of its replica's sequences if tp or cp > 1. Gates decide per full
sequence, so the ranks of a replica first gather the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.base.boxes import Box
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_gather, to_host
from shoal.engine.collectives.uneven import (
    all_gather_uneven,
    exchange_rows,
    gather_rows,
    part_lengths,
    permute_rows,
    scatter_rows,
    shard_of,
)
from shoal.engine.models.experts.grouped import GroupedExperts
from shoal.engine.models.experts.layer import MoE
from shoal.engine.models.experts.router import TokenPlaces
from shoal.engine.parallel.context.causal_blocks import places_of
from shoal.engine.parallel.context.token_order import TokenAssignment, count
from shoal.engine.parallel.placement import ParamPlacement
from shoal.engine.parallel.weight_grad import GradSink, GroupedLinearFunction
from shoal.spec.catalog import ModelShape

SEQUENCE = 1  # dim of [b, s, ..] that tp splits


@dataclass(frozen=True)
class ExpertParallel:
    """This rank's position in the expert mesh of its pipeline stage.

    Attributes:
        group: ranks with different experts (ep).
        tensor: ranks with other parts of the same experts (etp).
        sink: receives the experts' gradients.
    """

    group: Group | None
    index: int
    size: int
    tensor: Group | None
    tensor_index: int
    tensor_size: int
    sink: GradSink


def apply_expert_parallel(
    model: nn.Module, shape: ModelShape, mesh: Mesh, sink: GradSink, spread: TokenAssignment,
    chosen: TokenAssignment | None = None,
) -> dict[str, ParamPlacement]:
    """Split the experts of a model on the meta device in place, and route tokens to them.

    Args:
        spread: assignment of the tokens of a sequence to the context-parallel ranks.
        chosen: the same for the tokens chosen in Mixture-of-Depths layers.

    Returns:
        Placements of the parameters of experts and routers, by name.
    """
    if shape.experts is None:
        return {}
    at = ExpertParallel(
        mesh.group("ep"), mesh.index("ep"), mesh.size("ep"), mesh.group("etp"), mesh.index("etp"), mesh.size("etp"),
        sink,
    )
    tp, cp = mesh.group("tp"), mesh.group("cp")
    for axis in ("edp_shard", "edp_replicate", "stage"):
        mesh.group(axis)  # on every stage, even without experts: group names count a process's groups
    splits: dict[str, ParamPlacement] = {}
    for name, module in model.named_modules():
        if not isinstance(module, MoE):
            continue
        module.experts = experts = DistributedExperts(module.experts, f"{name}.experts", at)
        splits |= {placement.name: placement for placement in experts.placements}
        for part, parameter in module.router.named_parameters(recurse=False):
            # Each tp rank scores its own part of the sequences.
            whole = tuple(parameter.shape)
            full = f"{name}.router.{part}"
            splits[full] = ParamPlacement(
                full, whole, Box.whole(whole), whole, sum_over=("tp",) if tp else (), copies=mesh.size("tp"),
                primary=mesh.index("tp") == 0,
            )
        if module.router.bias is not None:
            module.router.bias = torch.zeros(shape.experts.count, dtype=torch.float64, device=mesh.device)
        if tp is not None or cp is not None:
            skips = chosen is not None and shape.skips(module.router.layer)
            module.router.places = TokenShares(mesh, chosen if chosen is not None and skips else spread)
    return splits


class TokenShares(TokenPlaces):
    """Token shares of ranks that split sequences (tp and cp): each routes its own tokens, given all scores.

    Args:
        spread: assignment of tokens to the cp ranks; the tp ranks split each rank's tokens evenly.
    """

    def __init__(self, mesh: Mesh, spread: TokenAssignment):
        self.tp, self.cp = mesh.group("tp"), mesh.group("cp")
        self.split_already = mesh.layout.sequence_parallel
        parts, rank = mesh.size("tp"), mesh.index("tp")
        ranks = range(mesh.size("cp"))
        self.share = 1 / (parts * len(ranks))
        self.sizes = [count(spread.chunks(other)) for other in ranks]  # tokens of each cp rank
        self.lengths = part_lengths(self.sizes[mesh.index("cp")], parts)  # tokens of each tp rank, within this cp rank
        start = sum(self.lengths[:rank])
        self.here = slice(start, start + self.lengths[rank])
        self.order: Tensor | None = None
        if self.cp is not None:
            with mesh.real_index_tensors():
                places = [places_of(spread.chunks(other), mesh.device) for other in ranks]
                self.order = torch.cat(places).argsort()  # from rank order to sequence order
                self.mine = places[mesh.index("cp")][self.here]  # positions of the local tokens

    def take(self, x: Tensor) -> Tensor:
        return x if self.split_already else shard_of(x, self.tp, SEQUENCE, self.lengths)

    def join(self, y: Tensor) -> Tensor:
        return y if self.split_already else all_gather_uneven(y, self.tp, SEQUENCE, self.lengths)

    def gather(self, scores: Tensor) -> Tensor:
        scores = all_gather_uneven(scores, self.tp, SEQUENCE, self.lengths)
        if self.order is None:
            return scores
        return all_gather_uneven(scores, self.cp, SEQUENCE, self.sizes).index_select(SEQUENCE, self.order)

    def own(self, made: Tensor) -> Tensor:
        return made[:, self.here] if self.order is None else made.index_select(SEQUENCE, self.mine)


class DistributedExperts(GroupedExperts):
    """This rank's part of the experts, which exchanges tokens with the ranks of other experts.

    Args:
        whole: all experts, unsharded.
        name: module name in the model.
    """

    def __init__(self, whole: GroupedExperts, name: str, at: ExpertParallel):
        super(GroupedExperts, self).__init__()
        self.at, self.sink, self.gate = at, at.sink, None
        self.placements: list[ParamPlacement] = []
        for part, parameter in whole.named_parameters():
            n, *dims = parameter.shape
            inner = 1 if part == "down" else 0  # the matrix dim of the inner width
            start, local = [at.index * n // at.size, 0, 0], [n // at.size, *dims]
            local[1 + inner] //= at.tensor_size
            start[1 + inner] = at.tensor_index * local[1 + inner]
            box = Box(tuple(start), tuple(local))
            setattr(self, part, nn.Parameter(parameter.new_empty(box.shape)))
            self.placements.append(ParamPlacement(f"{name}.{part}", (n, *dims), box, box.shape, replicas="edp"))

    def extra_repr(self) -> str:
        """Return ``ep=4, etp=2``."""
        return f"ep={self.at.size}, etp={self.at.tensor_size}"

    def product(self, x: Tensor, weight: nn.Parameter, counts: Sequence[int]) -> Tensor:
        """Compute `GroupedExperts.product`, with the weight gradient sent to the sink."""
        if self.sink.parameters is None:
            return super().product(x, weight, counts)
        return GroupedLinearFunction.apply(self.sink, x, weight, counts)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Apply each row's expert: [m, h], sorted by expert -> [m, h] in the same order.

        Args:
            counts: [E] rows for each expert of the model.
        """
        at = self.at
        if at.group is None and at.tensor is None:
            return super().forward(rows, counts)
        per_rank = all_gather(counts.view(1, -1), at.group).view(at.size, at.size, -1)  # [from, to, local expert]
        coming = per_rank[:, at.index].contiguous()  # [from, local expert]
        everywhere = all_gather(coming.unsqueeze(0), at.tensor)  # [etp, from, local expert]
        send = counts.view(at.size, -1).sum(1).tolist()
        receive = to_host(coming.sum(1))
        gathered = to_host(everywhere.sum((1, 2)))
        order = _by_expert(everywhere.flatten(0, 1))
        # Reusing one name frees each tensor that backward does not need at the next step.
        rows = exchange_rows(rows, send, receive, at.group)
        rows = gather_rows(rows, gathered, at.tensor)
        rows = permute_rows(rows, *order)
        rows = self.blocks(rows, everywhere.sum((0, 1)).tolist())
        rows = permute_rows(rows, *order[::-1])
        rows = scatter_rows(rows, gathered, at.tensor)
        return exchange_rows(rows, receive, send, at.group)


def _by_expert(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the permutation from rows sorted by (source, expert) to rows sorted by expert, and its inverse.

    Args:
        counts: [sources, experts].
    """
    sizes = counts.t().flatten()
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts).t().flatten()
    places = torch.arange(int(sizes.sum()), device=counts.device)
    order = places + torch.repeat_interleave(starts - (sizes.cumsum(0) - sizes), sizes)
    return order, torch.empty_like(order).index_copy_(0, order, places)
