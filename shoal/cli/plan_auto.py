"""`shoal plan auto`: how to split any module over a cluster, found by itself, beside the splits that people write."""

from __future__ import annotations

from pathlib import Path

from pydantic import PositiveInt

import shoal
from shoal.base.options import reject_unused
from shoal.base.section import Section
from shoal.base.units import show_bytes


class AutoOptions(Section):
    model: str = "tiny"
    """A model of the catalog."""

    layers: PositiveInt | None = None
    """Of the model, the first so many alone: a few of a large one are planned in seconds."""

    module: str = ""
    """A module of your own instead: FILE.py:FUNCTION, which returns (module, example inputs). The file is run."""

    cluster: str = "8xA100"
    """8xH100, 2x4xA100-ETH100, 4xhere, as `shoal estimate` takes it."""

    mesh: str = ""
    """The devices as a grid, as x=2,y=4 (default: all in a row, and nodes by their devices, or one node's in every grid
    of two axes; the best of them is shown)."""

    micro_batch: PositiveInt = 8
    """Sequences of a micro-batch, of all devices together; of a model of the catalog."""

    seq: PositiveInt = 512
    """Tokens of a sequence."""

    stages: PositiveInt = 1
    """The most pipeline stages, each of some layers on a part of the cluster; with 1 all devices do all layers."""

    microbatches: PositiveInt = 1
    """Of a step: gradients are reduced and weights updated once for all of them."""

    precision: str = "bf16"
    """bf16, fp16 or fp32."""

    memory: str = ""
    """Of a device, for weights, gradients, AdamW's states and activations, as 16GB (default: the accelerator's, without
    what libraries and the process keep)."""

    check: bool = False
    """Run the plan on real ranks here, one for each device, in float64, beside the module on one device."""

    catalog: Path | None = None
    """A TOML file with accelerators, links, nodes and models of your own."""


def run(options: AutoOptions) -> int:
    """Plan, print, and check; the exit code, 1 if nothing fits or the check fails.

    Raises:
        UsageError: a name that is not known, a module that has no graph, or a mesh that the cluster does not have.
    """
    from shoal.labs.autoshard import execute, listing, operators, subject
    from shoal.labs.autoshard.intra.ilp import NothingFits
    from shoal.labs.autoshard.search import StagedPlan, check_outputs

    if options.catalog:
        shoal.add_catalog(options.catalog)
    machine = shoal.cluster(options.cluster)
    shape = None
    if options.module:
        reject_unused(options, ("model", "layers", "micro_batch", "seq"), "--module makes its own module and inputs")
    if options.check:
        execute.check_ranks(machine)
    if options.module:
        module, inputs = subject.own_module(options.module, check=options.check)
    else:
        shape = subject.catalog_shape(options.model, options.layers, options.seq)
        module, inputs = subject.catalog_model(shape, options.micro_batch, options.seq, check=options.check)
    try:
        found = shoal.plan_operators(
            module, inputs, cluster_name=options.cluster, mesh=options.mesh, stages=options.stages,
            microbatches=options.microbatches, precision=options.precision, memory=options.memory,
        )  # fmt: skip
    except NothingFits as nothing:
        what = "sharding" if options.stages == 1 else "pipeline"
        capacity = show_bytes(operators.capacity_on(machine, options.memory))
        print(listing.nothing_fits(what, capacity, nothing.proven))
        return 1
    name = options.module or options.model
    if isinstance(found, StagedPlan):
        if options.check:
            check_outputs(found)
        said = listing.stage_lines(name, options.precision, options.microbatches, found)
    else:
        said = [*listing.lines(name, options.precision, options.microbatches, found)]
        if shape is not None and machine.size > 1:
            batch = options.micro_batch * options.microbatches
            said += ["", *listing.for_train(
                options.model, shape, options.seq, batch, options.precision, found, options.micro_batch,
            )]  # fmt: skip
    print("\n".join(said))
    if not options.check:
        return 0
    difference = execute.run_plan(found, module, inputs)
    print(f"\n{difference.verdict}")
    return 0 if difference.exact else 1
