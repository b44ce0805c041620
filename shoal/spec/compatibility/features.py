"""The features of a run that may not go together, each with the setting that turns it on.

A feature is a name, the config field that decides it and a predicate over the run. `shoal.spec.compatibility.table`
says which of them exclude each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from shoal.spec.catalog import ModelShape
from shoal.spec.config import OptimizerConfig, RunConfig
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS, FP32, Formats
from shoal.spec.optimizers import ELEMENTWISE, SOPHIA_PRECISIONS
from shoal.spec.schedules import ASYNCHRONOUS, SLICED, SPLIT_BACKWARD
from shoal.spec.sync_methods import COMPRESSED, LOCAL, POOLED, SERVED, UNSYNCHRONISED

BARE = RunConfig(optimizer=OptimizerConfig(clip_norm=0))
"""The config of a run that uses no feature: where only some sections are known, it has the others."""


class Run(NamedTuple):
    """What predicates read.

    Attributes:
        shape: the model.
        splits_backward: whether the pipeline program has backward split into two halves; None takes what the table of
            schedules says, which does not know schedule files.
        updates: updates of the weights in one step, where the program is known.
    """

    config: RunConfig
    shape: ModelShape
    splits_backward: bool | None = None
    updates: int | None = None

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
    """Something that a run uses, or does not.

    Attributes:
        name: as the field calls it.
        field: the config field that decides it, ``section.name``; with a model's feature also ``model.``.
        used: whether a run uses it.
    """

    name: str
    field: str
    used: Callable[[Run], bool]

    def setting(self, run: Run) -> str:
        """The field and its value in a run, as a message names it: ``parallel.cp = 2``."""
        section, name = self.field.split(".", 1)
        if section == "model":
            return {EXPERTS: "a model of experts", NO_EXPERTS: "a model without experts"}.get(self, self.field)
        return f"{self.field} = {written(getattr(getattr(run.config, section), name))}"


def written(value: Any) -> str:
    """A value as TOML writes it, strings in single quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _is(field: str, *values: Any, name: str = "") -> Feature:
    """The feature that a field has one of these values."""
    section, key = field.split(".")

    def used(run: Run) -> bool:
        return getattr(getattr(run.config, section), key) in values

    return Feature(name or f"{key} {'/'.join(map(str, values))}", field, used)


def _set(field: str, name: str = "") -> Feature:
    """The feature that a field does not have its default."""
    section, key = field.split(".")

    def used(run: Run) -> bool:
        config = getattr(run.config, section)
        return bool(getattr(config, key) != type(config).model_fields[key].default)

    return Feature(name or key, field, used)


# ---- the layout ------------------------------------------------------------------------------------------------------

ONE_REPLICA = _is("parallel.dp", 1, name="one replica")
ZERO = _is("parallel.zero", 1, 2, 3, name="ZeRO")
NO_ZERO = _is("parallel.zero", 0, name="no ZeRO")
BELOW_ZERO3 = _is("parallel.zero", 0, 1, 2, name="parameters not sharded")
ZERO3 = _is("parallel.zero", 3, name="ZeRO-3")
ZERO_SHARD = _set("parallel.zero_shard", "hybrid sharding")
PREFETCH = _set("parallel.prefetch")
KEPT_AFTER_FORWARD = _set("parallel.reshard_after_forward", "parameters kept after forward")
OFFLOAD = _set("parallel.offload", "offload to host memory")
OFFLOADED_PARAMETERS = _is("parallel.offload", "parameters", name="parameters offloaded")
TP = Feature("tensor parallelism", "parallel.tp", lambda run: run.layout.tp > 1)
NO_TP = _is("parallel.tp", 1, name="no tensor parallelism")
GRID = _set("parallel.tp_x", "2D tensor parallelism")
SEQUENCE_PARALLEL = _set("parallel.sequence_parallel", "sequence parallelism")
TP_OVERLAP = _is("parallel.tp_overlap", True, name="overlapped tensor parallelism")
CP = _set("parallel.cp", "context parallelism")
CP_ORDER = _set("parallel.cp_order", "order of the ring")
NO_RING = Feature("no ring", "parallel.cp", lambda run: run.layout.ring == 1)
EP = _set("parallel.ep", "expert parallelism")
ETP = _set("parallel.etp", "expert tensor parallelism")
PP = _set("parallel.pp", "pipeline parallelism")
RECOMPUTE = _set("parallel.recompute", "activation recomputation")

# ---- schedules -------------------------------------------------------------------------------------------------------

ASYNC_PIPELINE = _is("parallel.schedule", *ASYNCHRONOUS, name="asynchronous pipeline")
SEVERAL_UPDATES = Feature(
    "asynchronous pipeline", "parallel.schedule",
    lambda run: run.layout.schedule in ASYNCHRONOUS and (run.updates is None or run.updates > 1),
)  # fmt: skip
TOKEN_PIPELINE = _is("parallel.schedule", *SLICED, name="token-level pipeline")
NOT_SLICED = Feature("no slices", "parallel.schedule", lambda run: run.layout.schedule not in SLICED)
SLICES = _set("parallel.sequence_slices", "slices of sequences")
UPDATE_EVERY = _set("parallel.update_every", "micro-batches between updates")
NOT_2BW = Feature("not PipeDream-2BW", "parallel.schedule", lambda run: run.layout.schedule != "pipedream-2bw")
SPLIT = Feature(
    "split backward (zero bubble)", "parallel.schedule",
    lambda run: run.layout.schedule in SPLIT_BACKWARD if run.splits_backward is None else run.splits_backward,
)  # fmt: skip

# ---- relaxed data parallelism ----------------------------------------------------------------------------------------

EXACT = _is("parallel.sync", "all-reduce", name="exact data parallelism")
RELAXED = _set("parallel.sync", "relaxed data parallelism")
COMPRESSED_GRADIENTS = _is("parallel.sync", *COMPRESSED, name="compressed gradients")
LOCAL_SGD = _is("parallel.sync", *LOCAL, name="local SGD")
FREE = _is("parallel.sync", *UNSYNCHRONISED, name="unsynchronised replicas")
PARAMETER_SERVER = _is("parallel.sync", *SERVED, name="parameter server")
NOT_POOLED = Feature("replicas in step", "parallel.sync", lambda run: run.layout.sync not in POOLED)

# ---- the model -------------------------------------------------------------------------------------------------------

EXPERTS = Feature("mixture of experts", "model.experts", lambda run: run.shape.experts is not None)
NO_EXPERTS = Feature("a model without experts", "model.experts", lambda run: run.shape.experts is None)
DEPTHS = Feature("mixture of depths", "model.depths", lambda run: run.shape.depths is not None)

# ---- computing -------------------------------------------------------------------------------------------------------

COMPILE = _is("train.compile", True, name="torch.compile")
LOSS_SCALED = Feature("loss scaling (fp16)", "train.precision", lambda run: run.formats.scaled)
FLOAT8 = Feature("8-bit products (fp8, mxfp8)", "train.precision", lambda run: run.formats.products != "compute")
DELAYED_SCALES = _is("float8.amax", "delayed", name="delayed scales")
ROUNDED = Feature("stochastically rounded states", "train.precision", lambda run: run.formats.rounds)
WIDENED = Feature("low-precision states", "train.precision", lambda run: run.formats.widened)
NOT_ELEMENTWISE = Feature(
    "an optimizer of whole tensors", "optimizer.name", lambda run: run.config.optimizer.name not in ELEMENTWISE
)
NOT_ROUNDABLE = Feature(
    "an optimizer of whole tensors", "optimizer.name",
    lambda run: run.config.optimizer.name not in (*ELEMENTWISE, *(("adam8bit",) if run.formats.state == FP32 else ())),
)  # fmt: skip
SOPHIA = _is("optimizer.name", *SOPHIA_PRECISIONS, name="Sophia")
SOPHIA_G, SOPHIA_H = (_is("optimizer.name", name, name=name) for name in ("sophia-g", "sophia-h"))
TOO_NARROW_FOR_G, TOO_NARROW_FOR_H = (
    Feature(f"a format too narrow for {name}", "train.precision",
            lambda run, wide=wide: run.config.train.precision not in wide)  # type: ignore[misc]  # a default binds it
    for name, wide in SOPHIA_PRECISIONS.items()
)  # fmt: skip
CLIPPING = Feature("gradient clipping", "optimizer.clip_norm", lambda run: run.config.optimizer.clip_norm > 0)

# ---- around the step -------------------------------------------------------------------------------------------------

MEMORY_CHECKPOINTS = _set("failover.memory_every", "in-memory checkpoints")
REPLICA_CHECKS = _set("failover.check_replicas_every", "comparison of replicas")
SPIKES = _set("failover.spike_factor", "loss spike detection")
NO_SPIKES = _is("failover.spike_factor", 0.0, name="no spike detection")
ROLLBACKS = _set("failover.spike_rollbacks", "rollback after a spike")
STRAGGLERS = _set("failover.stragglers_every", "straggler reports")
REEXECUTION = _set("failover.reexecute_every", "re-execution")
REEXECUTION_ON_REPLICA = Feature(
    "re-execution on another replica", "failover.reexecute_on",
    lambda run: bool(run.config.failover.reexecute_every) and run.config.failover.reexecute_on == "replica",
)  # fmt: skip
HISTOGRAMS = _set("metrics.histograms")
PROFILE = _is("metrics.profile", True, name="step profile")
STRAGGLER_KNOB, PACE_KNOB, DEATH_KNOB = (_set(f"testing.{name}") for name in ("straggler", "pace", "dead"))
SLOW_LINK = _set("testing.link_gbs", "simulated network")
BACKEND_TRANSPORT = _is("train.transport", "backend", name="backend transport")
CUDA = _is("train.device", "cuda", name="CUDA")
UNEVEN_SAMPLER = _set("data.sampler", "overlapping or pooled samples")
POOLED_SAMPLER = _is("data.sampler", "pool", name="pooled samples")
