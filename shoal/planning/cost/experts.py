"""What a layer with experts computes and sends on one rank, where tokens are spread evenly over the experts."""

from __future__ import annotations

from typing import NamedTuple

from shoal.planning.cost.context import tokens_here
from shoal.planning.cost.optional_parts import experts_of
from shoal.spec.catalog import ModelShape
from shoal.spec.layout import Layout


class RoutedRows(NamedTuple):
    """Rows of one micro-batch in one layer, on one rank.

    Attributes:
        own: tokens that the rank routes: its part of each sequence.
        sent: rows that it has for experts, wherever these are.
        here: rows that its experts compute.
        away: of those sent, the ones for other ranks of ep, and as many come.
        gathered: of those here, the ones that come from other ranks of etp.
    """

    own: int
    sent: int
    here: int
    away: float
    gathered: int


def routed_rows(shape: ModelShape, layout: Layout, sequence_length: int) -> RoutedRows:
    """Where nothing is dropped and every expert gets the same."""
    tokens = layout.micro_batch * tokens_here(layout, sequence_length)
    own = -(-tokens // layout.tp)
    sent = own * experts_of(shape).per_token
    here = sent * layout.expert_tensor
    return RoutedRows(own, sent, here, sent * (layout.ep - 1) / layout.ep, here - sent)
