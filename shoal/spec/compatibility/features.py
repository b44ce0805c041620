"""Features of a run that may exclude each other, each with the setting that turns it on.

A feature is a config field and a predicate over the run. `shoal.spec.compatibility.table` lists the pairs that exclude
each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from shoal.spec.catalog import ModelShape
from shoal.spec.config import OptimizerConfig, RunConfig
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS, FP32, Formats
from shoal.spec.optimizers import ELEMENTWISE, SOPHIA_PRECISIONS
from shoal.spec.schedules import ASYNCHRONOUS, PAIRED, SLICED, SPLIT_BACKWARD
from shoal.spec.sync_methods import POOLED, SERVED, UNSYNCHRONISED

BARE = RunConfig(optimizer=OptimizerConfig(clip_norm=0))
"""Config of a run without any feature: default of the sections that a caller does not have."""


class CheckedRun(NamedTuple):
    """The input of feature predicates."""

    config: RunConfig
    shape: ModelShape  # the model
    # whether the pipeline program splits backward into two halves; None looks the schedule up in `SPLIT_BACKWARD`,
    # which does not cover schedule files
    splits_backward: bool | None = None
    updates: int | None = None  # weight updates per step, if the program is known

    @property
    def layout(self) -> Layout:
        """Section `parallel`."""
        return self.config.parallel

    @property
    def formats(self) -> Formats:
        """The number formats of ``train.precision``."""
        return FORMATS[self.config.train.precision]


@dataclass(frozen=True, eq=False)
class Feature:
    """A feature that a run may use."""

    field: str  # the config field that controls it, ``section.name``
    used: Callable[[CheckedRun], bool]  # whether a run uses it

    def setting(self, run: CheckedRun) -> str:
        """Format the field and its value for a message: ``parallel.cp = 2``."""
        if self.field.startswith("model."):
            return {EXPERTS: "a model of experts", NO_EXPERTS: "a model without experts"}.get(self, self.field)
        return f"{self.field} = {written(attrgetter(self.field)(run.config))}"


def written(value: Any) -> str:
    """Format a value as TOML, with strings in single quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _is(field: str, *values: Any) -> Feature:
    """Build a feature that is used if the field has one of these values."""
    read = attrgetter(field)
    return Feature(field, lambda run: read(run.config) in values)


def _is_not(field: str, *values: Any) -> Feature:
    """Build a feature that is used if the field has none of these values."""
    read = attrgetter(field)
    return Feature(field, lambda run: read(run.config) not in values)


def _set(field: str) -> Feature:
    """Build a feature that is used if the field differs from its default."""
    return _is_not(field, attrgetter(field)(RunConfig()))


# ---- the layout ------------------------------------------------------------------------------------------------------

ONE_REPLICA = _is("parallel.dp", 1)
ZERO = _is("parallel.zero", 1, 2, 3)
ZERO3 = _is("parallel.zero", 3)
NO_ZERO = _is("parallel.zero", 0)
BELOW_ZERO3 = _is("parallel.zero", 0, 1, 2)
ZERO_SHARD = _set("parallel.zero_shard")
PREFETCH = _set("parallel.prefetch")
KEPT_AFTER_FORWARD = _set("parallel.reshard_after_forward")
OFFLOAD = _set("parallel.offload")
OFFLOADED_PARAMETERS = _is("parallel.offload", "parameters")
TP = _set("parallel.tp")
NO_TP = _is("parallel.tp", 1)
GRID = _set("parallel.tp_x")
SEQUENCE_PARALLEL = _set("parallel.sequence_parallel")
TP_OVERLAP = _is("parallel.tp_overlap", True)
CP = _set("parallel.cp")
CP_ORDER = _set("parallel.cp_order")
NO_RING = Feature("parallel.cp", lambda run: run.layout.cp_ring == 1)
EP = _set("parallel.ep")
EP_OVERLAP = _is("parallel.ep_overlap", True)
NO_EP = _is("parallel.ep", 1)
ETP = _set("parallel.etp")
PP = _set("parallel.pp")

# ---- schedules -------------------------------------------------------------------------------------------------------

ASYNC_PIPELINE = _is("parallel.schedule", *ASYNCHRONOUS)
SEVERAL_UPDATES = Feature(
    "parallel.schedule",
    lambda run: run.layout.schedule in ASYNCHRONOUS and (run.updates is None or run.updates > 1),
)  # fmt: skip
TOKEN_PIPELINE = _is("parallel.schedule", *SLICED)
NOT_SLICED = _is_not("parallel.schedule", *SLICED)
NOT_PAIRED = _is_not("parallel.schedule", *PAIRED)
SLICES = _set("parallel.sequence_slices")
UPDATE_EVERY = _set("parallel.update_every")
NOT_2BW = _is_not("parallel.schedule", "pipedream-2bw")
SPLIT = Feature(
    "parallel.schedule",
    lambda run: run.layout.schedule in SPLIT_BACKWARD if run.splits_backward is None else run.splits_backward,
)  # fmt: skip

# ---- relaxed data parallelism ----------------------------------------------------------------------------------------

EXACT = _is("parallel.sync", "all-reduce")
RELAXED = _set("parallel.sync")
FREE = _is("parallel.sync", *UNSYNCHRONISED)
PARAMETER_SERVER = _is("parallel.sync", *SERVED)
NOT_POOLED = _is_not("parallel.sync", *POOLED)

# ---- the model -------------------------------------------------------------------------------------------------------

EXPERTS = Feature("model.experts", lambda run: run.shape.experts is not None)
NO_EXPERTS = Feature("model.experts", lambda run: run.shape.experts is None)
DEPTHS = Feature("model.depths", lambda run: run.shape.depths is not None)
WEIGHTS = Feature("model.weights", lambda run: run.config.model.weights is not None)
WINDOW = Feature("model.window", lambda run: run.shape.window is not None)
QK_NORM = Feature("model.qk_norm", lambda run: run.shape.qk_norm)
SINKS = Feature("model.sinks", lambda run: run.shape.sinks)
MTP = Feature("model.mtp_depth", lambda run: run.shape.mtp_depth > 0)
LATENT = Feature("model.latent", lambda run: run.shape.latent is not None)

# ---- computing -------------------------------------------------------------------------------------------------------

COMPILE = _is("train.compile", True)
NO_COMPILE = _is("train.compile", False)
CUDA_GRAPHS = _is("train.cuda_graphs", True)
LOSS_SCALED = Feature("train.precision", lambda run: run.formats.scaled)
FLOAT8 = Feature("train.precision", lambda run: run.formats.products != "compute")
NVFP4 = Feature("train.precision", lambda run: run.formats.products == "nvfp4")
DELAYED_SCALES = _is("float8.amax", "delayed")
ROUNDED = Feature("train.precision", lambda run: run.formats.rounds)
WIDENED = Feature("train.precision", lambda run: run.formats.widened)
NOT_ELEMENTWISE = _is_not("optimizer.name", *ELEMENTWISE)
NOT_ROUNDABLE = Feature(
    "optimizer.name",
    lambda run: run.config.optimizer.name not in (*ELEMENTWISE, *(("adam8bit",) if run.formats.state == FP32 else ())),
)  # fmt: skip
SOPHIA = _is("optimizer.name", *SOPHIA_PRECISIONS)
SOPHIA_G = _is("optimizer.name", "sophia-g")
SOPHIA_H = _is("optimizer.name", "sophia-h")
TOO_NARROW_FOR_G = _is_not("train.precision", *SOPHIA_PRECISIONS["sophia-g"])
TOO_NARROW_FOR_H = _is_not("train.precision", *SOPHIA_PRECISIONS["sophia-h"])
CLIPPING = _is_not("optimizer.clip_norm", 0)

# ---- around the step -------------------------------------------------------------------------------------------------

MEMORY_CHECKPOINTS = _set("failover.memory_every")
NO_MEMORY_CHECKPOINTS = _is("failover.memory_every", 0)
NO_RESTARTS = _is("failover.restarts", 0)
NO_RECOVERY_TIME = _is("failover.recovery_timeout_seconds", 0)
SHRINKING = _set("failover.shrink")
REPLICA_CHECKS = _set("failover.check_replicas_every")
SPIKES = _set("failover.spike_factor")
NO_SPIKES = _is("failover.spike_factor", 0.0)
ROLLBACKS = _set("failover.spike_rollbacks")
STRAGGLERS = _set("failover.stragglers_every")
REEXECUTION = _set("failover.reexecute_every")
REEXECUTION_ON_REPLICA = Feature(
    "failover.reexecute_on",
    lambda run: bool(run.config.failover.reexecute_every) and run.config.failover.reexecute_on == "replica",
)  # fmt: skip
HISTOGRAMS = _set("metrics.histograms")
PROFILE = _is("metrics.profile", True)
STRAGGLER_KNOB, PACE_KNOB, DEATH_KNOB = (_set(f"testing.{name}") for name in ("straggler", "min_step_seconds", "kill"))
SLOW_LINK = _set("testing.link_gbs")
BACKEND_TRANSPORT = _is("train.transport", "backend")
CUDA = _is("train.device", "cuda")
CPU = _is("train.device", "cpu")
UNEVEN_SAMPLER = _set("data.sampler")
POOLED_SAMPLER = _is("data.sampler", "pool")
