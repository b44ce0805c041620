"""What else a search answers: how few devices, how many for some money, what other hardware would change, a map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from shoal.base.errors import UsageError
from shoal.planning.cost.flops import layer_flops
from shoal.planning.cost.memory.stage import StageMemory
from shoal.planning.run import EstimatedRun
from shoal.planning.search.search import Plan, PricedLayout, Progressing, search
from shoal.planning.search.space import LayoutSpace
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.catalog.links import Link

HOUR = 3600.0
MOST_NODES = 4096  # that `fewest` tries


class Answer(NamedTuple):
    """A search on a cluster that found something."""

    plan: Plan

    @property
    def run(self) -> EstimatedRun:
        """What it was for."""
        return self.plan.run

    @property
    def found(self) -> PricedLayout:
        """The best layout."""
        return self.plan.best[0]


def best(
    run: EstimatedRun, space: LayoutSpace, progress: Progressing | None = None, within: float = inf
) -> Answer | None:
    """The fastest layout that fits, if a step of it takes no longer than ``within`` seconds; None where none does."""
    plan = search(run, space, count=1, within=within, progress=progress)
    return Answer(plan) if plan.best else None


def sized(machine: Cluster, nodes: int, per_node: int | None = None) -> Cluster:
    """The same kind of cluster with another number of nodes, or a part of one.

    Raises:
        UsageError: of a torus, which is a slice of a pod.
    """
    if machine.torus:
        raise UsageError(f"cluster '{machine.name}': slices of a pod have sizes of their own.\n  Plan them one by one.")
    if nodes > 1 and machine.nic is None:
        raise UsageError(
            f"cluster '{machine.name}' is one node, which says nothing of a network.\n  Name two, as 2x{machine.name}."
        )
    each = per_node or machine.per_node
    nics = max(1, machine.nics * each // machine.per_node)
    return replace(machine, nodes=nodes, per_node=each, nics=nics, nic=machine.nic if nodes > 1 else None)


def fewest(run: EstimatedRun, space: LayoutSpace, progress: Progressing | None = None) -> Answer | None:
    """The least cluster on which the run fits: one device, one more of its node at a time, then one more node.

    The weights in their number format alone need so many at least; no fewer are tried.
    """
    machine = run.cluster
    sizes = [(1, each) for each in range(1, machine.per_node + 1)]
    if machine.nic:
        sizes += [(nodes, machine.per_node) for nodes in range(2, MOST_NODES + 1)]
    weights, room = run.shape.parameters() * run.policy.compute.itemsize, StageMemory(run).capacity
    for nodes, each in sizes:
        if nodes * each * room < weights:
            continue
        answer = best(replace(run, cluster=sized(machine, nodes, each)), space, progress)
        if answer:
            return answer
    return None


def machines(run: EstimatedRun, space: LayoutSpace, progress: Progressing | None = None) -> Iterator[Answer]:
    """The best on 1, 2, 4, ... nodes up to the cluster's, where the run fits."""
    nodes = 1
    while nodes <= run.cluster.nodes:
        answer = best(replace(run, cluster=sized(run.cluster, nodes)), space, progress)
        if answer:
            yield answer
        nodes = run.cluster.nodes if nodes < run.cluster.nodes < 2 * nodes else 2 * nodes


def affordable(
    run: EstimatedRun, space: LayoutSpace, device_seconds: float, progress: Progressing | None = None
) -> Answer | None:
    """The fastest on any number of nodes up to the cluster's, of those whose step takes so many device-seconds at most.

    Neither time nor price need fall or rise evenly with the nodes: a batch divides into some replicas, and not into
    others. So every number is asked for a layout that is cheap enough and faster than the best before, until the
    products of the layers alone would take too long at the accelerators' peak.
    """
    found = None
    layers = [layer_flops(run.shape, run.sequence_length, layer) for layer in range(run.shape.layers)]
    flops = 3 * run.tokens * sum(layer.projections + layer.mlp for layer in layers)  # cores of attention may be halved
    products = flops / run.cluster.accelerator.dense_flops(run.products)
    for nodes in range(run.cluster.nodes, 0, -1):
        machine = sized(run.cluster, nodes)
        most = min(device_seconds / machine.size, found.found.seconds if found else inf)
        if products / machine.size > most:
            break
        found = best(replace(run, cluster=machine), space, progress, most) or found
    return found


class BudgetAnswer(NamedTuple):
    """What some money pays for.

    Attributes:
        budget: dollars.
        price: dollars for a device and hour.
        tokens, steps: of the whole training.
        found: the fastest that the budget pays for; None if it pays for nothing.
        answers: the best on 1, 2, 4, ... nodes, and the one found; fewest devices first.
    """

    budget: float
    price: float
    tokens: float
    steps: float
    found: Answer | None
    answers: list[Answer]

    def seconds(self, answer: Answer) -> float:
        """Of the whole training."""
        return answer.found.seconds * self.steps

    def dollars(self, answer: Answer) -> float:
        """That the whole training costs."""
        return self.seconds(answer) / HOUR * answer.run.cluster.size * self.price


def within_budget(
    run: EstimatedRun, space: LayoutSpace, budget: float, *, tokens: float | None = None, price: float | None = None,
    progress: Progressing | None = None,
) -> BudgetAnswer:  # fmt: skip
    """The fastest training for some money, beside what 1, 2, 4, ... nodes take.

    Args:
        budget: dollars.
        tokens: of the whole training (default: 20 for each parameter).
        price: dollars for a device and hour (default: the catalog's).

    Raises:
        UsageError: there is no price.
    """
    hourly = price or run.cluster.accelerator.dollars_per_hour
    if not hourly:
        raise UsageError(f"--budget: {run.cluster.accelerator.name} has no price in the catalog.\n  Give --price.")
    tokens = tokens or 20 * run.shape.parameters()
    steps = tokens / run.tokens
    of_size = {answer.run.cluster.size: answer for answer in machines(run, space, progress)}
    found = affordable(run, space, budget / hourly * HOUR / steps, progress)
    if found:
        of_size[found.run.cluster.size] = found
    return BudgetAnswer(budget, hourly, tokens, steps, found, [of_size[size] for size in sorted(of_size)])


def what_if(
    run: EstimatedRun, space: LayoutSpace, progress: Progressing | None = None
) -> Iterator[tuple[str, Answer | None]]:
    """The best layout on the cluster as it is, and with one thing of it changed."""
    machine = run.cluster
    chip = machine.accelerator

    def accelerated(**factors: float) -> Cluster:
        changed = {name: getattr(chip, name) * factor for name, factor in factors.items()}
        return replace(machine, accelerator=chip.model_copy(update=changed))

    def wider(link: Link, factor: float) -> Link:
        return link.model_copy(update={"bandwidth": link.bandwidth * factor})

    faster = chip.model_copy(update={"peak_flops": {kind: 2 * peak for kind, peak in chip.peak_flops.items()}})
    cases = {"as it is": machine}
    if machine.nic:
        for words, factor in (("twice", 2), ("half", 0.5)):
            cases[f"{words} the network between nodes"] = replace(machine, nic=wider(machine.nic, factor))
    if machine.inside:
        for words, factor in (("twice", 2), ("half", 0.5)):
            cases[f"{words} the links inside a node"] = replace(machine, inside=wider(machine.inside, factor))
    cases |= {
        "twice the memory": accelerated(memory_bytes=2), "half the memory": accelerated(memory_bytes=0.5),
        "twice the memory's bandwidth": accelerated(memory_bandwidth=2),
        "twice the arithmetic": replace(machine, accelerator=faster),
    }  # fmt: skip
    for words, changed in cases.items():
        yield words, best(replace(run, cluster=changed), space, progress)


def on_nodes(
    run: EstimatedRun, nodes: Sequence[int], space: LayoutSpace, progress: Progressing | None = None
) -> list[Answer | None]:
    """The best layout on each of some numbers of nodes.

    Raises:
        UsageError: the cluster cannot have so many.
    """
    sizes = [replace(run, cluster=sized(run.cluster, n)) for n in nodes]
    return [best(size, space, progress) for size in sizes]
