"""`shoal plan auto`: how to split any module over a cluster, found by itself, beside the splits that people write."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from pydantic import PositiveInt
from rich.console import Console
from rich.text import Text
from torch import nn

from shoal.catalog import model_shape, tables
from shoal.catalog.clusters import Cluster, cluster
from shoal.comm.sharding.notation import NamedMesh, parse_mesh
from shoal.config import Section
from shoal.cost.units import BYTES, parse, show_bytes, show_seconds
from shoal.errors import UsageError, did_you_mean
from shoal.models.transformer import Transformer, initialise
from shoal.plan.auto.graph import Graph
from shoal.plan.auto.ilp import NothingFits, solve
from shoal.plan.auto.layers import Layers
from shoal.plan.auto.pipelined import Pipelined, compare_stages, grids
from shoal.plan.auto.plan import Plan, plan_of
from shoal.plan.auto.price import Prices
from shoal.plan.auto.problem import GIVEN, UPDATE, Builder, Bytes
from shoal.plan.auto.rivals import rivals
from shoal.plan.auto.stages import latency
from shoal.plan.auto.trace import Forward, forward_of, graph_of
from shoal.plan.run import KINDS
from shoal.plan.search_command import table
from shoal.precision.formats import FORMATS, Formats

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
    """The devices as a grid, as x=2,y=4 (default: every grid of up to two axes, the best of them is shown)."""

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
    """Of a device, for weights, gradients, AdamW's states and activations, as 16GB (default: the accelerator's)."""

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
    capacity = parse(options.memory, BYTES, where="--memory") if options.memory else machine.memory_bytes
    if options.check and machine.size > MOST_RANKS:
        raise UsageError(f"--check: {machine.size} processes, one for each device; at most {MOST_RANKS} are started")
    if options.stages > 1 and options.mesh:
        raise UsageError("--mesh with --stages: every stage has a grid of its own.\n  Leave one of them out.")
    module, inputs = _subject(options)
    console = Console(highlight=False)
    if options.stages > 1:
        return _pipeline(options, machine, formats, capacity, (module, inputs), console)
    graph = graph_of(module, inputs)
    best: tuple[Plan, list[tuple[str, Plan | None]]] | None = None
    for mesh in meshes:
        found = _planned(graph, machine, mesh, formats, options.microbatches, capacity)
        if found is not None and (best is None or found[0].seconds < best[0].seconds):
            best = found
    if best is None:
        console.print(Text(f"No sharding needs as little as {show_bytes(capacity)} on a device."), soft_wrap=True)
        return 1
    for line in _lines(options, machine, graph, *best):
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


def _subject(options: AutoOptions) -> tuple[nn.Module, tuple]:
    """The module in float64, and example inputs; of a model that is not checked, shapes alone."""
    if options.module:
        return _own(options.module, check=options.check)
    shape = model_shape(options.model)
    if shape.experts or shape.depths:
        raise UsageError(f"--model {options.model}: which tokens an expert gets depends on numbers; plan dense models")
    if options.layers:
        if options.layers > shape.layers:
            raise UsageError(f"--layers {options.layers}: {options.model} has {shape.layers}")
        shape = shape.model_copy(update={"layers": options.layers})
    if shape.family == "gpt" and options.seq > shape.max_sequence:
        raise UsageError(f"--seq {options.seq}: {options.model} has positions for {shape.max_sequence}")
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
    return module.double(), tuple(
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs
    )


def _planned(
    graph: Graph, machine: Cluster, mesh: NamedMesh, formats: Formats, microbatches: int, capacity: float
) -> tuple[Plan, list[tuple[str, Plan | None]]] | None:
    """The best plan on a mesh, with the splits by hand; None if none fits."""
    prices = Prices.on(machine, mesh, KINDS[formats.compute.name], formats.compute.itemsize)
    builder = Builder(graph, prices, bytes_of(formats), microbatches)
    problem = builder.problem()
    try:
        best = plan_of(builder, problem, solve(problem, capacity))
    except NothingFits:
        return None
    others: list[tuple[str, Plan | None]] = []
    for name, restricted in rivals(builder, problem).items():
        try:
            others.append((name, plan_of(builder, restricted, solve(restricted, capacity))))
        except NothingFits:
            others.append((name, None))
    return best, others


def bytes_of(formats: Formats) -> Bytes:
    """What a weight needs beside itself, with AdamW."""
    master = formats.storage.itemsize if formats.master else 0
    return Bytes(formats.reduce.itemsize, 2 * formats.state.itemsize + master)


# ---- what is said ----------------------------------------------------------------------------------------------------


def _lines(
    options: AutoOptions, machine: Cluster, graph: Graph, plan: Plan, others: list[tuple[str, Plan | None]]
) -> Iterator[str]:
    """All that is printed."""
    what = options.module or options.model
    count = sum(op.numel for op in graph.parameters)
    yield f"{what}: {count:,} parameters, {len(graph.ops):,} operators; {options.precision}, AdamW"
    yield machine.describe()
    yield (f"as a mesh {plan.mesh}: {show_seconds(plan.seconds)} a micro-batch"
           + (f" of {options.microbatches}" if options.microbatches > 1 else "")
           + f", {show_seconds(plan.communication)} of it communication; "
           f"{show_bytes(plan.memory)} of weights and states, {show_bytes(plan.saved)} of activations"
           + ("" if plan.proven else "; the best that was found in time"))  # fmt: skip
    yield ""
    yield from table(["weight", "kept", "multiplied as", "optimizer state"], list(_weights(plan)))
    yield ""
    rows = list(_moves(plan))
    if rows:
        yield from table(["", "tensor", "collective", "from", "to", "sent by a device", "time"], rows)
    else:
        yield "Nothing is communicated."
    yield ""
    yield from table(["split", "micro-batch", "communication", "weights and states", ""], list(_rivals(plan, others)))


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _weights(plan: Plan) -> Iterator[list[str]]:
    """Weights that are split alike in all layers in one row."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, ways in plan.weights().items():
        found.setdefault((_pattern(name), *map(str, ways)), []).append(name)
    several = {pattern: sum(key[0] == pattern for key in found) > 1 for pattern, *_ in found}
    for (pattern, *ways), names in found.items():
        yield [", ".join(names) if several[pattern] else pattern, *ways]


def _moves(plan: Plan) -> Iterator[list[str]]:
    """Collectives of the same kind, of tensors of one shape, in one row."""
    found: dict[tuple[str, ...], list] = {}
    for move in plan.found:
        op = plan.graph.ops[move.name]
        shape = "x".join(map(str, op.shape)) or "scalar"
        what = " then ".join(str(t.move) for t in move.transfers)
        key = (move.phase, shape, what, str(move.transfers[0].before), str(move.transfers[-1].after))
        found.setdefault(key, []).append(move)
    for (phase, shape, what, before, after), moves in found.items():
        times = f"{len(moves)} x " if len(moves) > 1 else ""
        sent, seconds = sum(m.sent for m in moves), sum(m.seconds for m in moves)
        yield [phase, times + shape, what, before, after, show_bytes(sent), show_seconds(seconds)]


def _rivals(plan: Plan, others: list[tuple[str, Plan | None]]) -> Iterator[list[str]]:
    yield ["found", show_seconds(plan.seconds), show_seconds(plan.communication), show_bytes(plan.memory), ""]
    for name, other in others:
        if other is None:
            yield [name, "does not fit", "", "", ""]
        else:
            more = f"{max(0.0, 100 * (other.seconds / plan.seconds - 1)):+.1f} %"
            yield [name, show_seconds(other.seconds), show_seconds(other.communication), show_bytes(other.memory), more]


# ---- stages ----------------------------------------------------------------------------------------------------------


def _pipeline(
    options: AutoOptions, machine: Cluster, formats: Formats, capacity: float, subject: tuple, console: Console
) -> int:
    """Both levels: stages on parts of the cluster, beside all devices for all layers."""
    forward = forward_of(*subject)
    layers = Layers(forward, LAYERS_PER_STAGE * options.stages)
    joint = Pipelined(
        layers, machine, KINDS[formats.compute.name], formats.compute.itemsize, bytes_of(formats),
        options.microbatches, capacity,
    )  # fmt: skip
    found = joint.stages(options.stages)
    if found is None:
        console.print(Text(f"No pipeline needs as little as {show_bytes(capacity)} on a device."), soft_wrap=True)
        return 1
    planned = joint.planned(found)
    total = latency(found, options.microbatches)
    single = joint.cost(0, joint.count, (machine.nodes, machine.per_node), 1) * options.microbatches
    lines = [
        f"{options.module or options.model}: {joint.count} layers of operators; {options.precision}, AdamW",
        machine.describe(),
        f"{len(planned)} stages, {options.microbatches} micro-batches: {show_seconds(total)} a step; without stages "
        + (show_seconds(single) if single < float("inf") else "it does not fit"),
    ]
    for number, stage in enumerate(planned):
        devices = f"device {stage.rank}" + (f" to {stage.rank + stage.stage.devices - 1}" * (stage.stage.devices > 1))
        lines += ["", f"stage {number}: layers {stage.stage.first} to {stage.stage.last - 1} on {devices}, mesh "
                  f"{stage.plan.mesh or '1'}: {show_seconds(stage.stage.seconds)} a micro-batch, "
                  f"{show_bytes(stage.plan.memory)} of weights and states"]  # fmt: skip
        lines += table(["weight", "kept", "multiplied as", "optimizer state"], list(_weights(stage.plan)))
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    return _check_stages(planned, forward, subject, machine.size, console) if options.check else 0


def _check_stages(planned: list, forward: Forward, subject: tuple, ranks: int, console: Console) -> int:
    from shoal.comm.pool import Pool
    from shoal.plan.auto.execute import reference

    graph = graph_of(*subject)
    given, expected = reference(*subject, graph)
    outputs = {node.name: expected[GIVEN + op] for node, op in zip(forward.outputs, graph.outputs, strict=True)}
    gradients = {name: x for name, x in expected.items() if name.startswith(UPDATE)}
    with Pool(ranks) as pool:
        results = pool.run(compare_stages, ranks, planned, given, outputs, gradients)
    return _verdict(results, f"{len(outputs)} outputs and {len(gradients)} gradients", console)


def _check(plan: Plan, module: nn.Module, inputs: tuple, console: Console) -> int:
    from shoal.comm.pool import Pool
    from shoal.plan.auto.execute import compare, reference

    given, expected = reference(module, inputs, plan.graph)
    with Pool(plan.mesh.ranks) as pool:
        results = pool.run(compare, plan.mesh.ranks, plan, given, expected)
    what = f"{len(expected)} outputs and gradients, and every weight after a step"
    return _verdict(results, what, console)


def _verdict(results: list[dict[str, float]], what: str, console: Console) -> int:
    worst, name = max((error, name) for errors in results for name, error in errors.items())
    right = worst < EXACT
    words = "as one device computes it" if right else f"not what one device computes: {name} is off"
    console.print(Text(
        f"\nrun on {len(results)} ranks in float64, {words}: {what}; largest difference {worst:.1e} ({name})"
    ), soft_wrap=True)  # fmt: skip
    return 0 if right else 1
