"""The relaxed family of data parallelism."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from shoal.base.section import Section
from shoal.spec.config.optimizer import Decay


class RelaxedConfig(Section):
    """Data parallelism that does not sum every gradient exactly and at once: what parallel.sync chooses."""

    staleness: NonNegativeInt = 3
    """ps-ssp, sgp, wagma: steps that a replica may be ahead of what it waits for; 0 waits for it in every step."""

    staleness_aware: bool = True
    """ps-ssp, ps-async: divide the learning rate of an update by its staleness (Zhang et al. 2016)."""

    local_steps: PositiveInt = 10
    """local-sgd, diloco: steps of each replica between two averages (H)."""

    outer_learning_rate: PositiveFloat = 0.7
    """diloco: of the outer step, along the replicas' mean change."""

    outer_momentum: Decay = 0.9
    """diloco: Nesterov momentum of the outer step."""

    outer_int8: bool = False
    """local-sgd, diloco: the replicas' changes are exchanged as 8-bit integers."""

    block: PositiveInt = 256
    """onebit, int8, outer_int8: elements that have a scale of their own; with 1 nothing is lost, and nothing saved."""

    rank: PositiveInt = 4
    """powersgd: columns of the two factors of a gradient matrix (r)."""

    density: float = Field(default=0.01, gt=0, le=1)
    """topk: part of each gradient tensor's elements that are exchanged."""

    group: PositiveInt = 2
    """wagma: replicas that average in one step, an even number or all of them."""

    global_every: NonNegativeInt = 10
    """wagma: steps between averages over all replicas, for which everybody waits; 0 has none."""
