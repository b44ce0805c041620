"""Table of pairs of features that exclude each other, with the reason and the nearest remedy.

Each row is one decision. `shoal train`, `estimate`, `plan` and `verify` read it through `check_compatibility`; ``shoal
explain compatibility`` prints it as a matrix. `shoal.spec.compatibility.sizes` checks the divisibility of sizes, and a
field its own range.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.base.errors import UsageError
from shoal.spec.compatibility import features as f
from shoal.spec.compatibility.features import CheckedRun, Feature
from shoal.spec.optimizers import ELEMENTWISE, SOPHIA_PRECISIONS
from shoal.spec.sync_methods import POOLED


class Conflict(NamedTuple):
    """Two features that exclude each other."""

    # first, second: the features, in the order in which a message names them
    first: Feature
    second: Feature
    reason: str  # the end of a sentence
    remedy: str  # a sentence without its full stop


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
    Conflict(f.GRID, f.EXPERTS, "their ranks take tokens along one dimension", "Leave tp_x or experts out"),
    Conflict(f.GRID, f.DEPTHS, "its routers score complete hidden states", "Leave tp_x or depths out"),
    Conflict(f.GRID, f.QK_NORM, "its ranks share the heads of a norm along one dimension", "Leave tp_x or qk_norm out"),
    Conflict(f.GRID, f.SINKS, "its ranks share the heads of sinks along one dimension", "Leave tp_x or sinks out"),
    Conflict(f.GRID, f.LATENT, "the norms of its latents need complete ones", "Leave tp_x or latent out"),
    Conflict(f.GRID, f.TP_OVERLAP, "it overlaps the products of one dimension", "Leave tp_x or tp_overlap out"),
    *_each((f.TP_OVERLAP, f.GRID), (f.COMPILE,), "the compiler takes products and collectives as they are, in one "
           "dimension", "Leave one of them out"),
    *_each((f.TP_OVERLAP, f.GRID), (f.FLOAT8,), "it uses one scale for the full input of a product",
           "Leave the setting of tensor parallelism out, or use bf16"),
    Conflict(f.CP_ORDER, f.NO_RING, "there is no ring: all of cp is ulysses",
             "Leave cp_order out, or set parallel.cp to a multiple of ulysses"),

    # ---- experts and mixture of depths -------------------------------------------------------------------------------
    *_each((f.EP, f.ETP), (f.NO_EXPERTS,), "the model has no experts", "Leave it out, or set model.experts.count"),
    Conflict(f.EP_OVERLAP, f.NO_EP, "it hides the exchange of tokens with other ranks' experts",
             "Set parallel.ep to 2 or more, or leave ep_overlap out"),
    Conflict(f.EP_OVERLAP, f.NOT_PAIRED, "it needs forwards paired with backwards of other micro-batches",
             "Set parallel.schedule to dualpipe or dualpipev, or leave ep_overlap out"),
    Conflict(f.TOKEN_PIPELINE, f.EXPERTS, "gates need complete sequences, and it processes slices",
             "Choose another schedule"),
    Conflict(f.ASYNC_PIPELINE, f.EXPERTS, "losses and loads of experts are per step, and it updates several times per "
             "step", "Choose another schedule"),
    Conflict(f.RELAXED, f.EXPERTS, "loads of experts are counted over the global batch, and its replicas differ",
             "Leave sync out"),
    Conflict(f.TOKEN_PIPELINE, f.DEPTHS, "routers need complete sequences, and it processes slices",
             "Choose another schedule"),
    Conflict(f.ASYNC_PIPELINE, f.DEPTHS, "the loss of routers is per step, and it updates several times per step",
             "Choose another schedule"),
    Conflict(f.WINDOW, f.DEPTHS, "a window counts all tokens, and its layers attend to the chosen ones alone",
             "Leave window or depths out"),
    Conflict(f.RELAXED, f.DEPTHS, "the loss of predictors is a mean over the global batch, and its replicas differ",
             "Leave sync out"),

    *_each((f.MTP,), (f.TOKEN_PIPELINE, f.ASYNC_PIPELINE, f.DEPTHS), "its modules look at later tokens, in the last "
           "stage and at its version of the embedding", "Leave one of them out"),
    Conflict(f.MTP, f.GRID, "its modules need complete hidden states", "Leave mtp_depth or tp_x out"),
    Conflict(f.MTP, f.FLOAT8, "products of 8 bits are in the model's layers alone", "Leave mtp_depth out, or use bf16"),
    Conflict(f.MTP, f.SOPHIA, "curvature is estimated of one loss", "Leave mtp_depth out, or choose adamw"),

    # ---- schedules ---------------------------------------------------------------------------------------------------
    Conflict(f.SLICES, f.NOT_SLICED, "it computes full sequences",
             "Set parallel.schedule to terapipe, or leave sequence_slices out"),
    Conflict(f.UPDATE_EVERY, f.NOT_2BW, "it does not read the setting",
             "Set parallel.schedule to pipedream-2bw, or leave update_every out"),

    # ---- torch.compile -----------------------------------------------------------------------------------------------
    *_each((f.COMPILE,), (f.TOKEN_PIPELINE, f.ASYNC_PIPELINE), "compiled layers support neither sequence slices nor "
           "several weight versions", "Leave train.compile out, or take 1f1b"),
    Conflict(f.COMPILE, f.CP, "attention exchanges keys and values between ranks, which a compiled layer cannot hold",
             "Leave train.compile out, or take parallel.cp 1"),
    Conflict(f.COMPILE, f.SPLIT, "it computes the gradients of weights and of activations separately, and a compiled "
             "layer computes both together",
             "Leave train.compile out, or use a schedule with unsplit backwards, such as 1f1b or interleaved-1f1b"),
    Conflict(f.COMPILE, f.DEPTHS, "the tokens of a layer are chosen at run time, and its router adds to backward",
             "Leave compile out"),

    Conflict(f.CUDA_GRAPHS, f.NO_COMPILE, "graphs are recorded of compiled layers", "Set train.compile to true"),
    Conflict(f.CUDA_GRAPHS, f.CPU, "the CPU has no graphs of kernels", "Leave train.cuda_graphs out"),
    Conflict(f.CUDA_GRAPHS, f.ZERO3, "a graph needs weights that stay at one address, and it frees and gathers them",
             "Use parallel.zero 2, or leave train.cuda_graphs out"),
    Conflict(f.CUDA_GRAPHS, f.FLOAT8, "weights are encoded once a step, outside of the graphs",
             "Leave train.cuda_graphs out"),
    Conflict(f.CUDA_GRAPHS, f.EXPERTS, "the number of rows of each expert varies", "Leave train.cuda_graphs out"),
    Conflict(f.CUDA_GRAPHS, f.TP, "layers contain collectives, which are not recorded", "Leave train.cuda_graphs out"),

    # ---- number formats ----------------------------------------------------------------------------------------------
    Conflict(f.FLOAT8, f.TOKEN_PIPELINE, "each slice of a sequence would have its own scales",
             "Use another schedule"),
    Conflict(f.FLOAT8, f.EXPERTS, "grouped products of experts have no 8-bit implementation", "Use bf16"),
    Conflict(f.FLOAT8, f.DEPTHS, "each layer would compute its scales from other tokens", "Use bf16"),
    Conflict(f.FLOAT8, f.CP, "the parts of a sequence would have their own scales", "Use tp or dp instead"),
    Conflict(f.NVFP4, f.COMPILE, "a compiled backward does not know the position of the micro-batch, from which the "
             "rounding of gradients is drawn", "Leave train.compile out, or use mxfp8"),
    Conflict(f.DELAYED_SCALES, f.RELAXED, "each replica would have its own history", "Use float8.amax 'current'"),
    Conflict(f.LOSS_SCALED, f.ASYNC_PIPELINE, "its stages update independently, before a rank knows whether "
             "another rank's gradients overflowed", "Use bf16, which needs no loss scale, or another schedule"),
    Conflict(f.LOSS_SCALED, f.RELAXED, "each replica would have its own loss scale, and skip other steps than the "
             "others", "Use bf16, which needs no loss scale, or parallel.sync all-reduce"),
    Conflict(f.ROUNDED, f.NOT_ROUNDABLE, "updates are computed in float32 and rounded for some elements at a time, and "
             "this rule needs complete tensors", f"Use one of {', '.join(ELEMENTWISE)}, or bf16 or bf16-sums"),
    Conflict(f.WIDENED, f.RELAXED, "each exchange between its replicas would round to 8 bits", "Use bf16"),

    # ---- optimizers --------------------------------------------------------------------------------------------------
    Conflict(f.SOPHIA, f.RELAXED, "its estimates use all replicas",
             "Use parallel.sync all-reduce, or another optimizer"),
    Conflict(f.SOPHIA, f.ASYNC_PIPELINE, "an estimate needs one version of all weights, and each stage would have "
             "several per step", "Use another schedule, or another optimizer"),
    Conflict(f.SOPHIA_H, f.TOO_NARROW_FOR_H, "rounding would dominate its differences of gradients",
             f"Use train.precision {' or '.join(SOPHIA_PRECISIONS['sophia-h'])}, or optimizer.name sophia-g"),
    Conflict(f.SOPHIA_G, f.TOO_NARROW_FOR_G, "its squares of gradients would leave the number format's range",
             f"Use train.precision {' or '.join(SOPHIA_PRECISIONS['sophia-g'])}, or optimizer.name adamw"),
    Conflict(f.SOPHIA, f.EXPERTS, "its estimates use only the loss of the tokens, and perturbed weights would choose "
             "other experts", "Use another optimizer"),
    Conflict(f.SOPHIA, f.DEPTHS, "its estimates use only the loss of the tokens, and perturbed weights would choose "
             "other tokens", "Use another optimizer"),
    Conflict(f.CLIPPING, f.SEVERAL_UPDATES, "the norm needs the gradients of all stages, and here each stage updates "
             "independently", "Set optimizer.clip_norm = 0"),

    # ---- relaxed data parallelism ------------------------------------------------------------------------------------
    Conflict(f.WEIGHTS, f.RELAXED, "its replicas copy their weights before a folder is read",
             "Start with the default sync, and resume with another"),
    Conflict(f.RELAXED, f.ZERO, "each replica keeps all of its own weights and moments", "Use parallel.zero 0"),
    Conflict(f.RELAXED, f.CP, "its exchanges and checkpoints need ranks with full sequences",
             "Use parallel.cp 1"),
    Conflict(f.RELAXED, f.ASYNC_PIPELINE, "its replicas exchange once per step, and each stage would update several "
             "times", "Use another schedule"),
    *_each((f.RELAXED,), (f.MEMORY_CHECKPOINTS, f.REPLICA_CHECKS, f.SPIKES, f.STRAGGLERS, f.REEXECUTION),
           "its replicas share no common state between two steps", "Leave the setting of failover out"),
    *_each((f.FREE,), (f.TP, f.PP), "the ranks of one replica would read the others' weights at different times and "
           "become inconsistent", "Use tp 1 and pp 1, or local-sgd, diloco or a compressed all-reduce"),
    Conflict(f.FREE, f.CUDA, "its ranks share the memory of one host and compute there", "Use train.device cpu"),
    Conflict(f.FREE, f.BACKEND_TRANSPORT, "its ranks share the memory of one host", "Leave train.transport out"),
    Conflict(f.PARAMETER_SERVER, f.NOT_ELEMENTWISE, "the server's states are per element",
             f"Use one of {', '.join(ELEMENTWISE)}"),
    Conflict(f.UNEVEN_SAMPLER, f.EXACT, "the result of all-reduce must not depend on the number of replicas",
             "Leave it out, or choose another parallel.sync"),
    Conflict(f.POOLED_SAMPLER, f.NOT_POOLED, "its replicas run equally many steps, and a common queue serves the "
             "fastest replica most", f"Use the pool with {' or '.join(POOLED)}"),

    # ---- around the step ---------------------------------------------------------------------------------------------
    Conflict(f.ROLLBACKS, f.NO_SPIKES, "spike detection is off", "Set the factor, for example to 10"),
    Conflict(f.SHRINKING, f.ONE_REPLICA, "no replica is left after a loss", "Leave shrink out, or use parallel.dp 2"),
    Conflict(f.SHRINKING, f.NO_MEMORY_CHECKPOINTS, "replicas that join take the state from memory",
             "Set failover.memory_every, for example to 10"),
    *_each((f.SHRINKING,), (f.NO_RESTARTS, f.NO_RECOVERY_TIME), "no process survives a loss",
           "Leave one of them out"),
    Conflict(f.REEXECUTION_ON_REPLICA, f.ONE_REPLICA, "there is no other replica", "Use 'same'"),
    *_each((f.PROFILE,), (f.RELAXED, f.STRAGGLER_KNOB, f.PACE_KNOB, f.DEATH_KNOB),
           "only steps of a plain synchronous run are recorded", "Leave one of them out"),
    Conflict(f.HISTOGRAMS, f.COMPILE, "compiled layers do not expose the tensors to count",
             "Leave one of them out"),
    Conflict(f.HISTOGRAMS, f.RELAXED, "each replica has its own gradients", "Leave one of them out"),
    Conflict(f.HISTOGRAMS, f.ASYNC_PIPELINE, "a step has several gradients", "Leave one of them out"),
    Conflict(f.SLOW_LINK, f.PP, "only collectives are slowed, and pipelines send point to point",
             "Leave link_gbs out, or use parallel.pp = 1"),
    Conflict(f.SLOW_LINK, f.FREE, "only collectives are slowed, and its ranks use shared memory",
             "Leave link_gbs out, or use parallel.sync = 'all-reduce', or a compressed one"),
)  # fmt: skip
"""All pairs of features that are rejected."""


def find_conflict(run: CheckedRun) -> Conflict | None:
    """Return the first row of the table that a run violates, or None."""
    return next((conflict for conflict in CONFLICTS if conflict.first.used(run) and conflict.second.used(run)), None)


def check_compatibility(run: CheckedRun) -> None:
    """Reject a run with two features that exclude each other.

    Raises:
        UsageError: naming both settings, the reason and a remedy.
    """
    if conflict := find_conflict(run):
        settings = f"{conflict.first.setting(run)} with {conflict.second.setting(run)}"
        raise UsageError(f"{settings}: {conflict.reason}.\n  {conflict.remedy}.")


def is_excluded(feature: Feature, run: CheckedRun) -> bool:
    """Return whether the other features of a run exclude a feature, for code that draws or proposes runs."""
    return any(
        (conflict.first is feature and conflict.second.used(run))
        or (conflict.second is feature and conflict.first.used(run))
        for conflict in CONFLICTS
    )
