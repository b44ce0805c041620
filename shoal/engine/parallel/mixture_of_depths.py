"""Mixture-of-Depths layers with sequences split over ranks.

With sequence or context parallelism the chosen tokens of a sequence are unevenly distributed over its ranks. They are
computed as a shorter sequence, spread evenly over the same ranks:

    own tokens -> scores -> all-gather -> the k highest -> all-to-all -> layer -> all-to-all -> weighted sum

Every rank takes the same decision from the [b, s] scores. With context parallelism attention uses positions in the
shorter sequence, and rotary embeddings use the original positions. No exchange is needed where tensor-parallel ranks
hold the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.uneven import all_gather_uneven, exchange_rows, permute_rows
from shoal.engine.models.mixture_of_depths import ChosenPlaces, TokenRoute
from shoal.engine.models.transformer import Transformer
from shoal.engine.parallel.context.causal_blocks import token_positions
from shoal.engine.parallel.context.token_order import TokenAssignment, assign_tokens
from shoal.spec.catalog import ModelShape

SEQUENCE = 1  # dim of [b, s]


@dataclass(frozen=True)
class SharedPlaces(ChosenPlaces):
    """Chosen tokens of one of several ranks that share sequences.

    Attributes:
        group: the ranks that share sequences; this one has index ``rank``.
        tokens: positions in the sequence of each rank's tokens, in its order.
        chosen: positions among the chosen tokens of the tokens that each rank computes, in its order.
        context: positions among the chosen tokens of the tokens that attention sees on this rank, in its order.
    """

    group: Group
    rank: int
    tokens: Sequence[Tensor]
    chosen: Sequence[Tensor]
    context: Tensor

    def gather(self, scores: Tensor) -> Tensor:
        order = torch.cat(list(self.tokens)).argsort()
        sizes = [len(places) for places in self.tokens]
        return all_gather_uneven(scores, self.group, SEQUENCE, sizes).index_select(SEQUENCE, order)

    def own(self, made: Tensor) -> Tensor:
        return made.index_select(SEQUENCE, self.tokens[self.rank])

    def attending(self, taken: Tensor) -> Tensor:
        return taken.index_select(SEQUENCE, self.context)

    def route(self, taken: Tensor, s: int) -> TokenRoute:
        sizes = [len(places) for places in self.chosen]
        everywhere = torch.cat(list(self.tokens))
        empty = torch.empty_like(everywhere)
        # By position in the sequence: the rank that holds the token, and its local index there.
        holder = empty.index_copy(0, everywhere, torch.cat([torch.full_like(p, i) for i, p in enumerate(self.tokens)]))
        local = empty.index_copy(0, everywhere, torch.cat([torch.arange(len(p), device=p.device) for p in self.tokens]))
        taken = taken.index_select(SEQUENCE, torch.cat(list(self.chosen)))  # ordered by rank
        holders = holder[taken]
        index, send = [], []
        for places, ranks in zip(taken.split(sizes, SEQUENCE), holders.split(sizes, SEQUENCE), strict=True):
            sequence, column = (ranks == self.rank).nonzero(as_tuple=True)
            index.append(sequence * s + local[places[sequence, column]])
            send.append(len(sequence))
        sources = holders.split(sizes, SEQUENCE)[self.rank].flatten()  # source ranks, in local order
        receive = torch.bincount(sources, minlength=len(sizes)).tolist()
        order = sources.argsort(stable=True)  # order of arrival: by rank
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        shape = (len(taken), sizes[self.rank], -1)

        def dispatch(rows: Tensor) -> Tensor:
            return permute_rows(exchange_rows(rows, send, receive, self.group), back, order).view(shape)

        def combine(rows: Tensor) -> Tensor:
            return exchange_rows(permute_rows(rows.flatten(0, 1), order, back), receive, send, self.group)

        return TokenRoute(torch.cat(index), dispatch, combine)


def assign_chosen(shape: ModelShape, mesh: Mesh, tokens: TokenAssignment) -> TokenAssignment | None:
    """Return the assignment of the chosen tokens to the context-parallel ranks; None without Mixture-of-Depths."""
    return None if shape.depths is None else assign_tokens(mesh.layout, shape.depths.taken(tokens.tokens))


def apply_mixture_of_depths(
    model: Transformer, mesh: Mesh, tokens: TokenAssignment, chosen: TokenAssignment | None
) -> None:
    """Make the Mixture-of-Depths layers, in place, choose from full sequences and share the work evenly.

    Args:
        tokens, chosen: assignment of all tokens and of the chosen tokens to the context-parallel ranks.
    """
    if chosen is None:
        return
    parts = mesh.layout.sequence_shards
    axis = "sequence" if parts > 1 else "cp"
    group = mesh.group(axis)  # on every stage, even if none of its layers skips tokens
    for layer in model.layers.values():
        if (depth := layer.depth) is None:
            continue
        # Without sequence parallelism the tensor-parallel ranks hold the same tokens, and only the first counts.
        depth.counts = parts > 1 or mesh.index("tp") == 0
        if group is None:
            continue
        with mesh.real_index_tensors():
            held, computed = (positions_by_rank(each, parts, mesh.device) for each in (tokens, chosen))
            context = token_positions(chosen.chunks(mesh.index("cp")), mesh.device)
        depth.places = SharedPlaces(group, mesh.index(axis), held, computed, context)


def positions_by_rank(each: TokenAssignment, parts: int, device: torch.device) -> list[Tensor]:
    """Return the token positions of each rank; tensor-parallel ranks evenly split a context-parallel rank's tokens."""
    ranks = range(each.ring * each.ulysses)
    return [part for rank in ranks for part in token_positions(each.chunks(rank), device).chunk(parts)]
