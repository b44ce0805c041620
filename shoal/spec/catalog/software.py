"""What training software does: memory, overlap, kernels. By its own name, and by the names used in publications."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from shoal.base.section import Section
from shoal.spec.catalog.accelerators import Generation
from shoal.spec.catalog.tables import entries, find
from shoal.spec.layout import ZeroStage

AttentionKernel = Literal["unfused", "fused-softmax", "flash-1", "flash-2", "flash-3"]


class Software(Section):
    """A training framework at one point in time."""

    name: str  # Name in the catalog
    calibrated_as: str = ""  # Entry whose constants and errors of the cost model it has, if not its own
    match: tuple[str, ...]  # Substrings by which publications name it; the longest match wins
    since: int = 0  # First year of this entry. Among equal matches, the latest entry that had started wins.
    attention: AttentionKernel  # Attention kernel, if a publication does not name one
    gradient_bytes: PositiveInt  # Bytes per element of gradients accumulated over micro-batches
    reduce_bytes: PositiveInt  # Bytes per element of gradients while they are reduced
    optimizer_bytes: PositiveInt = 12  # Bytes per parameter: weights in fp32 and Adam's two moments
    # Whether the products of weights' gradients add to the sum over micro-batches (Megatron-LM's
    # `gradient_accumulation_fusion`), instead of a kernel that reads each gradient and the sum
    fused_accumulation: bool = False
    overlap_data: bool = False  # Whether gradients are reduced during backward
    overlap_gather: bool = False  # Whether ZeRO-1 gathers updated parameters during forward
    overlap_tensor: bool = False  # Whether tensor-parallel reductions overlap with weight gradients
    overlap_pipeline: bool = False  # Whether messages between stages are overlapped
    # Whether the host launches further kernels after it requests a message between stages, without waiting
    ahead: bool = False
    # Whether the host waits for the end of each kernel (`CUDA_LAUNCH_BLOCKING=1`), so that launches hide nothing
    blocking: bool = False
    paired: bool = False  # Whether each pipeline rank has two stages, as far from the first as from the last (DualPipe)
    balanced: bool = False  # Whether stages are balanced by cost, including the head
    # Whether equal stages may count embedding and head as a layer each: `account_for_embedding_in_pipeline_split` of
    # Megatron-Core, `pipeline_parallel_first_stage_less_layers` of torchtitan, `allow_padding_num_layers` of Zero
    # Bubble, a partition by ``type:transformer|embedding`` of DeepSpeed
    counts_ends: bool = False
    # Whether the first and the last of several ranks with one stage each may have fewer layers than the others:
    # `decoder_first_pipeline_num_layers` and `decoder_last_pipeline_num_layers` of Megatron-Core
    shortens_ends: bool = False
    # Whether a layer that meets a balanced stage's share exactly belongs to that stage, not to the next
    ties_first: bool = False
    fused_norm: bool = True  # Whether a norm is one kernel
    # What selective recomputation recomputes: attention's core (Korthikanti et al. 2022); all except the products with
    # weights, in kernels that compute other things too (XLA; JAX's `checkpoint_dots_with_no_batch_dims`); or all except
    # every second product and attention (torchtitan's policy).
    selective: Literal["core", "products", "operators"] = "core"
    dropout: bool = False  # Whether dropout masks are stored
    unit_messages: PositiveInt = 1  # Collectives per layer for its parameters under ZeRO-3
    # Whether ZeRO-3 in a pipeline gathers a stage's parameters once a step and reduces its gradients once: both stay
    # unsharded between micro-batches
    gathers_once: bool = False
    bucket_copies: NonNegativeInt = 0  # Bytes per parameter in the buckets that replicas reduce; none without replicas
    shard_copies: NonNegativeInt = 0  # The same for each rank's shard, under ZeRO
    # Parameters of a layer whose parts ZeRO-1 and 2 copy one by one, rank by rank, when updated ones are gathered
    sliced: NonNegativeInt = 0
    # Tensors of [b, s, h] that a layer's forward passes to collectives on a separate stream. The host can reuse their
    # memory only after the device has finished with them.
    reduced_apart: NonNegativeInt = 0
    # Part of activations and transient tensors that tensor parallelism needs besides, where little memory is left: kept
    # parts of tensors lie between full ones that are freed. By which published runs failed; none where torch's
    # allocator has `expandable_segments`, or a compiler places tensors
    split_holes: NonNegativeFloat = 0.1
    hides_gathers: bool = False  # Whether backward gathers inputs again while it computes gradients, and nothing waits
    unsplit_logits: bool = False  # Whether the loss reads full-vocabulary logits on every tensor-parallel rank
    fused_loss: bool = False  # Whether the loss writes the gradient of the logits in their place
    # Tensors of [b, s, f] that a gated block stores: gate, up, the activation and the product. A fused kernel stores no
    # activation; a compiled block also recomputes the product.
    kept_ffn: PositiveInt = 4
    # Bytes per element of what is stored for the backward: inputs of products, and tensors of a gated block
    kept_bytes: PositiveFloat = 2
    # Whether the inputs of products in 8 and 4 bits are stored as they are multiplied, in 8
    keeps_quantised: bool = False
    # Whether the backward makes heads from their latents again
    recomputes_heads: bool = False
    recomputes_norms: bool = False  # Whether it makes the outputs of norms again
    # Whether it makes the inputs of a feed-forward block's last product again
    recomputes_activation: bool = False
    # Whether a recomputed layer leaves out what no gradient needs: its last product, and the sum of its result
    drops_unused: bool = False
    offloads_heads: bool = False  # Whether it finds queries, keys and values in the host's memory
    # Layers of a rank whose stored tensors wait in the host's memory for their backward (Megatron-Core's
    # `cpu_offloading_num_layers`), in layers or parts of one; they travel while other layers are computed
    offloaded_layers: NonNegativeFloat = 0
    # Whether latent attention's values get zeros up to the width of queries, for kernels that take equal widths
    pads_values: bool = False
    # Whether a token's row is sent once to each node that has experts of it, and copied there (DeepEP, HybridEP)
    rows_once: bool = False
    row_bytes: PositiveFloat = 2  # Bytes per element of rows on their way to experts and back, the mean of both
    # Whether rows travel to experts and back while another micro-batch is computed (DualPipe; Megatron-Core's
    # `overlap_moe_expert_parallel_comm`; shoal, where the layout pairs micro-batches)
    overlap_rows: bool = False
    # Fraction of their travel time that it hides; in the rest, the processors that copy rows compute nothing
    overlap_experts: float = Field(default=0.0, ge=0, le=1)
    # Kernels that the host launches for each expert of a rank in a forward in 16 bits; none if all experts share one
    expert_kernels: NonNegativeInt = 0
    # Whether its models add the results of attention and of the feed-forward block at once: both read the same norm
    parallel_block: bool = False
    graphs: bool = False  # Whether one CUDA graph launches all kernels of a step
    recompute: Literal["none", "selective", "full"] = "none"  # Recomputation, if a publication does not name it
    # Of the axes that not all software has, those along which it splits a model, for a search
    axes: tuple[Literal["tp", "cp", "ep", "pp"], ...] = ("tp", "cp", "ep", "pp")
    formats: tuple[str, ...] = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4")  # Number formats in which it trains
    zero_stages: tuple[ZeroStage, ...] = (0, 1)  # ZeRO stages that it has, for a search
    schedules: tuple[str, ...] = ("1f1b", "interleaved-1f1b")  # Pipeline schedules that it has, for a search
    # Constants of the cost model measured with this software, by generation of accelerators; elsewhere those fitted to
    # published measurements count
    constants: dict[Generation, dict[str, NonNegativeFloat]] = Field(default={})
    source: str  # Source of the facts

    @property
    def family(self) -> str:
        """The entry that has its constants and errors of the cost model."""
        return self.calibrated_as or self.name

    @property
    def least_sharding(self) -> ZeroStage:
        """The lowest ZeRO stage that shards, of those that it has; 0 if it has none."""
        return next((stage for stage in self.zero_stages if stage), 0)

    def has(self, **degrees: int) -> bool:
        """Return whether it has the axes on which there is more than one rank.

        >>> find_software("composer").has(tp=1, pp=1), find_software("composer").has(tp=8, pp=1)
        (True, False)
        """
        return all(ranks == 1 or axis in self.axes for axis, ranks in degrees.items())

    def splits(self, layers: int, stages: int, *, each: int = 1) -> bool:
        """Return whether it splits the layers of a model into this number of stages, of which a rank has ``each``.

        >>> find_software("megatron-core").splits(61, 16), find_software("megatron-2021").splits(61, 16)
        (True, False)
        """
        if self.balanced or self.paired:  # DeepSeek-V3 has 61 layers on 16 ranks
            return stages <= layers
        if layers % stages == 0 or (self.counts_ends and (layers + 2) % stages == 0):
            return True
        return self.shortens_ends and each == 1 and min(shorten_ends(layers, stages)) > 0


def shorten_ends(layers: int, stages: int) -> tuple[int, int]:
    """Return the layers of the first and of the last stage, if all others have as many as the fullest stage must have.

    >>> shorten_ends(61, 16), shorten_ends(61, 32)
    ((3, 2), (1, 0))
    """
    left = layers - -(-layers // stages) * (stages - 2)
    return left - left // 2, left // 2


def software_table() -> Mapping[str, Software]:
    """Return all entries by name, in the order of the file."""
    return entries("software", Software)


def find_software(name: str) -> Software:
    """Return an entry by its name.

    Raises:
        UsageError: the name is not in the catalog.

    >>> find_software("torchtitan").selective
    'operators'
    """
    return find(name, software_table(), "--software")


def software_named(text: str, year: float = 2025) -> Software:
    """Return the entry that a publication from some year refers to.

    >>> software_named("Megatron-LM", 2022).name, software_named("Megatron-LM", 2024).name, software_named("new").name
    ('megatron-2022', 'megatron-core', 'other')
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
