"""The times of a schedule as `shoal estimate` has them, of a model on a cluster: this machine too, once calibrated."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.section import validate
from shoal.cli.estimate import checked, estimable
from shoal.pipeline.schedules import EVERY
from shoal.pipeline.simulator.columns import Columns, of_program
from shoal.pipeline.simulator.times import ActionTimes, MessageTimes
from shoal.planning.estimate import Estimate
from shoal.planning.run import EstimatedRun
from shoal.spec.catalog import model_shape
from shoal.spec.catalog.clusters import cluster
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS

if TYPE_CHECKING:
    from shoal.cli.simulate import SimulateOptions


class Priced(NamedTuple):
    """A schedule with its times in seconds.

    Attributes:
        step_seconds: as it is estimated; longer than it is played where ranks take turns on fewer cores, or where
            hosts need longer to launch it.
    """

    columns: Columns
    times: ActionTimes
    links: MessageTimes
    step_seconds: float


def priced(name: str, options: SimulateOptions) -> Priced:
    """Price it.

    Raises:
        UsageError: no such model, cluster or precision; a layout that does not fill the cluster, or that cannot be.
    """
    if options.precision not in FORMATS:
        raise UsageError(f"--precision {options.precision}: there is none; {did_you_mean(options.precision, FORMATS)}")
    fields = {
        "pp": options.pp, "dp": options.dp, "tp": options.tp, "schedule": name, "micro_batch": options.micro_batch,
        "virtual_stages": None if name in EVERY and EVERY[name].virtual else options.virtual_stages,
    }
    layout = validate(Layout, fields, where="command line")
    shape = model_shape(options.model or "llama-3-8b")
    s = options.sequence_length or shape.max_sequence
    batch = options.dp * options.micro_batch * options.microbatches
    run = checked(EstimatedRun(shape, layout, cluster(options.cluster), s, batch, options.precision))
    estimate = Estimate(estimable(run))
    links = replace(estimate.link, blocking=options.blocking)
    return Priced(of_program(estimate.program), estimate.durations, links, estimate.step_seconds)
