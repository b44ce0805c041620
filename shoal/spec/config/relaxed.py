"""Configuration of relaxed data parallelism."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from shoal.base.section import Section
from shoal.spec.config.optimizer import Decay


class RelaxedConfig(Section):
    """Relaxed data parallelism: methods of parallel.sync that do not sum every gradient exactly in every step."""

    staleness: NonNegativeInt = 3
    """ps-ssp, sgp, wagma: maximum steps that a replica may be ahead of the ones it waits for; 0 waits in every step."""

    staleness_aware: bool = True
    """ps-ssp, ps-async: divide the learning rate of an update by its staleness (Zhang et al. 2016)."""

    local_steps: PositiveInt = 10
    """local-sgd, diloco: steps of each replica between averages (H)."""

    outer_learning_rate: PositiveFloat = 0.7
    """diloco: learning rate of the outer step, along the replicas' mean change."""

    outer_momentum: Decay = 0.9
    """diloco: Nesterov momentum of the outer step."""

    outer_int8: bool = False
    """local-sgd, diloco: exchange the replicas' changes as 8-bit integers."""

    block: PositiveInt = 256
    """onebit, int8, outer_int8: elements that share a scale; 1 is lossless and saves nothing."""

    rank: PositiveInt = 4
    """powersgd: columns of the two factors of a gradient matrix (r)."""

    density: float = Field(default=0.01, gt=0, le=1)
    """topk: fraction of each gradient tensor's elements that is exchanged."""

    group: PositiveInt = 2
    """wagma: replicas that average together in one step, an even number or all of them."""

    global_every: NonNegativeInt = 10
    """wagma: steps between averages over all replicas, which all replicas wait for; 0 makes none."""
