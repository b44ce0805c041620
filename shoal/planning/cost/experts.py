"""Computation and communication of an expert layer on one rank, with evenly routed tokens."""

from __future__ import annotations

from typing import NamedTuple

from shoal.planning.cost.context import tokens_here
from shoal.planning.cost.optional_parts import experts_of
from shoal.spec.catalog import ModelShape
from shoal.spec.layout import Layout


class RoutedRows(NamedTuple):
    """Rows of one micro-batch in one layer, on one rank.

    Attributes:
        own: tokens that the rank routes, from its part of each sequence.
        sent: rows that it sends to experts on any rank, itself included.
        here: rows that its experts compute.
        away: sent rows for other ranks of ep; equally many arrive.
        gathered: rows in ``here`` that come from other ranks of etp.
    """

    own: int
    sent: int
    here: int
    away: float
    gathered: int


def routed_rows(shape: ModelShape, layout: Layout, sequence_length: int) -> RoutedRows:
    """Return the row counts if no token is dropped and every expert gets equally many."""
    tokens = layout.micro_batch * tokens_here(layout, sequence_length)
    own = -(-tokens // layout.tp)
    sent = own * experts_of(shape).per_token
    here = sent * layout.expert_tensor
    return RoutedRows(own, sent, here, sent * (layout.ep - 1) / layout.ep, here - sent)
