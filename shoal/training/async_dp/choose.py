"""Which engine runs a method of data parallelism, and what the method needs of this machine."""

from __future__ import annotations

import platform

from shoal.base.errors import UsageError
from shoal.engine.collectives.shm.region import host_identity
from shoal.engine.device import pick_device
from shoal.spec.config import RunConfig
from shoal.spec.sync_methods import LOCAL, UNSYNCHRONISED
from shoal.training.async_dp.engines import CompressedEngine, LocalEngine
from shoal.training.async_dp.methods.server import staleness_bound
from shoal.training.async_dp.unsynchronised import FreeEngine
from shoal.training.fault_knobs import FaultKnobs
from shoal.training.step.engine import Engine


def engine_class(sync: str) -> type[Engine]:
    """The engine of a value of ``parallel.sync``."""
    if sync == "all-reduce":
        return Engine
    if sync in UNSYNCHRONISED:
        return FreeEngine
    return LocalEngine if sync in LOCAL else CompressedEngine


def goes_on_without(config: RunConfig) -> bool:
    """Whether a run goes on when a rank dies (other than the first, which keeps the log)."""
    return config.parallel.sync in UNSYNCHRONISED and staleness_bound(config) != 0


def check_relaxed(config: RunConfig) -> None:
    """Reject fault knobs of ranks that do not exist, and a method that this machine cannot run.

    Raises:
        UsageError: naming the field, the reason and what works.
    """
    FaultKnobs.read(config.testing, config.parallel.world_size)
    sync, device = config.parallel.sync, config.train.device
    if sync not in UNSYNCHRONISED:
        return
    if pick_device(device).type != "cpu":
        raise UsageError(
            f"parallel.sync = '{sync}' with train.device = '{device}': its ranks share the memory of one host and "
            "compute there.\n  Use train.device cpu."
        )
    if host_identity() is None:
        raise UsageError(
            f"parallel.sync = '{sync}' on {platform.system()} {platform.machine()}: its ranks tell each other by the "
            "order of stores in memory, which must be that of Linux on x86-64."
            "\n  Use local-sgd, diloco or a compressed all-reduce."
        )
