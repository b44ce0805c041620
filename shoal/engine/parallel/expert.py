"""Expert parallelism: experts are spread over ranks, and tokens travel to them and back (Lepikhin et al. 2020).

The dp x cp x tp ranks of a pipeline stage form a second mesh for the experts. Along ep, ranks hold different experts.
Along etp, they split each expert's matrices. Along edp, they hold the same experts; gradients are summed and optimizer
state is sharded over it (Liu et al. 2025, "MoE parallel folding").

    own tokens -> router -> all-to-all over ep -> all-gather over etp -> experts -> reduce-scatter -> all-to-all -> sum

Every rank sends its own tokens: its part of each of its replica's sequences if tp or cp > 1. Gates decide per full
sequence, so the ranks of a replica first gather the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from shoal.base.boxes import Box
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_gather, start_to_host
from shoal.engine.collectives.uneven import (
    ExchangedRows,
    all_gather_uneven,
    exchange_rows,
    gather_rows,
    part_lengths,
    permute_rows,
    scatter_rows,
    take_shard,
)
from shoal.engine.models.experts.grouped import GroupedExperts
from shoal.engine.models.experts.layer import MoE
from shoal.engine.models.experts.router import TokenPlaces
from shoal.engine.parallel.context.causal_blocks import token_positions
from shoal.engine.parallel.context.token_order import TokenAssignment, count_tokens
from shoal.engine.parallel.placement import ParamPlacement, keep_box, replicate
from shoal.engine.parallel.weight_grad import GradSink
from shoal.spec.catalog import ModelShape

SEQUENCE = 1  # dim of [b, s, ..] that tp placements


def apply_expert_parallel(
    model: nn.Module, shape: ModelShape, mesh: Mesh, sink: GradSink, assignment: TokenAssignment,
    chosen: TokenAssignment | None = None,
) -> dict[str, ParamPlacement]:
    """Split the experts of a model on the meta device in place, and route tokens to them.

    Args:
        assignment: assignment of the tokens of a sequence to the context-parallel ranks.
        chosen: the same for the tokens chosen in Mixture-of-Depths layers.

    Returns:
        Placements of the parameters of experts and routers, by name.
    """
    if shape.experts is None:
        return {}
    tp, cp = mesh.group("tp"), mesh.group("cp")
    for axis in ("ep", "etp", "edp_shard", "edp_replicate", "stage"):
        mesh.group(axis)  # on every stage, even without experts: group names count a process's groups
    placements: dict[str, ParamPlacement] = {}
    for name, module in model.named_modules():
        if not isinstance(module, MoE):
            continue
        module.experts = experts = DistributedExperts(module.experts, f"{name}.experts", mesh, sink)
        placements |= {placement.name: placement for placement in experts.placements}
        of_tokens = [(f"router.{part}", parameter) for part, parameter in module.router.named_parameters(recurse=False)]
        for part, parameter in (*module.named_parameters(recurse=False), *of_tokens):
            full = f"{name}.{part}"
            placements[full] = replicate(full, parameter, mesh, partial=tp is not None)
        if module.router.bias is not None:
            module.router.bias = torch.zeros(shape.experts.count, dtype=torch.float64, device=mesh.device)
        if tp is not None or cp is not None:
            skips = chosen is not None and shape.skips(module.router.layer)
            module.router.places = TokenShares(mesh, chosen if chosen is not None and skips else assignment)
    return placements


class TokenShares(TokenPlaces):
    """Token shares of ranks that split sequences (tp and cp): each routes its own tokens, given all scores.

    Args:
        assignment: assignment of tokens to the cp ranks; the tp ranks split each rank's tokens evenly.
    """

    def __init__(self, mesh: Mesh, assignment: TokenAssignment):
        self.tp, self.cp = mesh.group("tp"), mesh.group("cp")
        self.split_already = mesh.layout.sequence_parallel
        parts, rank = mesh.size("tp"), mesh.index("tp")
        ranks = range(mesh.size("cp"))
        self.share = 1 / (parts * len(ranks))
        self.sizes = [count_tokens(assignment.chunks(other)) for other in ranks]  # tokens of each cp rank
        self.lengths = part_lengths(self.sizes[mesh.index("cp")], parts)  # tokens of each tp rank, within this cp rank
        start = sum(self.lengths[:rank])
        self.local = slice(start, start + self.lengths[rank])
        self.order: Tensor | None = None
        if self.cp is not None:
            with mesh.real_index_tensors():
                places = [token_positions(assignment.chunks(other), mesh.device) for other in ranks]
                self.order = torch.cat(places).argsort()  # from rank order to sequence order
                self.mine = places[mesh.index("cp")][self.local]  # positions of the local tokens

    def take(self, x: Tensor) -> Tensor:
        return x if self.split_already else take_shard(x, self.tp, SEQUENCE, self.lengths)

    def join(self, y: Tensor) -> Tensor:
        return y if self.split_already else all_gather_uneven(y, self.tp, SEQUENCE, self.lengths)

    def gather(self, scores: Tensor) -> Tensor:
        scores = all_gather_uneven(scores, self.tp, SEQUENCE, self.lengths)
        if self.order is None:
            return scores
        return all_gather_uneven(scores, self.cp, SEQUENCE, self.sizes).index_select(SEQUENCE, self.order)

    def own(self, made: Tensor) -> Tensor:
        return made[:, self.local] if self.order is None else made.index_select(SEQUENCE, self.mine)

    def full_length(self, s: int) -> int:
        return sum(self.sizes)


class DistributedExperts(GroupedExperts):
    """This rank's part of the experts, which exchanges tokens with the ranks of other experts."""

    def __init__(self, unsplit: GroupedExperts, name: str, mesh: Mesh, sink: GradSink):
        super(GroupedExperts, self).__init__()
        self.sink, self.gate, self.gate_bias, self.up_bias = sink, None, None, None
        self.clamped = unsplit.clamped
        self.ep, self.index, self.ep_size = mesh.group("ep"), mesh.index("ep"), mesh.size("ep")
        self.etp, self.etp_size = mesh.group("etp"), mesh.size("etp")
        self.overlaps = self.ep is not None and mesh.device.type != "cpu"  # processors compute, or send
        self.placements: list[ParamPlacement] = []
        for part, parameter in list(unsplit.named_parameters()):
            n, *dims = parameter.shape
            inner = 2 if part == "down" else 1  # the dim of the inner width
            start, local = [self.index * n // self.ep_size, *(0 for _ in dims)], [n // self.ep_size, *dims]
            local[inner] //= self.etp_size
            start[inner] = mesh.index("etp") * local[inner]
            setattr(self, part, parameter)
            box = Box(tuple(start), tuple(local))
            self.placements.append(keep_box(self, name, part, box, replicas="edp"))

    def extra_repr(self) -> str:
        """Return ``ep=4, etp=2``."""
        return f"ep={self.ep_size}, etp={self.etp_size}"

    def receiver(self, parameter: nn.Parameter) -> Callable[[Callable], object] | None:
        return None if self.sink.parameters is None else partial(self.sink.add, [parameter])

    def announce(self, ends: Tensor) -> Callable[[Tensor], Callable[[], Tensor]]:
        """Announce the end of each expert's rows, given [E] int32; see `GroupedExperts.announce`.

        Ranks exchange their numbers of rows, and the host reads all that it needs at once, when the rows are sent. The
        device meanwhile makes the rows, and computes the shared experts while they travel.
        """
        if self.ep is None and self.etp is None:
            return super().announce(ends)
        n, t = self.ep_size, self.etp_size
        counts = ends.diff(prepend=ends.new_zeros(1))
        per_rank = all_gather(counts.view(1, -1), self.ep).view(n, n, -1)  # [from, to, local expert]
        coming = per_rank[:, self.index].contiguous()  # [from, local expert]
        everywhere = all_gather(coming.unsqueeze(0), self.etp).view(t, n, -1)  # [etp, from, local expert]
        local = everywhere.sum((0, 1), dtype=torch.int32)
        read = start_to_host(torch.cat((counts.view(n, -1).sum(1), coming.sum(1), everywhere.sum((1, 2)), local)))

        def start(rows: Tensor) -> Callable[[], Tensor]:
            numbers = read()
            send, receive, gathered, counts = (numbers[a:b] for a, b in pairwise((0, n, 2 * n, 2 * n + t, None)))
            if sum(send) < len(rows):  # unused rows
                rows = rows[: sum(send)]
            exchanged = ExchangedRows(rows, send, receive, self.ep)

            def finish() -> Tensor:
                order = _by_expert(everywhere.flatten(0, 1), sum(counts))
                # Reusing one name frees each tensor that backward does not need at the next step.
                rows = gather_rows(exchanged.wait(), gathered, self.etp)
                rows = permute_rows(rows, *order)
                rows = self.blocks(rows, local.cumsum(0, dtype=torch.int32) if self.on_device else counts)
                rows = permute_rows(rows, *order[::-1])
                rows = scatter_rows(rows, gathered, self.etp)
                return exchange_rows(rows, receive, send, self.ep)

            return finish

        return start


def _by_expert(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the permutation from rows sorted by (source, expert) to rows sorted by expert, and its inverse.

    Args:
        counts: [sources, experts], which sum to ``total``.
    """
    sizes = counts.t().flatten()
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts).t().flatten()
    ends = sizes.cumsum(0)
    places = torch.arange(total, device=counts.device)
    order = places + (starts - (ends - sizes))[torch.searchsorted(ends, places, right=True)]
    return order, torch.empty_like(order).index_copy_(0, order, places)
