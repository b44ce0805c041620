"""`shoal plan auto`: partition any module over a cluster automatically, and compare with hand-written layouts."""

from __future__ import annotations

from pathlib import Path

from pydantic import PositiveInt

import shoal
from shoal.base.options import reject_unused
from shoal.base.section import Section
from shoal.base.terminal import wrap_lines


class AutoOptions(Section):
    model: str = "tiny"
    """A model in the catalog."""

    layers: PositiveInt | None = None
    """Number of the model's first layers to plan; a few layers of a large model take seconds."""

    module: str = ""
    """A module of your own instead: FILE.py:FUNCTION, which returns (module, example inputs). The file is executed."""

    cluster: str = "8xA100"
    """8xH100, 2x4xA100-ETH100, as in `shoal estimate`; 4xhere with --catalog."""

    mesh: str = ""
    """Device grid, such as x=2,y=4 (default: the best of all devices in a row, and nodes by devices per node, or every
    grid with two axes of a single node)."""

    micro_batch: PositiveInt = 8
    """Sequences per micro-batch over all devices, for a model in the catalog."""

    sequence_length: PositiveInt = 512
    """Tokens per sequence."""

    stages: PositiveInt = 1
    """Maximum pipeline stages, each with some layers on a part of the cluster; 1 computes all layers on all devices."""

    microbatches: PositiveInt = 1
    """Micro-batches per step: gradients are reduced and weights updated once for all of them."""

    precision: str = "bf16"
    """bf16, fp16 or fp32."""

    memory: str = ""
    """Memory per device for weights, gradients, AdamW states and activations, such as 16GB (default: the accelerator's
    memory without the part that libraries and the process use)."""

    check: bool = False
    """Run the plan in float64 on real ranks here, one per device, and compare with the module on one device."""

    catalog: Path | None = None
    """A TOML file with accelerators, links, nodes and models of your own."""


def run(options: AutoOptions) -> int:
    """Plan, print and check; return the exit code, 1 if nothing fits or the check fails."""
    from shoal.labs.autoshard import execute, listing, operators

    if options.catalog:
        shoal.add_catalog(options.catalog)
    machine = shoal.cluster(options.cluster)
    shape = None
    if options.check:
        execute.check_ranks(machine)
    if options.module:
        unused = ("model", "layers", "micro_batch", "sequence_length")
        reject_unused(options, unused, "--module makes its own module and inputs")
        module, inputs = operators.load_module(options.module, check=options.check)
    else:
        shape = operators.select_shape(options.model, options.layers, options.sequence_length)
        module, inputs = operators.build_model(shape, options.micro_batch, options.sequence_length, check=options.check)
    found = operators.try_plan(
        module, inputs, cluster_name=options.cluster, mesh=options.mesh, stages=options.stages,
        microbatches=options.microbatches, precision=options.precision, memory=options.memory,
    )  # fmt: skip
    if isinstance(found, str):
        print(found)
        return 1
    listed = wrap_lines(listing.lines(options.module or options.model, options.precision, options.microbatches, found))
    if shape is not None and machine.size > 1:
        batch = options.micro_batch * options.microbatches
        layout = [*listing.for_train(
            options.model, shape, options.sequence_length, batch, options.precision, found, options.micro_batch
        )]  # fmt: skip
        listed += ["", *layout] if layout else []
    print("\n".join(listed))
    if not options.check:
        return 0
    difference = execute.run_plan(found, module, inputs)
    print(f"\n{difference.verdict}")
    return 0 if difference.exact else 1
