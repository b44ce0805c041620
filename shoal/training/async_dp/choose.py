"""Which trainer runs a method, and what each method needs: what cannot be is refused before any process starts."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from shoal.base.errors import UsageError
from shoal.engine.collectives.shm.region import host_identity
from shoal.engine.device import pick_device
from shoal.spec.config import RunConfig
from shoal.spec.optimizers import ELEMENTWISE
from shoal.training.fault_knobs import Handicaps

if TYPE_CHECKING:
    from shoal.training.trainer import Trainer

COMPRESSED = ("powersgd", "topk", "onebit", "int8")
LOCAL = ("local-sgd", "diloco")
SERVED = ("ps-bsp", "ps-ssp", "ps-async")
FREE = (*SERVED, "hogwild", "sgp", "wagma")
POOLED = ("ps-async", "hogwild")
"""Methods whose replicas may do different numbers of steps."""

READERS = {
    "staleness": ("ps-ssp", "sgp", "wagma"),
    "staleness_aware": ("ps-ssp", "ps-async"),
    "local_steps": LOCAL,
    "outer_learning_rate": ("diloco",),
    "outer_momentum": ("diloco",),
    "outer_int8": LOCAL,
    "block": ("onebit", "int8", *LOCAL),
    "rank": ("powersgd",),
    "density": ("topk",),
    "group": ("wagma",),
    "global_every": ("wagma",),
}
"""The methods that read each field of `RelaxedConfig`."""

MOST = 64
"""Replicas of which each has a bit of a window's counter."""


def trainer_of(config: RunConfig) -> type[Trainer]:
    """The trainer of a run."""
    sync = config.parallel.sync
    if sync == "all-reduce":
        from shoal.training.trainer import Trainer

        return Trainer
    from shoal.training.async_dp import trainers

    if sync in FREE:
        return trainers.FreeTrainer
    return trainers.LocalTrainer if sync in LOCAL else trainers.CompressedTrainer


def goes_on_without(config: RunConfig) -> bool:
    """Whether a run goes on when a rank dies (not the first, which keeps the log)."""
    bulk = config.parallel.sync == "ps-bsp" or (config.parallel.sync == "ps-ssp" and config.relaxed.staleness == 0)
    return config.parallel.sync in FREE and not bulk


def check_relaxed(config: RunConfig) -> None:
    """Refuse what a method cannot do.

    Raises:
        UsageError: naming the field, why, and what would do.
    """
    layout, sync, train = config.parallel, config.parallel.sync, config.train
    handicaps = Handicaps.of(train, layout.world_size)
    if config.metrics.profile and (handicaps.any or sync != "all-reduce"):
        raise UsageError(
            "metrics.profile = true records steps of the plain synchronous run alone, without handicaps."
            "\n  Leave it out, or parallel.sync and train.straggler, train.pace and train.dead."
        )
    if sync == "all-reduce":
        _need(config.data.sampler == "even", f"data.sampler = '{config.data.sampler}'", "what all-reduce computes must "
              "not depend on the number of replicas", "Leave it out, or choose another parallel.sync")
        _check_read(config)
        return
    field = f"parallel.sync = '{sync}'"
    _need(layout.zero == 0, f"{field} with parallel.zero = {layout.zero}",
          "each replica keeps its own weights and moments whole", "Use parallel.zero 0")
    _need(layout.cp == 1, f"{field} with parallel.cp = {layout.cp}",
          "what it exchanges and saves belongs to ranks that have whole sequences", "Use parallel.cp 1")
    several = layout.schedule in ("pipedream", "pipedream-2bw")
    _need(not several, f"{field} with parallel.schedule = '{layout.schedule}'",
          "its replicas exchange once a step, and each stage would update several times", "Use another schedule")
    for name in ("memory_every", "check_replicas_every", "spike_factor", "stragglers_every", "reexecute_every"):
        value = getattr(config.failover, name)
        _need(not value, f"{field} with failover.{name} = {value}",
              "its replicas hold no common state between two steps", f"Set failover.{name} = 0")
    if config.data.sampler == "pool":
        _need(sync in POOLED, f"{field} with data.sampler = 'pool'",
              "its replicas count the same steps, which a common queue gives to whoever is free",
              f"Use the pool with {' or '.join(POOLED)}")
    if sync in LOCAL:
        _check_meetings(config)
    if sync in FREE:
        _check_free(config, field)
    if sync == "wagma":
        size = config.relaxed.group
        _need(size % 2 == 0 or size >= layout.dp, f"relaxed.group = {size}",
              "groups are made of pairs", f"Use an even number, or {layout.dp} for all")
    _check_read(config)


def _check_read(config: RunConfig) -> None:
    """Refuse what was set and nothing would read."""
    sync, relaxed = config.parallel.sync, config.relaxed
    for name, field in type(relaxed).model_fields.items():
        value, readers = getattr(relaxed, name), READERS[name]
        if name == "block" and not relaxed.outer_int8:
            readers = tuple(reader for reader in readers if reader not in LOCAL)
        _need(value == field.default or sync in readers, f"relaxed.{name} = {value} with parallel.sync = '{sync}'",
              f"it is read by {', '.join(readers)} alone", f"Leave relaxed.{name} out")
    overlap, sampler = config.data.overlap, config.data.sampler
    _need(overlap == type(config.data).model_fields["overlap"].default or sampler == "overlap",
          f"data.overlap = {overlap:g} with data.sampler = '{sampler}'", "it is read by the sampler 'overlap' alone",
          "Leave data.overlap out")


def _check_meetings(config: RunConfig) -> None:
    every = config.relaxed.local_steps
    for name, steps in (("train.validate_every", config.train.validate_every),
                        ("checkpoint.every", config.checkpoint.every)):
        _need(steps % every == 0, f"{name} = {steps} with relaxed.local_steps = {every}",
              "between two averages there is no model that all replicas have",
              f"Use a multiple of {every}, or 0 for the end alone")
    log = config.metrics.log_every
    _need(log % every == 0 or every % log == 0, f"metrics.log_every = {log} with relaxed.local_steps = {every}",
          "the replicas tell each other their losses when they average", f"Use a multiple of {every}")


def _check_free(config: RunConfig, field: str) -> None:
    layout = config.parallel
    _need(layout.tp == layout.pp == 1, f"{field} with tp {layout.tp} and pp {layout.pp}",
          "the ranks of one replica would read the others' weights at different moments, and no longer fit each other",
          "Use tp 1 and pp 1, or local-sgd, diloco or a compressed all-reduce")
    device = config.train.device
    _need(device != "cuda" and pick_device(device).type == "cpu", f"{field} with train.device = '{device}'",
          "its ranks share the memory of one host and compute there", "Use train.device cpu")
    _need(host_identity() is not None, f"{field} on {platform.system()} {platform.machine()}",
          "its ranks tell each other by the order of stores in memory, which must be that of Linux on x86-64",
          "Use local-sgd, diloco or a compressed all-reduce")
    _need(layout.dp <= MOST, f"{field} with parallel.dp = {layout.dp}",
          f"which of its replicas live is one number of {MOST} bits", f"Use parallel.dp <= {MOST}")
    _need(config.train.transport == "auto", f"{field} with train.transport = 'backend'",
          "its ranks share the memory of one host", "Leave train.transport out")
    name = config.optimizer.name
    if config.parallel.sync in SERVED:
        _need(name in ELEMENTWISE, f"{field} with optimizer.name = '{name}'",
              "the server's states are numbers of each element", f"Use one of {', '.join(ELEMENTWISE)}")


def _need(there: bool, what: str, why: str, mend: str) -> None:
    if not there:
        raise UsageError(f"{what}: {why}.\n  {mend}.")
