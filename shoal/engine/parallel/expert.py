"""Expert parallelism: each rank holds some experts, and tokens are sent to them and back (Lepikhin et al. 2020).

The ranks of a pipeline stage, dp x cp x tp of them, are laid out once more for the experts: those that hold other
experts (ep), those that split one expert's matrices (etp), and those that hold the same (edp), over which the experts'
gradients are summed and their state is sharded (Liu et al. 2025, "MoE parallel folding"). So neither has to fit the
other's degrees.

    own tokens -> router -> all-to-all over ep -> all-gather over etp -> experts -> reduce-scatter -> all-to-all -> sum

Every rank sends its own tokens: its replica's, and of those, where tp or cp > 1, its part of each sequence. Gates
decide for whole sequences, so the ranks of a replica put their parts' scores together first.
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

SEQUENCE = 1  # dim of [b, s, ..] that is split over tp


@dataclass(frozen=True)
class ExpertParallel:
    """This rank's place among the ranks of its pipeline stage, as the experts are spread over them.

    Attributes:
        group: other experts (ep).
        tensor: other parts of the same experts (etp).
        sink: takes their gradients.
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
    """Split the experts of a model on the meta device in place, and have its tokens sent to them.

    Args:
        spread: of the sequences over the context-parallel ranks.
        chosen: of those tokens that pass through layers which take some.

    Returns:
        How the experts' parameters and the routers' are split, by name.
    """
    if shape.experts is None:
        return {}
    at = ExpertParallel(
        mesh.group("ep"), mesh.index("ep"), mesh.size("ep"), mesh.group("etp"), mesh.index("etp"), mesh.size("etp"),
        sink,
    )
    tp, cp = mesh.group("tp"), mesh.group("cp")
    for axis in ("edp_shard", "edp_replicate", "stage"):
        mesh.group(axis)  # on every stage, also on one without experts: groups are named by how many a process has
    splits: dict[str, ParamPlacement] = {}
    for name, module in model.named_modules():
        if not isinstance(module, MoE):
            continue
        module.experts = experts = DistributedExperts(module.experts, f"{name}.experts", at)
        splits |= {placement.name: placement for placement in experts.placements}
        for part, parameter in module.router.named_parameters(recurse=False):
            # Every rank of tp scores its own part of the sequences.
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
    """Of the ranks that share sequences (tp and cp), each routes its own tokens, by the scores of all.

    Args:
        spread: of the sequences over the ranks of cp; each rank's tokens are in equal parts over those of tp.
    """

    def __init__(self, mesh: Mesh, spread: TokenAssignment):
        self.tp, self.cp = mesh.group("tp"), mesh.group("cp")
        self.split_already = mesh.layout.sequence_parallel
        parts, rank = mesh.size("tp"), mesh.index("tp")
        ranks = range(mesh.size("cp"))
        self.share = 1 / (parts * len(ranks))
        self.sizes = [count(spread.chunks(other)) for other in ranks]  # tokens of each rank of cp
        self.lengths = part_lengths(self.sizes[mesh.index("cp")], parts)  # and of those, of each rank of tp
        start = sum(self.lengths[:rank])
        self.here = slice(start, start + self.lengths[rank])
        self.order: Tensor | None = None
        if self.cp is not None:
            with mesh.real_index_tensors():
                places = [places_of(spread.chunks(other), mesh.device) for other in ranks]
                self.order = torch.cat(places).argsort()  # from the ranks' tokens, one's after the other's, to the
                self.mine = places[mesh.index("cp")][self.here]  # sequence; and the places in it of what is here

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
    """This rank's experts, and of each its part of the inner width; every row goes to its expert, wherever that is.

    Args:
        whole: all experts.
        name: theirs in the model.
    """

    def __init__(self, whole: GroupedExperts, name: str, at: ExpertParallel):
        super(GroupedExperts, self).__init__()
        self.at, self.sink, self.gate = at, at.sink, None
        self.placements: list[ParamPlacement] = []
        for part, parameter in whole.named_parameters():
            n, *dims = parameter.shape
            inner = 1 if part == "down" else 0  # which of a matrix's dims is the inner width
            start, local = [at.index * n // at.size, 0, 0], [n // at.size, *dims]
            local[1 + inner] //= at.tensor_size
            start[1 + inner] = at.tensor_index * local[1 + inner]
            box = Box(tuple(start), tuple(local))
            setattr(self, part, nn.Parameter(parameter.new_empty(box.shape)))
            self.placements.append(ParamPlacement(f"{name}.{part}", (n, *dims), box, box.shape, replicas="edp"))

    def extra_repr(self) -> str:
        """``ep=4, etp=2``."""
        return f"ep={self.at.size}, etp={self.at.tensor_size}"

    def product(self, x: Tensor, weight: nn.Parameter, counts: Sequence[int]) -> Tensor:
        """As of `GroupedExperts`; the gradient of the weight goes to the sink."""
        if self.sink.parameters is None:
            return super().product(x, weight, counts)
        return GroupedLinearFunction.apply(self.sink, x, weight, counts)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Pass every row through its expert: [m, h] by expert -> [m, h] in the same order.

        Args:
            counts: [E], rows for each expert of the model.
        """
        at = self.at
        if at.group is None and at.tensor is None:
            return super().forward(rows, counts)
        per_rank = all_gather(counts.view(1, -1), at.group).view(at.size, at.size, -1)  # [from, to, expert there]
        coming = per_rank[:, at.index].contiguous()  # [from, expert here]
        everywhere = all_gather(coming.unsqueeze(0), at.tensor)  # [etp, from, expert here]
        send = counts.view(at.size, -1).sum(1).tolist()
        receive = to_host(coming.sum(1))
        gathered = to_host(everywhere.sum((1, 2)))
        order = _by_expert(everywhere.flatten(0, 1))
        # One name: what backward does not need is gone at the next step.
        rows = exchange_rows(rows, send, receive, at.group)
        rows = gather_rows(rows, gathered, at.tensor)
        rows = permute_rows(rows, *order)
        rows = self.blocks(rows, everywhere.sum((0, 1)).tolist())
        rows = permute_rows(rows, *order[::-1])
        rows = scatter_rows(rows, gathered, at.tensor)
        return exchange_rows(rows, receive, send, at.group)


def _by_expert(counts: Tensor) -> tuple[Tensor, Tensor]:
    """From rows by source and then by expert to rows by expert: the order, and the order back.

    Args:
        counts: [sources, experts].
    """
    sizes = counts.t().flatten()
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts).t().flatten()
    places = torch.arange(int(sizes.sum()), device=counts.device)
    order = places + torch.repeat_interleave(starts - (sizes.cumsum(0) - sizes), sizes)
    return order, torch.empty_like(order).index_copy_(0, order, places)
