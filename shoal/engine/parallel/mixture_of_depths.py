"""Layers that only some tokens pass through, where several ranks have the tokens of a sequence.

With sequence or context parallelism the chosen tokens of a sequence lie anywhere among the ranks that share it, as many
on one as its tokens happen to score. They are computed as a shorter sequence, spread over these ranks in the same way:

    own tokens -> scores -> all-gather -> the k highest -> all-to-all -> layer -> all-to-all -> weighted sum

The scores are [b, s] numbers, and every rank decides the same from them. Chosen tokens travel to the ranks that have
their places in the shorter sequence, each rank an equal part, so that the layer's collectives find what they expect.
With context parallelism attention goes by these places (a token's place among the chosen), rotation by the true ones.
Where tensor-parallel ranks have the same tokens nothing has to travel.
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
from shoal.engine.parallel.context.causal_blocks import places_of
from shoal.engine.parallel.context.token_order import TokenAssignment, spread
from shoal.spec.catalog import ModelShape

SEQUENCE = 1  # dim of [b, s]


@dataclass(frozen=True)
class SharedPlaces(ChosenPlaces):
    """Of one of several ranks.

    Attributes:
        group: of the ranks that share sequences, of which this is number ``rank``.
        tokens: of each of them, the places in the sequence of its tokens, in its order.
        chosen: of each, the places among the chosen tokens of those that it computes, in its order.
        context: the places among the chosen tokens of those that attention is given here, in its order.
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
        holder, local = self._holders()
        taken = taken.index_select(SEQUENCE, torch.cat(list(self.chosen)))  # those of the first rank, of the second, ..
        holders = holder[taken]
        index, send = [], []
        for places, ranks in zip(taken.split(sizes, SEQUENCE), holders.split(sizes, SEQUENCE), strict=True):
            sequence, column = (ranks == self.rank).nonzero(as_tuple=True)
            index.append(sequence * s + local[places[sequence, column]])
            send.append(len(sequence))
        sources = holders.split(sizes, SEQUENCE)[self.rank].flatten()  # of what is computed here, in its order
        receive = torch.bincount(sources, minlength=len(sizes)).tolist()
        order = sources.argsort(stable=True)  # in which it arrives: by rank
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        shape = (len(taken), sizes[self.rank], -1)

        def there(rows: Tensor) -> Tensor:
            return permute_rows(exchange_rows(rows, send, receive, self.group), back, order).view(shape)

        def home(rows: Tensor) -> Tensor:
            return exchange_rows(permute_rows(rows.flatten(0, 1), order, back), receive, send, self.group)

        return TokenRoute(torch.cat(index), there, home)

    def _holders(self) -> tuple[Tensor, Tensor]:
        """By place in the sequence, the rank that has its token, and which of the rank's it is."""
        everywhere = torch.cat(list(self.tokens))
        ranks = torch.cat([torch.full_like(places, rank) for rank, places in enumerate(self.tokens)])
        numbers = torch.cat([torch.arange(len(places), device=places.device) for places in self.tokens])
        empty = torch.empty_like(everywhere)
        return empty.index_copy(0, everywhere, ranks), empty.index_copy(0, everywhere, numbers)


def chosen_spread(shape: ModelShape, mesh: Mesh, whole: TokenAssignment) -> TokenAssignment | None:
    """How the chosen tokens of a sequence are spread over the context-parallel ranks; None where all are taken.

    Args:
        whole: of all tokens.
    """
    return None if shape.depths is None else spread(mesh.layout, shape.depths.taken(whole.tokens))


def apply_mixture_of_depths(
    model: Transformer, shape: ModelShape, mesh: Mesh, whole: TokenAssignment, chosen: TokenAssignment | None
) -> None:
    """Have the layers that take some tokens, in place, decide for whole sequences and share the work evenly.

    Args:
        model: a `Transformer`, or the part of one that a pipeline stage keeps.
        whole, chosen: of all tokens and of the chosen ones over the context-parallel ranks.
    """
    if chosen is None:
        return
    parts = mesh.layout.token_multiple
    axis = "sequence" if parts > 1 else "cp"
    group = mesh.group(axis)  # on every stage, also where no layer of it takes some tokens
    for layer in model.layers.values():
        if (depth := layer.depth) is None:
            continue
        # Without sequence parallelism tensor-parallel ranks have the same tokens, of which the first counts.
        depth.counts = parts > 1 or mesh.index("tp") == 0
        if group is None:
            continue
        with mesh.real_index_tensors():
            tokens, of_chosen = (by_rank(each, parts, mesh.device) for each in (whole, chosen))
            context = places_of(chosen.chunks(mesh.index("cp")), mesh.device)
        depth.places = SharedPlaces(group, mesh.index(axis), tokens, of_chosen, context)


def by_rank(each: TokenAssignment, parts: int, device: torch.device) -> list[Tensor]:
    """The places of every rank: those of context-parallel ranks, which tensor-parallel ones share evenly, or all."""
    ranks = range(each.ring * each.ulysses)
    return [part for rank in ranks for part in places_of(each.chunks(rank), device).chunk(parts)]
