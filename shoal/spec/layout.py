"""The `Layout`: the degree of each parallel axis, and the sizes that follow.

A layout is plain data, executed by the runtime and compared by the verifier. Every error in it is raised before any
process starts (`shoal.spec.compatibility`). Axes, outer to inner: ``pp, dp_replicate,
dp_shard, cp, tp``; adjacent ranks are neighbours in ``tp``, the axis that communicates most.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

from shoal.base.errors import did_you_mean
from shoal.base.section import Section
from shoal.spec.schedules import PAIRED

MOST_RANKS = 2**20
"""Upper bound of a product of degrees. A larger one is a mistake, and would take too long to check."""

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# The same ranks, factored for experts within each pipeline stage; see `Layout.expert_shape`.
EXPERT_AXES = ("pp", "edp_replicate", "edp_shard", "ep", "etp")

ScheduleName = Literal[  # the names in `shoal.pipeline.schedules`
    "naive", "gpipe", "looped-bfs", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "interleaved-zb", "zb-v", "v-half",
    "v-min", "zb-auto", "dualpipe", "dualpipev", "terapipe", "pipedream", "pipedream-2bw",
]
FILE = "file:"  # prefix of the path of a schedule file
Recompute = Literal["none", "selective", "full"]
ContextOrder = Literal["zig-zag", "striped", "contiguous"]
Sync = Literal[
    "all-reduce", "powersgd", "topk", "onebit", "int8", "local-sgd", "diloco", "sgp", "wagma", "ps-bsp", "ps-ssp",
    "ps-async", "hogwild",
]
ZeroStage = Literal[0, 1, 2, 3]
Degree = Annotated[int, Field(gt=0, le=MOST_RANKS)]


def _known_schedule(name: str) -> str:
    known = get_args(ScheduleName)
    if name not in known and not (name.startswith(FILE) and name != FILE):
        raise PydanticCustomError("schedule", f"there is no such schedule; {did_you_mean(name, [*known, FILE])}")
    return name


class Layout(Section):
    """Degrees of parallelism and related options of a training step.

    >>> layout = Layout(dp=4, zero=1, tp=2, pp=2)
    >>> layout.world_size, layout.describe()
    (16, 'dp 4 (ZeRO-1) x tp 2 x pp 2 (1f1b)')
    """

    dp: Degree = 1
    """Data-parallel replicas; each processes its own part of the global batch."""

    sync: Sync = "all-reduce"
    """Synchronisation of the replicas: all-reduce is exact; docs/relaxed.md has a table of the other methods, which
    compute something else in less time. Their settings are in the section relaxed."""

    zero: ZeroStage = 0
    """State sharded over the data-parallel ranks (Rajbhandari et al. 2020): 0 nothing (DDP), 1 optimizer states,
    2 also gradients, 3 also parameters (FSDP)."""

    zero_shard: Degree | None = None
    """Ranks over which ZeRO shards; the rest of dp replicates the shards (hybrid sharding). Default: all of dp."""

    tp: Degree = 1
    """Tensor-parallel ranks: matrices are split inside each layer (Shoeybi et al. 2019)."""

    tp_x: Degree = 1
    """Tensor-parallel ranks that split the hidden state between layers and the input of every matrix. Matrices are
    then split in both dimensions, over a grid of tp_x x tp/tp_x ranks (Pope et al. 2022, section 3.2.2). From about 8
    ranks on, this sends less than one dimension."""

    sequence_parallel: bool = False
    """Also split the activations between the tensor-parallel regions along the sequence (Korthikanti et al. 2022)."""

    tp_overlap: bool | Literal["auto"] = "auto"
    """Split the matrix products where a tensor-parallel region is entered and left, to overlap them with the
    collective of the other parts (docs/parallel.md): around the ring with sequence_parallel, else in two blocks of
    tokens. auto does so with sequence_parallel if transfers run in the background (CPU ranks' transfers do not),
    unless layers are compiled or multiply in 8 bits. true uses symmetric memory instead of the ring between GPUs of
    one NVSwitch."""

    cp: Degree = 1
    """Context-parallel ranks: each holds a part of every sequence, and keys and values circulate between them (Liu et
    al. 2023, "Ring Attention")."""

    ulysses: Degree = 1
    """Context-parallel ranks that exchange tokens for heads around attention instead (Jacobs et al. 2023, "DeepSpeed
    Ulysses"); the ring then has cp / ulysses members. 1 uses only the ring, cp only the exchange."""

    cp_order: ContextOrder = "zig-zag"
    """Assignment of tokens to the members of the ring. zig-zag: a chunk from the front and one from the back, which
    balances causal attention. striped: every n-th token (Brandon et al. 2023). contiguous: consecutive tokens."""

    ep: Degree = 1
    """Expert-parallel ranks: each holds some of the experts, and tokens are sent to them (Lepikhin et al. 2020). They
    are taken from the dp x cp x tp ranks of a pipeline stage, adjacent ranks first."""

    ep_overlap: bool | Literal["auto"] = "auto"
    """With dualpipe and dualpipev, compute a forward while the rows of the backward paired with it travel to their
    experts and back, and the other way round. auto does so if transfers run in the background (CPU ranks' transfers do
    not)."""

    etp: Degree | None = None
    """Ranks that split each expert's matrices, as tp does for other layers (default: tp); ep x etp divides dp x cp x
    tp."""

    pp: Degree = 1
    """Pipeline ranks; each holds consecutive layers."""

    virtual_stages: Degree | None = None
    """Stages on each pipeline rank, for schedules in which it can be set (default for these: 2)."""

    schedule: Annotated[ScheduleName | str, AfterValidator(_known_schedule)] = "1f1b"
    """Order of forward and backward passes in the pipeline (see the table in docs/pipeline.md), or file:PATH, a
    schedule in the CSV format of torch.distributed.pipelining."""

    stage_layers: tuple[PositiveInt, ...] | None = None
    """Layers of each pipeline stage, from the model's first stage to its last (default: balanced, with the cost of the
    head included in the last stage)."""

    sequence_slices: PositiveInt | Literal["auto"] | tuple[PositiveInt, ...] = "auto"
    """terapipe: slices of a sequence (Li et al. 2021): their number, or the tokens of each; auto chooses by FLOPs."""

    update_every: PositiveInt | None = None
    """pipedream-2bw: micro-batches between two weight updates, at least pp (default: pp)."""

    micro_batch: PositiveInt = 1
    """Sequences in one forward pass of one replica. Gradient accumulation covers the rest of the global batch."""

    recompute: Recompute = "none"
    """Activations recomputed in backward: none, selective (the attention core), full (complete layers)."""

    bucket_mb: PositiveFloat | Literal["auto"] = 25.0
    """Minimum size in MiB of the buckets in which gradients are reduced over the data-parallel ranks (ZeRO-3: per
    layer). auto measures some sizes before the first step."""

    overlap: bool = True
    """Reduce a bucket while backward computes the next one. Without it, all buckets are reduced after backward (ZeRO-2
    and 3, which lack the memory for that: each one immediately, while backward waits), to measure the benefit of
    overlap."""

    prefetch: NonNegativeInt = 1
    """ZeRO-3: number of layers whose parameters are gathered ahead of use; 0 gathers on demand."""

    reshard_after_forward: bool = True
    """ZeRO-3: free a layer's parameters after its forward and gather them again for its backward. Without it, they
    stay gathered in between: a third less communication, and memory for all parameters of the stage."""

    offload: Literal["none", "optimizer", "parameters"] = "none"
    """State kept in host memory. optimizer: master weights, their gradients and the optimizer states; the update runs
    on the CPU (Ren et al. 2021, "ZeRO-Offload"). parameters: with ZeRO-3 also the parameters, of which the device
    holds only the gathered ones (Rajbhandari et al. 2021, "ZeRO-Infinity")."""

    # ---- sizes -------------------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """Number of ranks: pp x dp x cp x tp."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def dp_shard(self) -> int:
        """Replicas that hold different shards of their state (1 for DDP)."""
        return 1 if self.zero == 0 else (self.zero_shard or self.dp)

    @property
    def dp_replicate(self) -> int:
        """Replicas that hold the same shard."""
        return self.dp // self.dp_shard

    @property
    def tp_y(self) -> int:
        """Tensor-parallel ranks that split the inside of a layer: all of them, or the other dimension of the grid."""
        return self.tp // self.tp_x

    def overlaps_products(self, background: bool) -> bool:
        """Return whether tensor parallelism overlaps its collectives with matrix products (see `tp_overlap`).

        Args:
            background: whether transfers run while a rank computes.
        """
        if self.tp == 1 or self.tp_x > 1:
            return False
        return self.sequence_parallel and background if self.tp_overlap == "auto" else self.tp_overlap

    def overlaps_rows(self, background: bool) -> bool:
        """Return whether paired micro-batches hide each other's exchanges of rows (see `ep_overlap`).

        Args:
            background: whether transfers run while a rank computes.
        """
        if self.ep == 1 or self.schedule not in PAIRED:
            return False
        return background if self.ep_overlap == "auto" else self.ep_overlap

    @property
    def shards(self) -> int:
        """Number of ZeRO shards. Context-parallel ranks hold the same parameters, so they also share the state."""
        return 1 if self.zero == 0 else self.dp_shard * self.cp

    @property
    def cp_ring(self) -> int:
        """Number of ring-attention members."""
        return self.cp // self.ulysses

    @property
    def sequence_shards(self) -> int:
        """Tensor-parallel ranks that split the sequence; 1 without sequence parallelism."""
        return self.tp_y if self.sequence_parallel else 1

    @property
    def expert_tensor(self) -> int:
        """Ranks that split one expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_shape(self) -> tuple[int, ...]:
        """The size of each of `EXPERT_AXES`, outer to inner.

        Ranks with the same experts shard their state as far as ZeRO's groups extend.
        """
        inside = self.ep * self.expert_tensor
        ranks = math.prod(self.shape[1:])
        together = math.prod(self.shape[2:]) if self.zero else 1
        shard = math.gcd(ranks // inside, max(1, together // inside))
        return (self.pp, ranks // inside // shard, shard, self.ep, self.expert_tensor)

    @property
    def bucket_bytes(self) -> float:
        """Minimum bytes of a gradient bucket; 25 MiB for "auto"."""
        return (type(self).model_fields["bucket_mb"].default if self.bucket_mb == "auto" else self.bucket_mb) * 2**20

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each of `AXES`, outer to inner."""
        return (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)

    def microbatches(self, global_batch: int) -> int:
        """Return the micro-batches per replica and step (gradient accumulation steps, or pipeline micro-batches)."""
        return global_batch // (self.dp * self.micro_batch)

    def equation(self) -> str:
        """Return the product of degrees for messages: ``pp 2 x dp 2 x tp 2 = 8 ranks``."""
        cp = f" x cp {self.cp}" if self.cp > 1 else ""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"pp {self.pp} x dp {self.dp}{cp} x tp {self.tp} = {ranks}"

    def describe(self) -> str:
        """Return a one-line summary for banners and tables: the differences from a single device.

        >>> Layout(dp=2, zero=1, tp=2).describe(), Layout(dp=4, ep=2).describe()
        ('dp 2 (ZeRO-1) x tp 2', 'dp 4 (DDP) with ep 2')
        """
        parts = []
        if self.dp > 1:
            shard = f", shard {self.dp_shard}" if self.zero and self.dp_shard != self.dp else ""
            how = f"ZeRO-{self.zero}{shard}" if self.zero else "DDP" if self.sync == "all-reduce" else self.sync
            parts.append(f"dp {self.dp} ({how})")
        if self.cp > 1:
            ring = f"ring {self.cp_ring}, {self.cp_order}" if self.cp_ring > 1 else ""
            how = ", ".join(filter(None, (ring, f"ulysses {self.ulysses}" if self.ulysses > 1 else "")))
            sharded = f", ZeRO-{self.zero}" if self.zero and self.dp == 1 else ""
            parts.append(f"cp {self.cp} ({how}{sharded})")
        if self.tp > 1:
            grid = f" (grid {self.tp_x} x {self.tp_y})" if self.tp_x > 1 else ""
            parts.append(f"tp {self.tp}{grid}" + (" + sequence parallel" if self.sequence_parallel else ""))
        if self.pp > 1:
            stages = f", {self.virtual_stages} stages a rank" if self.virtual_stages else ""
            parts.append(f"pp {self.pp} ({self.schedule}{stages})")
        etp = f" (etp {self.etp})" if self.etp is not None else ""
        experts = f" with ep {self.ep}{etp}" if self.ep > 1 or etp else ""  # no factor: of ranks of the other axes
        return (" x ".join(parts) or "one device") + experts


def mesh_axes(layout: Layout, name: str) -> tuple[str, ...]:
    """Return the mesh axes of a named communication group. Each of `AXES` is a group of its own.

    - "dp": replicas with different samples.
    - "replicas": ranks with different tokens and the same parameters.
    - "shard": ranks with different shards of the same parameters. Context-parallel ranks have the same parameters, so
      ZeRO shards over them too; without ZeRO they replicate.
    - "replicate": ranks with the same shard.
    - "holders": ranks with parts of the same parameters.
    - "edp": ranks with different tokens and the same experts; their shards are "edp_shard".
    - "sequence": ranks with different tokens of the same sequences, where sequence parallelism splits them too.
    - "stage": all ranks of one pipeline stage.
    - "world": all ranks.
    """
    shard = ("dp_shard", "cp") if layout.zero else ()
    merged = {
        "dp": ("dp_replicate", "dp_shard"),
        "replicas": ("dp_replicate", "dp_shard", "cp"),
        "shard": shard,
        "replicate": ("dp_replicate",) if layout.zero else ("dp_replicate", "dp_shard", "cp"),
        "holders": (*shard, "tp"),
        "edp": ("edp_replicate", "edp_shard"),
        "sequence": ("cp", "tp"),
        "stage": AXES[1:],
        "world": AXES,
    }
    return merged.get(name, (name,))
