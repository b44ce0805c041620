"""`shoal plan auto`: how to split any module over a cluster, found by itself, beside the splits that people write."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from pydantic import PositiveInt
from rich.console import Console
from rich.text import Text
from torch import nn

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.options import reject_unused
from shoal.base.section import Section
from shoal.base.units import BYTES, parse, show_bytes, show_seconds
from shoal.engine.models.transformer import Transformer, initialise
from shoal.labs.autoshard.capture.forward import Forward, forward_of
from shoal.labs.autoshard.capture.graph import OperatorGraph
from shoal.labs.autoshard.capture.layers import Layers
from shoal.labs.autoshard.capture.trace import graph_of
from shoal.labs.autoshard.execute import compare, reference, worst_of
from shoal.labs.autoshard.intra.ilp import SECONDS, NothingFits, solve
from shoal.labs.autoshard.intra.price import Prices
from shoal.labs.autoshard.intra.problem import GIVEN, UPDATE, Builder, Bytes
from shoal.labs.autoshard.listing import LYING, Other, for_train, lines, weights
from shoal.labs.autoshard.notation.notation import NamedMesh, parse_mesh
from shoal.labs.autoshard.pipelined import Pipelined, compare_stages, grids
from shoal.labs.autoshard.plan import ShardingPlan, plan_of
from shoal.labs.autoshard.rivals import rivals
from shoal.labs.autoshard.stages import latency
from shoal.planning.cost.memory.stage import capacity_of, fragmentation_of, unused_of
from shoal.planning.run import KINDS, EstimatedRun
from shoal.report.planning.tables import table
from shoal.spec.catalog import ModelShape, model_shape, tables
from shoal.spec.catalog.calibration import calibration_of
from shoal.spec.catalog.clusters import Cluster, cluster
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS, Formats

MOST_RANKS = 8
EXACT = 1e-10
LAYERS_PER_STAGE = 2  # into which the operators are clustered


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
        UsageError: a name that is not known, a module that has no graph, or a mesh that the cluster has not.
    """
    if options.catalog:
        tables.add(options.catalog)
    machine, formats = cluster(options.cluster), _formats(options.precision)
    meshes = _meshes(options.mesh, machine)
    if options.module:
        reject_unused(options, ("model", "layers", "micro_batch", "seq"), "--module makes its own module and inputs")
    constants = calibration_of(machine).values
    capacity = capacity_of(machine, constants) - unused_of(machine, constants)
    if options.memory:
        capacity = parse(options.memory, BYTES, where="--memory")
    if options.check and machine.size > MOST_RANKS:
        raise UsageError(f"--check: {machine.size} processes, one for each device; at most {MOST_RANKS} are started")
    if options.stages > 1 and options.mesh:
        raise UsageError("--mesh with --stages: every stage has a grid of its own.\n  Leave one of them out.")
    module, inputs = _subject(options)
    console = Console(highlight=False)
    if options.stages > 1:
        return _pipeline(options, machine, formats, capacity, (module, inputs), console)
    graph = graph_of(module, inputs)
    best: tuple[ShardingPlan, list[Other]] | None = None
    proven = True
    for mesh in meshes:
        try:
            found = _planned(graph, machine, mesh, formats, options.microbatches, capacity)
        except NothingFits as nothing:
            proven = proven and nothing.proven
            continue
        if best is None or found[0].seconds < best[0].seconds:
            best = found
    if best is None:
        _nothing("sharding", capacity, proven, console)
        return 1
    name = options.module or options.model
    said = [*lines(name, options.precision, machine, options.microbatches, *best)]
    if not options.module and machine.size > 1:
        batch = options.micro_batch * options.microbatches
        trained = EstimatedRun(_shape(options), Layout(), machine, options.seq, batch, options.precision)
        said += ["", *for_train(options.model, trained, *best, options.micro_batch)]
    for line in said:
        console.print(Text(line), soft_wrap=True)
    if options.check:
        return _check(best[0], module, inputs, console)
    return 0


def _formats(precision: str) -> Formats:
    known = {name: f for name, f in FORMATS.items() if f.compute.name in KINDS and f.products == "compute"}
    if precision not in known:
        raise UsageError(f"--precision {precision}: {did_you_mean(precision, known)}")
    return known[precision]


def _meshes(text: str, machine: Cluster) -> list[NamedMesh]:
    """The grids to try."""
    if text:
        mesh = parse_mesh(text)
        if mesh.ranks != machine.size:
            raise UsageError(f"--mesh {text}: {mesh.ranks} devices, and {machine.name} has {machine.size}")
        if len(mesh.axes) > 2:
            raise UsageError(f"--mesh {text}: {len(mesh.axes)} axes; one or two are planned for")
        return [mesh]
    return grids(machine.nodes, machine.per_node)


def _nothing(what: str, capacity: float, proven: bool, console: Console) -> None:
    said = f"No {what} needs as little as {show_bytes(capacity)} on a device."
    if not proven:
        said = f"Time was up ({SECONDS:.0f} s each) before any {what} within {show_bytes(capacity)} a device was found."
    console.print(Text(said), soft_wrap=True)


def _shape(options: AutoOptions) -> ModelShape:
    """Of a model of the catalog, or its first layers."""
    shape = model_shape(options.model)
    if shape.experts or shape.depths:
        raise UsageError(f"--model {options.model}: which tokens an expert gets depends on numbers; plan dense models")
    if options.layers:
        if options.layers > shape.layers:
            raise UsageError(f"--layers {options.layers}: {options.model} has {shape.layers}")
        shape = shape.model_copy(update={"layers": options.layers})
    if shape.family == "gpt" and options.seq > shape.max_sequence:
        raise UsageError(f"--seq {options.seq}: {options.model} has positions for {shape.max_sequence}")
    return shape


def _subject(options: AutoOptions) -> tuple[nn.Module, tuple]:
    """The module in float64, and example inputs; of a model that is not checked, shapes alone."""
    if options.module:
        return _own(options.module, check=options.check)
    shape = _shape(options)
    device = "cpu" if options.check else "meta"
    with torch.device(device):
        model = Transformer(shape).double()
        if options.check:
            initialise(model, 0)
            tokens = torch.randint(0, shape.vocab, (options.micro_batch, options.seq))
        else:
            tokens = torch.empty((options.micro_batch, options.seq), dtype=torch.int64)
    return model, (tokens, tokens)


def _own(text: str, *, check: bool) -> tuple[nn.Module, tuple]:
    """A user's module from a file of theirs; one that is checked has numbers."""
    file, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier() or not Path(file).is_file():
        raise UsageError(f"--module {text}: write FILE.py:FUNCTION, of a file that is there")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"--module {text}: {file} is no Python file")
    space = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(space)
        made = getattr(space, name)() if hasattr(space, name) else None
    except Exception as error:
        raise UsageError(f"--module {text}: {type(error).__name__}: {error}") from error
    if made is None:
        raise UsageError(f"--module {text}: {did_you_mean(name, [n for n in vars(space) if not n.startswith('_')])}")
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise UsageError(f"--module {text}: {name}() must return (module, example inputs)")
    module, inputs = made
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    leaves = torch.utils._pytree.tree_leaves(inputs)
    held = {"its weights": module.parameters(), "its buffers": module.buffers(), "the inputs": leaves}
    empty = [what for what, every in held.items() if any(isinstance(x, torch.Tensor) and x.is_meta for x in every)]
    if check and empty:
        raise UsageError(
            f"--module {text} --check: {' and '.join(empty)} are on the meta device, which holds no numbers to compute"
            " with.\n  Make them on the CPU, or plan without --check."
        )
    return module.double(), torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs
    )


def _planned(
    graph: OperatorGraph, machine: Cluster, mesh: NamedMesh, formats: Formats, microbatches: int, capacity: float
) -> tuple[ShardingPlan, list[Other]]:
    """The best plan on a mesh, with the splits by hand.

    Raises:
        NothingFits: there is none.
    """
    prices = Prices.on(machine, mesh, KINDS[formats.compute.name], formats.compute.itemsize)
    builder = Builder(graph, prices, bytes_of(formats), microbatches)
    problem, alive = builder.problem(), 1 + fragmentation_of(calibration_of(machine).values)
    best = plan_of(builder, problem, solve(problem, capacity, alive))
    others: list[Other] = []
    for name, rival in rivals(builder, problem).items():
        try:
            found = plan_of(builder, rival.problem, solve(rival.problem, capacity, alive))
            others.append(Other(name, found, rival.layout))
        except NothingFits as nothing:
            others.append(Other(name, None, rival.layout, nothing.proven))
    return best, others


def bytes_of(formats: Formats) -> Bytes:
    """What a weight needs beside itself, with AdamW."""
    master = formats.storage.itemsize if formats.master else 0
    return Bytes(formats.reduce.itemsize, 2 * formats.state.itemsize + master)


# ---- stages ----------------------------------------------------------------------------------------------------------


def _pipeline(
    options: AutoOptions, machine: Cluster, formats: Formats, capacity: float, subject: tuple, console: Console
) -> int:
    """Both levels: stages on parts of the cluster, beside all devices for all layers.

    Raises:
        UsageError: something that is given back belongs to no stage.
    """
    forward = forward_of(*subject)
    layers = Layers(forward, LAYERS_PER_STAGE * options.stages)
    came = [node for node in forward.outputs if node not in layers.nodes]
    if any(options.check or node.op != "placeholder" for node in came):
        names = ", ".join(node.name for node in came)
        raise UsageError(
            f"--stages: the module gives back {names} as it came, which no stage makes.\n"
            "  Return what operators make of parameters or inputs alone."
        )
    joint = Pipelined(
        layers, machine, KINDS[formats.compute.name], formats.compute.itemsize, bytes_of(formats),
        options.microbatches, capacity, fragmentation_of(calibration_of(machine).values),
    )  # fmt: skip
    found = joint.stages(options.stages)
    if found is None:
        _nothing("pipeline", capacity, joint.proven, console)
        return 1
    planned = joint.planned(found)
    total = latency(found, options.microbatches)
    single = joint.cost(0, joint.count, (machine.nodes, machine.per_node), 1) * options.microbatches
    said = [
        f"{options.module or options.model}: {joint.count} layers of operators; {options.precision}, AdamW",
        machine.describe(),
        f"{len(planned)} stages, {options.microbatches} micro-batches: {show_seconds(total)} a step; without stages "
        + (show_seconds(single) if single < float("inf") else "it does not fit"),
    ]
    for number, stage in enumerate(planned):
        devices = f"device {stage.rank}" + (f" to {stage.rank + stage.stage.devices - 1}" * (stage.stage.devices > 1))
        said += ["", f"stage {number}: layers {stage.stage.first} to {stage.stage.last - 1} on {devices}, mesh "
                  f"{stage.plan.mesh or '1'}: {show_seconds(stage.stage.seconds)} a micro-batch, "
                  f"{show_bytes(stage.plan.memory)} of weights and states"]  # fmt: skip
        said += table(LYING, list(weights(stage.plan)))
    for line in said:
        console.print(Text(line), soft_wrap=True)
    return _check_stages(planned, forward, subject, machine.size, console) if options.check else 0


def _check_stages(planned: list, forward: Forward, subject: tuple, ranks: int, console: Console) -> int:
    from shoal.launch.worker_pool import Pool

    graph = graph_of(*subject)
    given, expected = reference(*subject, graph)
    outputs = {node.name: expected[GIVEN + op] for node, op in zip(forward.outputs, graph.outputs, strict=True)}
    gradients = {name: x for name, x in expected.items() if name.startswith(UPDATE)}
    with Pool(ranks) as pool:
        results = pool.run(compare_stages, ranks, planned, given, outputs, gradients)
    return verdict(results, f"{len(outputs)} outputs and {len(gradients)} gradients", console)


def _check(plan: ShardingPlan, module: nn.Module, inputs: tuple, console: Console) -> int:
    from shoal.launch.worker_pool import Pool

    given, expected = reference(module, inputs, plan.graph)
    with Pool(plan.mesh.ranks) as pool:
        results = pool.run(compare, plan.mesh.ranks, plan, given, expected)
    what = f"{len(expected)} outputs and gradients, and every weight after a step"
    return verdict(results, what, console)


def verdict(results: list[dict[str, float]], what: str, console: Console) -> int:
    """Say whether differences on all ranks are small; the exit code."""
    worst, name = worst_of(results)
    right = worst <= EXACT
    words = "as one device computes it" if right else f"not what one device computes: {name} is off"
    console.print(Text(
        f"\nrun on {len(results)} ranks in float64, {words}: {what}; largest difference {worst:.1e} ({name})"
    ), soft_wrap=True)  # fmt: skip
    return 0 if right else 1
