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

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from shoal.base.boxes import Box
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_gather, read
from shoal.engine.collectives.uneven import (
    exchange_rows,
    gather_rows,
    part_lengths,
    part_of,
    permuted,
    scatter_rows,
    whole_of,
)
from shoal.engine.models.experts.grouped import GroupedExperts
from shoal.engine.models.experts.layer import MoE, Routed
from shoal.engine.models.experts.router import RoutingContext
from shoal.engine.parallel.context.causal_blocks import places_of
from shoal.engine.parallel.context.token_order import Spread
from shoal.engine.parallel.placement import ParamPlacement
from shoal.spec.catalog import ModelShape

SEQUENCE = 1  # dim of [b, s, ..] that is split over tp


@dataclass(frozen=True)
class ExpertParallel:
    """This rank's place among the ranks of its pipeline stage, as the experts are spread over them.

    Attributes:
        group: other experts (ep).
        tensor: other parts of the same experts (etp).
        parts: other parts of the same sequences (tp).
        split_already: whether activations come in these parts (sequence parallelism).
        context: other tokens of the same sequences (cp), spread as `spread` says.
    """

    group: Group | None
    index: int
    size: int
    tensor: Group | None
    tensor_index: int
    tensor_size: int
    parts: Group | None
    split_already: bool
    context: Group | None
    spread: Spread

    @staticmethod
    def on(mesh: Mesh, spread: Spread) -> ExpertParallel:
        """That of a mesh."""
        return ExpertParallel(
            mesh.group("ep"), mesh.index("ep"), mesh.size("ep"),
            mesh.group("etp"), mesh.index("etp"), mesh.size("etp"),
            mesh.group("tp"), mesh.layout.sequence_parallel, mesh.group("cp"), spread,
        )


def apply_expert_parallel(
    model: nn.Module, shape: ModelShape, mesh: Mesh, spread: Spread, chosen: Spread | None = None
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
    everywhere = ExpertParallel.on(mesh, spread)
    for axis in ("edp_shard", "edp_replicate", "stage"):
        mesh.group(axis)  # on every stage, also on one without experts: groups are named by how many a process has
    splits: dict[str, ParamPlacement] = {}
    for name, module in model.named_modules():
        if not isinstance(module, MoE):
            continue
        at = everywhere
        if chosen is not None and shape.skips(module.router.layer):
            at = replace(everywhere, spread=chosen)
        splits |= {split.name: split for split in _split_experts(module.experts, f"{name}.experts", at)}
        for part, parameter in module.router.named_parameters(recurse=False):
            # Every rank of tp scores its own part of the sequences.
            whole = tuple(parameter.shape)
            full = f"{name}.router.{part}"
            splits[full] = ParamPlacement(
                full, whole, Box.whole(whole), whole, sum_over=("tp",) if at.parts else (), copies=mesh.size("tp"),
                primary=mesh.index("tp") == 0,
            )
        if module.router.bias is not None:
            module.router.bias = torch.zeros(shape.experts.count, dtype=torch.float64, device=mesh.device)
        module.compute = partial(dispatch, at)
        if at.parts is not None or at.context is not None:
            _score_parts(module, at, mesh)
    return splits


def _split_experts(experts: GroupedExperts, name: str, at: ExpertParallel) -> list[ParamPlacement]:
    """Keep this rank's experts, and of each its part of the inner width."""
    splits = []
    for part, parameter in list(experts.named_parameters()):
        count, *dims = parameter.shape
        inner = 1 if part == "down" else 0  # which of a matrix's dims is the inner width
        start, local = [at.index * count // at.size, 0, 0], [count // at.size, *dims]
        local[1 + inner] //= at.tensor_size
        start[1 + inner] = at.tensor_index * local[1 + inner]
        box = Box(tuple(start), tuple(local))
        setattr(experts, part, nn.Parameter(parameter.new_empty(box.shape)))
        splits.append(ParamPlacement(f"{name}.{part}", (count, *dims), box, box.shape, replicas="edp"))
    return splits


def _score_parts(module: MoE, at: ExpertParallel, mesh: Mesh) -> None:
    """Have the ranks that share sequences each route their own tokens, by the scores of all."""
    router = module.router
    parts = at.parts.size() if at.parts else 1
    ranks = at.context.size() if at.context else 1
    router.share = 1 / (parts * ranks)
    if at.context is not None:
        with mesh.numbers():
            places = [places_of(at.spread.chunks(rank), mesh.device) for rank in range(ranks)]
            order = torch.cat(places).argsort()  # from the ranks' tokens, one's after the other's, to the sequence
        sizes = [len(place) for place in places]

    def by_parts(routed: Routed, x: Tensor, context: RoutingContext) -> Tensor:
        length = x.shape[SEQUENCE] * (parts if at.split_already else 1)  # of this rank of cp
        lengths = part_lengths(length, parts)
        before = sum(lengths[: at.parts.rank()]) if at.parts else 0
        here = lengths[at.parts.rank()] if at.parts else length
        if at.context is None:
            router.whole = lambda scores: whole_of(scores, at.parts, SEQUENCE, lengths)
            router.own = lambda made: made[:, before : before + here]
        else:
            own = places[at.context.rank()][before : before + here]

            def whole(scores: Tensor) -> Tensor:
                scores = whole_of(whole_of(scores, at.parts, SEQUENCE, lengths), at.context, SEQUENCE, sizes)
                return scores.index_select(SEQUENCE, order)

            router.whole = whole
            router.own = lambda made: made.index_select(SEQUENCE, own)
        if at.split_already or at.parts is None:
            return routed(x, context)
        return whole_of(routed(part_of(x, at.parts, SEQUENCE, lengths), context), at.parts, SEQUENCE, lengths)

    module.by_parts = by_parts


def dispatch(at: ExpertParallel, experts: GroupedExperts, rows: Tensor, counts: Tensor) -> Tensor:
    """Every row through its expert, wherever that is.

    Args:
        rows: [m, h], by expert.
        counts: [E], rows for each expert.

    Returns:
        [m, h], in the order of the rows.
    """
    if at.group is None and at.tensor is None:
        return experts(rows, counts.tolist())
    per_rank = all_gather(counts.view(1, -1), at.group).view(at.size, at.size, -1)  # [from, to, expert there]
    coming = per_rank[:, at.index].contiguous()  # [from, expert here]
    everywhere = all_gather(coming.unsqueeze(0), at.tensor)  # [etp, from, expert here]
    send = counts.view(at.size, -1).sum(1).tolist()
    receive = read(coming.sum(1))
    gathered = read(everywhere.sum((1, 2)))
    order = _by_expert(everywhere.flatten(0, 1))
    # One name: what backward does not need is gone at the next step.
    rows = exchange_rows(rows, send, receive, at.group)
    rows = gather_rows(rows, gathered, at.tensor)
    rows = permuted(rows, *order)
    rows = experts(rows, everywhere.sum((0, 1)).tolist())
    rows = permuted(rows, *order[::-1])
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
