"""What training software does with memory and overlap, as facts, by the names that publications give it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from shoal.base.section import Section
from shoal.spec.catalog.tables import entries

AttentionKernel = Literal["unfused", "fused-softmax", "flash-1", "flash-2", "flash-3"]


class Software(Section):
    """One framework of one time."""

    name: str
    """The name in the catalog."""

    match: tuple[str, ...]
    """Words by which publications name it; the longest that is found counts."""

    since: int = 0
    """The first year of it: of entries that match as well the latest that had begun counts."""

    attention: AttentionKernel
    """Its kernel, where a publication does not say."""

    gradient_bytes: PositiveInt
    """Of a gradient that is kept from micro-batch to micro-batch."""

    reduce_bytes: PositiveInt
    """Of a gradient while it is reduced."""

    overlap_data: bool = False
    """Gradients are reduced while backward goes on."""

    overlap_tensor: bool = False
    """Tensor-parallel sums are hidden behind the gradients of the weights."""

    overlap_pipeline: bool = False
    """Messages between stages are hidden."""

    ahead: bool = False
    """Its host goes on launching after it has asked for a message between stages, instead of waiting for the device."""

    balanced: bool = False
    """Stages are cut by cost, the head counted."""

    dropout: bool = False
    """Masks of dropout are kept."""

    unit_messages: PositiveInt = 1
    """Collectives for the parameters of one layer under ZeRO-3."""

    crowded: bool = False
    """Its launches are slowed by tensor-parallel peers in jobs whose network is slow (seen, not explained)."""

    bucket_copies: NonNegativeInt = 0
    """Bytes of each parameter in the buckets that replicas reduce; none without replicas."""

    shard_copies: NonNegativeInt = 0
    """The same of each rank's shard, under ZeRO."""

    reduced_apart: NonNegativeInt = 0
    """Whole tensors of [b, s, h] that a layer's forward hands to collectives on a stream of their own: what the host
    has freed can be used again only once the device has come to it."""

    gathers_kept: bool = False
    """With sequence parallelism the gathered inputs of each block are kept for backward."""

    logits_whole: bool = False
    """The loss sees the logits of the whole vocabulary on every tensor-parallel rank."""

    kept_ffn: PositiveInt = 4
    """Tensors of [b, s, f] that a gated block keeps: gate, up, the activation and the product; one fused kernel keeps
    no activation, a compiled block computes the product again as well."""

    recompute: Literal["none", "selective", "full"] = "none"
    """What it does where a publication does not say."""

    source: str
    """Where this is from."""


def software_table() -> Mapping[str, Software]:
    """Every entry, by name, in the order of the file."""
    return entries("software", Software)


def software_named(text: str, year: float = 2025) -> Software:
    """The entry that a publication of some year means.

    >>> software_named("Megatron-LM", 2022).name, software_named("Megatron-LM", 2024).name, software_named("new").name
    ('megatron-2021', 'megatron-core', 'other')
    """
    known = software_table()
    found = [
        (len(word), of.since, name)
        for name, of in known.items()
        if of.since <= year
        for word in of.match
        if word.lower() in text.lower()
    ]
    return known[max(found)[2] if found else "other"]
