"""Select the engine for a data-parallel method, and check what the method requires of this machine."""

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
    """Return the engine class for a value of ``parallel.sync``."""
    if sync == "all-reduce":
        return Engine
    if sync in UNSYNCHRONISED:
        return FreeEngine
    return LocalEngine if sync in LOCAL else CompressedEngine


def goes_on_without(config: RunConfig) -> bool:
    """Return whether a run continues after the death of a rank other than rank 0, which keeps the log."""
    return config.parallel.sync in UNSYNCHRONISED and staleness_bound(config) != 0


def check_relaxed(config: RunConfig) -> None:
    """Reject fault knobs of nonexistent ranks and methods that this machine cannot run.

    Raises:
        UsageError: the message names the field, the reason and an alternative.
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
