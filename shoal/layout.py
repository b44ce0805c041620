"""How one training step is split over ranks: the `Layout`, its arithmetic and its rules.

A layout is plain data. The runtime executes it, the verifier compares it, and every error about it is raised here,
before any process starts. Axes, outer to inner: ``pp, dp_replicate, dp_shard, cp, tp``; neighbours in rank are
neighbours in ``tp``, the axis that talks most.
"""

from __future__ import annotations

import itertools
import math
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic_core import PydanticCustomError

from shoal.catalog import ModelShape
from shoal.errors import UsageError, did_you_mean, divisors, nearest_divisors

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# The same ranks once more, as experts are spread over those of a pipeline stage: `Layout.expert_shape`.
EXPERT_AXES = ("pp", "edp_replicate", "edp_shard", "ep", "etp")

Schedule = Literal[  # as `shoal.pipeline.schedules` has them
    "naive", "gpipe", "looped-bfs", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "interleaved-zb", "zb-v", "v-half",
    "v-min", "zb-auto", "dualpipe", "dualpipev", "terapipe", "pipedream", "pipedream-2bw",
]
FILE = "file:"  # before the path of a schedule that is read from a file
Recompute = Literal["none", "selective", "full"]
ContextOrder = Literal["zig-zag", "striped", "contiguous"]
Sync = Literal[
    "all-reduce", "powersgd", "topk", "onebit", "int8", "local-sgd", "diloco", "sgp", "wagma", "ps-bsp", "ps-ssp",
    "ps-async", "hogwild",
]
MOST_RANKS = 2**20  # more than any machine has: what is larger is a slip, and would take forever to check
MOST_MICROBATCHES = 2**16  # of a replica: each is some actions of its program
Degree = Annotated[int, Field(gt=0, le=MOST_RANKS)]


def _known_schedule(name: str) -> str:
    known = get_args(Schedule)
    if name not in known and not (name.startswith(FILE) and name != FILE):
        raise PydanticCustomError("schedule", f"there is no such schedule; {did_you_mean(name, [*known, FILE])}")
    return name


class Layout(BaseModel):
    """How many ways each axis of a training step is split."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    dp: Degree = 1
    """Data-parallel replicas: each works on its own part of the global batch."""

    sync: Sync = "all-reduce"
    """What keeps the replicas together: all-reduce is exact; docs/relaxed.md has a table of the others, which compute
    something else in less time. Their numbers are in the section relaxed."""

    zero: Literal[0, 1, 2, 3] = 0
    """What is sharded over the data-parallel ranks (Rajbhandari et al. 2020): 0 nothing (DDP), 1 optimizer states,
    2 also gradients, 3 also parameters (FSDP)."""

    zero_shard: Degree | None = None
    """Ranks over which ZeRO shards; the rest of dp replicates the shards (hybrid sharding). Default: all of dp."""

    tp: Degree = 1
    """Tensor-parallel ranks: matrices are split inside each layer (Shoeybi et al. 2019)."""

    sequence_parallel: bool = False
    """Also split the activations between the tensor-parallel regions along the sequence (Korthikanti et al. 2022)."""

    tp_overlap: bool | Literal["auto"] = "auto"
    """Make the products where a tensor-parallel region is entered and left part by part, while the collective of the
    other parts is on its way (docs/parallel.md): around the ring with sequence_parallel, else in two runs of tokens.
    auto does with sequence_parallel where transfers go on in the background, which those of CPU ranks do not, unless
    layers are compiled or multiply in 8 bits."""

    cp: Degree = 1
    """Context-parallel ranks: each has a part of every sequence, and keys and values go round all of them (Liu et al.
    2023, "Ring Attention")."""

    ulysses: Degree = 1
    """So many of the context-parallel ranks exchange tokens for heads around attention instead (Jacobs et al. 2023,
    "DeepSpeed Ulysses"); the ring then has cp / ulysses places. 1 is a ring alone, cp is the exchange alone."""

    cp_order: ContextOrder = "zig-zag"
    """Which tokens a place of the ring has: zig-zag, a chunk from the front and one from the back, so that causal
    attention is equal work for all; striped, every n-th token (Brandon et al. 2023); contiguous, one run."""

    ep: Degree = 1
    """Expert-parallel ranks: each holds some of the experts, and tokens are sent to them (Lepikhin et al. 2020). They
    are taken from the dp x cp x tp ranks of a pipeline stage, neighbours first."""

    etp: Degree | None = None
    """Ranks that split each expert's matrices, as tp does the others'; ep x etp divides dp x cp x tp. Default: tp."""

    pp: Degree = 1
    """Pipeline ranks: consecutive layers on different ranks."""

    virtual_stages: Degree | None = None
    """Stages on each pipeline rank, for the schedules that leave it open (default there: 2)."""

    schedule: Annotated[Schedule | str, AfterValidator(_known_schedule)] = "1f1b"
    """The order of forwards and backwards in the pipeline (docs/pipeline.md has a table), or file:PATH, a schedule in
    the CSV format of torch.distributed.pipelining."""

    stage_layers: tuple[PositiveInt, ...] | None = None
    """Layers of each pipeline stage, from the model's first stage to its last (default: as even as can be, with the
    head's work counted as the last stage's)."""

    sequence_slices: PositiveInt | Literal["auto"] | tuple[PositiveInt, ...] = "auto"
    """terapipe: the slices that a sequence is cut into (Li et al. 2021): how many, or the tokens of each; auto chooses
    by FLOPs."""

    update_every: PositiveInt | None = None
    """pipedream-2bw: micro-batches between two updates of the weights, at least pp (default: pp)."""

    micro_batch: PositiveInt = 1
    """Sequences in one forward pass of one replica. The rest of the global batch is accumulated."""

    recompute: Recompute = "none"
    """Activations recomputed in backward: none, selective (the attention core), full (whole layers)."""

    bucket_mb: PositiveFloat | Literal["auto"] = 25.0
    """Gradients are reduced over the data-parallel ranks in buckets of at least this many MiB (ZeRO-3: per layer); auto
    measures some sizes before the first step."""

    overlap: bool = True
    """Reduce a bucket while backward makes the next. Without it all are reduced after backward (ZeRO-2 and 3, which
    have no room for that: each at once, while backward waits), to see what the overlap gains."""

    prefetch: NonNegativeInt = 1
    """ZeRO-3: layers whose parameters are gathered ahead of their use; 0 gathers on demand."""

    reshard_after_forward: bool = True
    """ZeRO-3: free a layer's parameters after its forward and gather them again for its backward. Without it they stay
    whole in between: a third less communication, for the memory of all of the stage's parameters."""

    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What lives in host memory. optimizer: the weights that are updated, their gradients and the optimizer's states,
    and the update runs on the CPU (Ren et al. 2021, "ZeRO-Offload"). parameters: with ZeRO-3 also the parameters, of
    which the device has only what is gathered (Rajbhandari et al. 2021, "ZeRO-Infinity")."""

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

    def overlaps_products(self, background: bool) -> bool:
        """Whether tensor parallelism's collectives and products are made part by part (see `tp_overlap`).

        Args:
            background: whether transfers go on while a rank computes.
        """
        return self.tp > 1 and (self.sequence_parallel and background if self.tp_overlap == "auto" else self.tp_overlap)

    @property
    def shards(self) -> int:
        """Parts that ZeRO cuts the state into: context-parallel ranks, which all have the same, share it too."""
        return 1 if self.zero == 0 else self.dp_shard * self.cp

    @property
    def ring(self) -> int:
        """Places of the ring that keys and values go round."""
        return self.cp // self.ulysses

    @property
    def token_multiple(self) -> int:
        """What the tokens of a rank are a multiple of: tp, where it splits them again."""
        return self.tp if self.sequence_parallel else 1

    @property
    def expert_tensor(self) -> int:
        """Ranks that split one expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_shape(self) -> tuple[int, ...]:
        """The size of each of `EXPERT_AXES`, outer to inner.

        Ranks that hold the same experts shard their state as far as ZeRO's groups reach.
        """
        inside = self.ep * self.expert_tensor
        ranks = math.prod(self.shape[1:])
        together = math.prod(self.shape[2:]) if self.zero else 1
        shard = math.gcd(ranks // inside, max(1, together // inside))
        return (self.pp, ranks // inside // shard, shard, self.ep, self.expert_tensor)

    @property
    def bucket_bytes(self) -> float:
        """The least bytes of a bucket of gradients; 25 MiB where that is yet to be measured."""
        return (type(self).model_fields["bucket_mb"].default if self.bucket_mb == "auto" else self.bucket_mb) * 2**20

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each of `AXES`, outer to inner."""
        return (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)

    def microbatches(self, global_batch: int) -> int:
        """Micro-batches that each replica runs in one step (gradient accumulation steps, or pipeline micro-batches)."""
        return global_batch // (self.dp * self.micro_batch)

    def equation(self) -> str:
        """The whole product, for messages: ``pp 2 x dp 2 x tp 2 = 8 ranks``."""
        cp = f" x cp {self.cp}" if self.cp > 1 else ""
        return f"pp {self.pp} x dp {self.dp}{cp} x tp {self.tp} = {self.world_size} ranks"

    def describe(self) -> str:
        """One line for banners and tables: only what differs from a plain single device.

        >>> Layout(dp=2, zero=1, tp=2).describe()
        'dp 2 (ZeRO-1) x tp 2'
        """
        parts = []
        if self.dp > 1:
            shard = f", shard {self.dp_shard}" if self.zero and self.dp_shard != self.dp else ""
            how = f"ZeRO-{self.zero}{shard}" if self.zero else "DDP" if self.sync == "all-reduce" else self.sync
            parts.append(f"dp {self.dp} ({how})")
        if self.cp > 1:
            ring = f"ring {self.ring}, {self.cp_order}" if self.ring > 1 else ""
            how = ", ".join(filter(None, (ring, f"ulysses {self.ulysses}" if self.ulysses > 1 else "")))
            sharded = f", ZeRO-{self.zero}" if self.zero and self.dp == 1 else ""
            parts.append(f"cp {self.cp} ({how}{sharded})")
        if self.tp > 1:
            parts.append(f"tp {self.tp}" + (" + sequence parallel" if self.sequence_parallel else ""))
        if self.ep > 1 or self.etp is not None:
            parts.append(f"ep {self.ep}" + (f" (etp {self.etp})" if self.etp is not None else ""))
        if self.pp > 1:
            stages = f", {self.virtual_stages} stages a rank" if self.virtual_stages else ""
            parts.append(f"pp {self.pp} ({self.schedule}{stages})")
        return " x ".join(parts) or "one device"

    # ---- rules -------------------------------------------------------------------------------------------------

    def check(
        self, shape: ModelShape, *, global_batch: int, sequence_length: int, ranks: int | None = None
    ) -> Layout:
        """Return the layout if it can run this model and batch, else raise.

        Args:
            shape: the model that is split.
            global_batch: sequences per optimizer step over all replicas.
            sequence_length: tokens per sequence.
            ranks: the number of processes there are, where that is already decided (torchrun, SLURM, ``--ranks``).

        Raises:
            UsageError: naming the field, its value, the equation that fails and the nearest values that work.
        """
        if shape.latent is not None:
            raise UsageError(
                "model: multi-head latent attention is counted, but neither trained nor estimated."
                "\n  Choose another model."
            )
        if self.world_size > MOST_RANKS:
            raise UsageError(f"parallel: {self.equation()}, but there can be at most {MOST_RANKS:,}.")
        self._check_data_parallel(global_batch)
        self._check_tensor_parallel(shape, sequence_length)
        self._check_context_parallel(shape, sequence_length)
        self._check_experts(shape)
        self._check_depths(shape, sequence_length)
        if self.pp > shape.layers:
            raise UsageError(
                f"parallel.pp = {self.pp}: {shape.layers} layers cannot fill {self.pp} stages, each needs at least one."
                f"\n  Use pp <= {shape.layers}."
            )
        if ranks is not None and ranks != self.world_size:
            fits = self._fitting(ranks, shape, global_batch=global_batch, sequence_length=sequence_length)
            what_fits = f"Fits {ranks}: {', or '.join(fits)}. Or start" if fits else f"Nothing fits {ranks}. Start"
            raise UsageError(
                f"parallel: {self.equation()}, but {ranks} were given.\n  {what_fits} {self.world_size} ranks."
            )
        return self

    def _check_data_parallel(self, global_batch: int) -> None:
        if self.zero_shard is not None:
            if self.zero == 0:
                raise UsageError(
                    f"parallel.zero_shard = {self.zero_shard}, but parallel.zero = 0 shards nothing."
                    "\n  Set parallel.zero to 1, 2 or 3, or leave zero_shard out."
                )
            if self.dp % self.zero_shard:
                near = " or ".join(map(str, nearest_divisors(self.zero_shard, of=self.dp)))
                raise UsageError(
                    f"parallel.zero_shard = {self.zero_shard} does not divide dp {self.dp}: "
                    f"dp = dp_replicate x zero_shard.\n  Nearest that do: {near}."
                )
        if self.offload != "none" and self.sync != "all-reduce":
            raise UsageError(
                f"parallel.offload = {self.offload} with parallel.sync = {self.sync}, which works on weights and "
                "gradients on the device.\n  Leave one of them out."
            )
        if self.offload == "parameters" and self.zero < 3:
            raise UsageError(
                f"parallel.offload = parameters, but parallel.zero = {self.zero} keeps parameters whole on the device."
                "\n  Set parallel.zero = 3, or parallel.offload = optimizer."
            )
        if self.zero < 3:
            for field, value in (("prefetch", self.prefetch), ("reshard_after_forward", self.reshard_after_forward)):
                if value != type(self).model_fields[field].default:
                    raise UsageError(
                        f"parallel.{field} = {str(value).lower()}, but parallel.zero = {self.zero} keeps parameters "
                        f"whole.\n  Set parallel.zero = 3, or leave {field} out."
                    )
        per_pass = self.dp * self.micro_batch
        if global_batch % per_pass:
            raise UsageError(
                f"train.global_batch = {global_batch} is not a multiple of dp {self.dp} x micro_batch "
                f"{self.micro_batch} = {per_pass}: global_batch = dp x micro_batch x microbatches."
                f"\n  Nearest global_batch that fits: {_nearest_multiples(global_batch, per_pass)}."
            )
        if (microbatches := self.microbatches(global_batch)) > MOST_MICROBATCHES:
            raise UsageError(
                f"train.global_batch = {global_batch} is dp {self.dp} x micro_batch {self.micro_batch} x "
                f"{microbatches:,} micro-batches, but a step can have at most {MOST_MICROBATCHES:,}."
                "\n  Use a larger micro_batch or dp."
            )

    def _check_tensor_parallel(self, shape: ModelShape, sequence_length: int) -> None:
        if self.tp == 1:
            if self.sequence_parallel:
                raise UsageError(
                    "parallel.sequence_parallel = true needs parallel.tp > 1: it splits the sequence over the "
                    "tensor-parallel ranks.\n  Set parallel.tp to 2 or more, or leave sequence_parallel out."
                )
            if self.tp_overlap is True:
                raise UsageError(
                    "parallel.tp_overlap = true needs parallel.tp > 1: it hides tensor parallelism's collectives."
                    "\n  Set parallel.tp to 2 or more, or leave tp_overlap out."
                )
            return
        for what, size in _split_sizes(shape).items():
            if size % self.tp:
                raise UsageError(
                    f"parallel.tp = {self.tp} does not divide model.{what} = {size}: each rank takes {what} / tp of "
                    f"them.\n  Nearest tp that fits the model: {self._nearest_tp(shape)}."
                )
        if shape.kv_heads % self.tp and self.tp % shape.kv_heads:
            raise UsageError(
                f"parallel.tp = {self.tp} fits model.kv_heads = {shape.kv_heads} neither way: tp must divide kv_heads "
                f"(each rank takes some) or be a multiple of it (each head is replicated)."
                f"\n  Nearest tp that fits the model: {self._nearest_tp(shape)}."
            )
        if self.sequence_parallel and sequence_length % self.tp:
            near = max(sequence_length, 2 * self.cp * self.tp if self.cp > 1 else 0)
            raise UsageError(
                f"data.sequence_length = {sequence_length} is not a multiple of tp {self.tp}, as sequence parallelism "
                f"needs: each rank takes sequence_length / tp tokens."
                f"\n  Nearest lengths that are: {_nearest_multiples(near, self.tp)}."
            )

    def _check_context_parallel(self, shape: ModelShape, sequence_length: int) -> None:
        heads, kv = shape.heads // self.tp, max(1, shape.kv_heads // self.tp)
        fits = [n for n in divisors(self.cp) if heads % n == 0 and (kv % n == 0 or n % kv == 0)]
        if self.ulysses not in fits:
            if self.cp % self.ulysses:
                why = f"does not divide cp {self.cp}: cp = ring x ulysses."
            else:
                of_tp = f" of a tensor-parallel rank (tp {self.tp})" if self.tp > 1 else ""
                why = (
                    f"does not fit the {heads} heads and {kv} key/value heads{of_tp}: it must divide the heads, and "
                    "divide the key/value heads or be a multiple of them."
                )
            raise UsageError(
                f"parallel.ulysses = {self.ulysses} {why}\n  Fits cp {self.cp}: {', '.join(map(str, fits))}."
            )
        if self.cp_order != "zig-zag" and self.ring == 1:
            raise UsageError(
                f"parallel.cp_order = {self.cp_order}, but there is no ring: cp {self.cp} = ring 1 x ulysses "
                f"{self.ulysses}.\n  Leave cp_order out, or set parallel.cp to a multiple of ulysses."
            )
        least = 2 * self.cp * self.token_multiple
        if self.cp > 1 and sequence_length < least:
            each = " x tp" if self.sequence_parallel else ""
            raise UsageError(
                f"data.sequence_length = {sequence_length} is too short for cp {self.cp}: it needs 2 x cp{each} = "
                f"{least} tokens.\n  Use a longer sequence, or parallel.cp <= "
                f"{max(1, sequence_length // (2 * self.token_multiple))}."
            )

    def _check_experts(self, shape: ModelShape) -> None:
        experts = shape.experts
        if experts is None:
            if self.ep > 1 or self.etp is not None:
                name, value = ("ep", self.ep) if self.ep > 1 else ("etp", self.etp)
                raise UsageError(
                    f"parallel.{name} = {value}, but the model has no experts.\n  Leave it out, or set "
                    "model.experts.count."
                )
            return
        ranks, inside = math.prod(self.shape[1:]), self.ep * self.expert_tensor
        if ranks % inside:
            near = " or ".join(map(str, nearest_divisors(self.ep, of=max(1, ranks // self.expert_tensor))))
            raise UsageError(
                f"parallel: ep {self.ep} x etp {self.expert_tensor} = {inside} does not divide dp {self.dp} x cp "
                f"{self.cp} x tp {self.tp} = {ranks}, the ranks of a pipeline stage, over which experts are spread."
                f"\n  Nearest ep that fits: {near}."
            )
        for name, degree, what, size in (
            ("ep", self.ep, "count", experts.count), ("etp", self.expert_tensor, "ffn", experts.ffn)
        ):
            if size % degree:
                near = " or ".join(map(str, nearest_divisors(degree, of=size)))
                raise UsageError(
                    f"parallel.{name} = {degree} does not divide model.experts.{what} = {size}: each rank takes as "
                    f"much.\n  Nearest {name} that fits: {near}."
                )
        if self.schedule in ("terapipe", "pipedream", "pipedream-2bw"):
            raise UsageError(
                f"parallel.schedule = {self.schedule} with experts: " + (
                    "gates decide for whole sequences, of which it has slices." if self.schedule == "terapipe"
                    else "their losses and loads are of whole steps, in which it makes several updates."
                ) + "\n  Choose another schedule."
            )
        if self.sync != "all-reduce":
            raise UsageError(
                f"parallel.sync = {self.sync} with experts: their loads are those of the whole batch, and its "
                "replicas go their own ways.\n  Leave sync out."
            )

    def _check_depths(self, shape: ModelShape, sequence_length: int) -> None:
        if shape.depths is None:
            return
        taken, field = shape.depths.taken(sequence_length), f"model.depths.capacity = {shape.depths.capacity}"
        if taken % self.token_multiple:
            raise UsageError(
                f"{field} takes {taken} of {sequence_length} tokens, which is not a multiple of tp {self.tp}, as "
                "sequence parallelism needs: each rank computes taken / tp of them.\n  Nearest that are: "
                f"{_nearest_multiples(taken, self.tp)}; set model.depths.capacity to one of them / {sequence_length}."
            )
        least = 2 * self.cp * self.token_multiple
        if self.cp > 1 and taken < least:
            raise UsageError(
                f"{field} takes {taken} of {sequence_length} tokens, too few for cp {self.cp}: it needs {least}, two "
                "chunks for each rank.\n  Use a larger capacity, or a smaller parallel.cp."
            )
        if self.schedule in ("terapipe", "pipedream", "pipedream-2bw"):
            raise UsageError(
                f"parallel.schedule = {self.schedule} with model.depths: " + (
                    "routers decide for whole sequences, of which it has slices." if self.schedule == "terapipe"
                    else "their loss is of whole steps, in which it makes several updates."
                ) + "\n  Choose another schedule."
            )
        if self.sync != "all-reduce":
            raise UsageError(
                f"parallel.sync = {self.sync} with model.depths: the loss of their predictors is a mean over the whole "
                "batch, and its replicas go their own ways.\n  Leave sync out."
            )

    def _nearest_tp(self, shape: ModelShape) -> str:
        fits = [
            tp
            for tp in divisors(shape.heads)
            if not any(size % tp for size in _split_sizes(shape).values())
            and (shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0)
        ]
        return " or ".join(map(str, sorted(fits, key=lambda tp: abs(tp - self.tp))[:2]))

    def _fitting(self, ranks: int, shape: ModelShape, **sizes: int) -> list[str]:
        """Degrees that make this many ranks and break no rule, nearest first: all that change one, else two others."""
        found = []
        contexts = divisors(ranks) if self.cp > 1 else (1,)
        for pp, tp, cp in itertools.product(divisors(ranks), divisors(ranks), contexts):
            if ranks % (pp * tp * cp):
                continue
            degrees = {"pp": pp, "dp": ranks // (pp * tp * cp), "cp": cp, "tp": tp}
            try:
                self.model_copy(update=degrees).check(shape, **sizes)
            except UsageError:
                continue
            changed = {name: degree for name, degree in degrees.items() if degree != getattr(self, name)}
            distance = sum(abs(math.log2(degree / getattr(self, name))) for name, degree in changed.items())
            text = " with ".join(f"{name} {degree}" for name, degree in changed.items())
            found.append((len(changed), distance, text))
        single = [text for changes, _, text in sorted(found) if changes == 1]
        return single or [text for _, _, text in sorted(found)[:2]]


def axes_of(layout: Layout, name: str) -> tuple[str, ...]:
    """The axes that communicate as one under a name; one of `AXES` is its own.

    - "dp": other samples.
    - "replicas": other tokens, for the same parameters.
    - "shard": the shards of the same parameters. Context-parallel ranks have the same parameters, so ZeRO shards over
      them too; without it they replicate.
    - "replicate": the same shard.
    - "holders": all parts of the same parameters.
    - "edp": other tokens, for the same experts; their shards are "edp_shard".
    - "sequence": other tokens of the same sequences, where sequence parallelism splits them too.
    - "stage": all of one pipeline stage.
    - "world": everybody.
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


def _split_sizes(shape: ModelShape) -> dict[str, int]:
    """What tensor parallelism splits evenly, by its name in the config."""
    sizes = {"heads": shape.heads}
    if not all(shape.sparse(layer) for layer in range(shape.layers)):
        sizes["ffn"] = shape.ffn
    if shape.experts is not None and shape.experts.shared:
        sizes["experts.shared x ffn"] = shape.experts.shared * shape.experts.ffn
    return sizes


def _nearest_multiples(value: int, of: int) -> str:
    below = value // of * of
    return f"{below} or {below + of}" if below else f"{of}"
