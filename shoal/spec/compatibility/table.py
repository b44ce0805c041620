"""Table of pairs of features that exclude each other, with the reason and the nearest remedy.

Each row is one decision. `shoal train`, `estimate`, `plan` and `verify` read it through `check_compatibility`; ``shoal
explain compatibility`` prints it as a matrix. Divisibility of sizes is checked in `shoal.spec.layout.sizes`, and the
range of a field in the field itself.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.spec.compatibility import features as f
from shoal.spec.compatibility.features import Feature
from shoal.spec.optimizers import ELEMENTWISE, SOPHIA_PRECISIONS
from shoal.spec.sync_methods import POOLED


class Conflict(NamedTuple):
    """Two features that exclude each other.

    Attributes:
        first, second: the features, in the order in which a message names them.
        reason: the end of a sentence.
        remedy: a sentence without its full stop.
    """

    first: Feature
    second: Feature
    reason: str
    remedy: str


def _each(
    firsts: tuple[Feature, ...], seconds: tuple[Feature, ...], reason: str, remedy: str
) -> tuple[Conflict, ...]:
    return tuple(Conflict(first, second, reason, remedy) for first in firsts for second in seconds)


CONFLICTS = (
    # ---- data parallelism --------------------------------------------------------------------------------------------
    Conflict(f.ZERO_SHARD, f.NO_ZERO, "it shards nothing", "Set parallel.zero to 1, 2 or 3, or leave zero_shard out"),
    *_each((f.PREFETCH, f.KEPT_AFTER_FORWARD), (f.BELOW_ZERO3,), "parameters are not sharded there",
           "Set parallel.zero = 3, or leave the setting out"),
    Conflict(f.OFFLOADED_PARAMETERS, f.BELOW_ZERO3, "all parameters stay on the device there",
             "Set parallel.zero = 3, or parallel.offload = 'optimizer'"),
    Conflict(f.OFFLOAD, f.RELAXED, "it works on weights and gradients on the device", "Leave one of them out"),

    # ---- tensor and context parallelism ------------------------------------------------------------------------------
    Conflict(f.GRID, f.NO_TP, "it makes a grid of the tensor-parallel ranks",
             "Set parallel.tp to a multiple of it, or leave tp_x out"),
    Conflict(f.SEQUENCE_PARALLEL, f.NO_TP, "it splits the sequence over the tensor-parallel ranks",
             "Set parallel.tp to 2 or more, or leave sequence_parallel out"),
    Conflict(f.TP_OVERLAP, f.NO_TP, "it hides the collectives of tensor parallelism",
             "Set parallel.tp to 2 or more, or leave tp_overlap out"),
    Conflict(f.GRID, f.EXPERTS, "their ranks take tokens from one dimension", "Leave tp_x or experts out"),
    Conflict(f.GRID, f.DEPTHS, "its routers score a whole hidden state", "Leave tp_x or depths out"),
    Conflict(f.GRID, f.TP_OVERLAP, "it overlaps the products of one dimension", "Leave tp_x or tp_overlap out"),
    *_each((f.TP_OVERLAP, f.GRID), (f.COMPILE,), "the compiler takes products and collectives as they are, in one "
           "dimension", "Leave one of them out"),
    *_each((f.TP_OVERLAP, f.GRID), (f.FLOAT8,), "it scales the input of a product as a whole",
           "Leave the setting of tensor parallelism out, or use bf16"),
    Conflict(f.CP_ORDER, f.NO_RING, "there is no ring: all of cp is ulysses",
             "Leave cp_order out, or set parallel.cp to a multiple of ulysses"),

    # ---- experts and mixture of depths -------------------------------------------------------------------------------
    *_each((f.EP, f.ETP), (f.NO_EXPERTS,), "the model has no experts", "Leave it out, or set model.experts.count"),
    Conflict(f.TOKEN_PIPELINE, f.EXPERTS, "gates decide for whole sequences, of which it has slices",
             "Choose another schedule"),
    Conflict(f.ASYNC_PIPELINE, f.EXPERTS, "losses and loads of experts are of whole steps, in which it makes several "
             "updates", "Choose another schedule"),
    Conflict(f.RELAXED, f.EXPERTS, "loads of experts are those of the whole batch, and its replicas differ",
             "Leave sync out"),
    Conflict(f.TOKEN_PIPELINE, f.DEPTHS, "routers decide for whole sequences, of which it has slices",
             "Choose another schedule"),
    Conflict(f.ASYNC_PIPELINE, f.DEPTHS, "the loss of routers is of whole steps, in which it makes several updates",
             "Choose another schedule"),
    Conflict(f.RELAXED, f.DEPTHS, "the loss of predictors is a mean over the whole batch, and its replicas differ",
             "Leave sync out"),

    # ---- schedules ---------------------------------------------------------------------------------------------------
    Conflict(f.SLICES, f.NOT_SLICED, "it computes whole sequences",
             "Set parallel.schedule to terapipe, or leave sequence_slices out"),
    Conflict(f.UPDATE_EVERY, f.NOT_2BW, "it has no such choice",
             "Set parallel.schedule to pipedream-2bw, or leave update_every out"),

    # ---- torch.compile -----------------------------------------------------------------------------------------------
    *_each((f.COMPILE,), (f.TOKEN_PIPELINE, f.ASYNC_PIPELINE), "compiled layers know neither slices of a sequence nor "
           "several versions of their weights", "Leave train.compile out, or take 1f1b"),
    Conflict(f.COMPILE, f.CP, "attention exchanges keys and values between ranks, which a compiled layer cannot hold",
             "Leave train.compile out, or take parallel.cp 1"),
    Conflict(f.COMPILE, f.SPLIT, "it makes the gradients of weights apart from those of activations, and a compiled "
             "layer makes both at once",
             "Leave train.compile out, or take a schedule with whole backwards, such as 1f1b or interleaved-1f1b"),
    Conflict(f.COMPILE, f.EXPERTS, "how many rows each expert gets is known only when it runs, and every number would "
             "be compiled again", "Leave compile out"),
    Conflict(f.COMPILE, f.DEPTHS, "which tokens pass through a layer is known only when it runs, and its router adds "
             "to backward as it goes", "Leave compile out"),

    # ---- number formats ----------------------------------------------------------------------------------------------
    Conflict(f.FLOAT8, f.COMPILE, "the compiler does not see products that choose their scales as they go",
             "Leave train.compile out"),
    Conflict(f.FLOAT8, f.TOKEN_PIPELINE, "each slice of a sequence would have scales of its own",
             "Use another schedule"),
    Conflict(f.FLOAT8, f.EXPERTS, "grouped products of experts have no 8-bit form here", "Use bf16"),
    Conflict(f.FLOAT8, f.DEPTHS, "each layer would take its scales from another set of tokens", "Use bf16"),
    Conflict(f.FLOAT8, f.CP, "the parts of a sequence would have scales of their own", "Use tp or dp instead"),
    Conflict(f.DELAYED_SCALES, f.RELAXED, "each replica would have a history of its own", "Use float8.amax 'current'"),
    Conflict(f.LOSS_SCALED, f.ASYNC_PIPELINE, "its stages update by themselves, and no rank knows in time whether "
             "another's gradients overflowed", "Use bf16, which needs no loss scale, or another schedule"),
    Conflict(f.LOSS_SCALED, f.RELAXED, "each replica would find a loss scale of its own, and skip other steps than the "
             "rest", "Use bf16, which needs no loss scale, or parallel.sync all-reduce"),
    Conflict(f.ROUNDED, f.NOT_ROUNDABLE, "an update is made in float32 and rounded, some elements at a time, and this "
             "rule needs more than those", f"Use one of {', '.join(ELEMENTWISE)}, or bf16 or bf16-sums"),
    Conflict(f.WIDENED, f.RELAXED, "what its replicas exchange would be rounded to 8 digits each time", "Use bf16"),

    # ---- optimizers --------------------------------------------------------------------------------------------------
    Conflict(f.SOPHIA, f.RELAXED, "its estimates are of all replicas together",
             "Use parallel.sync all-reduce, or another optimizer"),
    Conflict(f.SOPHIA, f.ASYNC_PIPELINE, "an estimate is of one version of all weights, and each stage would have "
             "several in a step", "Use another schedule, or another optimizer"),
    Conflict(f.SOPHIA_H, f.TOO_NARROW_FOR_H, "differences of gradients would be their rounding",
             f"Use train.precision {' or '.join(SOPHIA_PRECISIONS['sophia-h'])}, or optimizer.name sophia-g"),
    Conflict(f.SOPHIA_G, f.TOO_NARROW_FOR_G, "its squares of gradients would leave the number format's range",
             f"Use train.precision {' or '.join(SOPHIA_PRECISIONS['sophia-g'])}, or optimizer.name adamw"),
    Conflict(f.SOPHIA, f.EXPERTS, "its estimates are of the loss of the tokens alone, and moved weights would choose "
             "other experts", "Use another optimizer"),
    Conflict(f.SOPHIA, f.DEPTHS, "its estimates are of the loss of the tokens alone, and moved weights would choose "
             "other tokens", "Use another optimizer"),
    Conflict(f.CLIPPING, f.SEVERAL_UPDATES, "the norm is of all stages' gradients at once, and here each stage updates "
             "when its own are there", "Set optimizer.clip_norm = 0"),

    # ---- relaxed data parallelism ------------------------------------------------------------------------------------
    Conflict(f.RELAXED, f.ZERO, "each replica keeps all of its own weights and moments", "Use parallel.zero 0"),
    Conflict(f.RELAXED, f.CP, "what it exchanges and saves belongs to ranks that have whole sequences",
             "Use parallel.cp 1"),
    Conflict(f.RELAXED, f.ASYNC_PIPELINE, "its replicas exchange once a step, and each stage would update several "
             "times", "Use another schedule"),
    *_each((f.RELAXED,), (f.MEMORY_CHECKPOINTS, f.REPLICA_CHECKS, f.SPIKES, f.STRAGGLERS, f.REEXECUTION),
           "its replicas hold no common state between two steps", "Leave the setting of failover out"),
    *_each((f.FREE,), (f.TP, f.PP), "the ranks of one replica would read the others' weights at different moments, and "
           "no longer fit each other", "Use tp 1 and pp 1, or local-sgd, diloco or a compressed all-reduce"),
    Conflict(f.FREE, f.CUDA, "its ranks share the memory of one host and compute there", "Use train.device cpu"),
    Conflict(f.FREE, f.BACKEND_TRANSPORT, "its ranks share the memory of one host", "Leave train.transport out"),
    Conflict(f.PARAMETER_SERVER, f.NOT_ELEMENTWISE, "the server's states are numbers of each element",
             f"Use one of {', '.join(ELEMENTWISE)}"),
    Conflict(f.UNEVEN_SAMPLER, f.EXACT, "what all-reduce computes must not depend on the number of replicas",
             "Leave it out, or choose another parallel.sync"),
    Conflict(f.POOLED_SAMPLER, f.NOT_POOLED, "its replicas count the same steps, which a common queue gives to whoever "
             "is free", f"Use the pool with {' or '.join(POOLED)}"),

    # ---- around the step ---------------------------------------------------------------------------------------------
    Conflict(f.ROLLBACKS, f.NO_SPIKES, "no spikes are looked for", "Set the factor, for example to 10"),
    Conflict(f.REEXECUTION_ON_REPLICA, f.ONE_REPLICA, "there is no other replica", "Use 'same'"),
    *_each((f.PROFILE,), (f.RELAXED, f.STRAGGLER_KNOB, f.PACE_KNOB, f.DEATH_KNOB),
           "steps of the plain synchronous run alone are recorded", "Leave one of them out"),
    Conflict(f.HISTOGRAMS, f.COMPILE, "the compiler leaves no tensors between layers to count",
             "Leave one of them out"),
    Conflict(f.HISTOGRAMS, f.RELAXED, "each replica has gradients of its own", "Leave one of them out"),
    Conflict(f.HISTOGRAMS, f.ASYNC_PIPELINE, "a step has several gradients", "Leave one of them out"),
    Conflict(f.SLOW_LINK, f.PP, "only collectives are slowed, and it also sends point to point",
             "Leave link_gbs out, or use parallel.pp = 1"),
    Conflict(f.SLOW_LINK, f.FREE, "only collectives are slowed, and its ranks read and write the same memory",
             "Leave link_gbs out, or use parallel.sync = 'all-reduce', or a compressed one"),
)  # fmt: skip
"""All pairs of features that are rejected."""
