"""Search for layouts by model and cluster name, and answer other questions about clusters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

from pydantic import PositiveInt

from shoal.base.calls import check_arguments
from shoal.base.errors import UsageError
from shoal.base.units import DAY, HOUR
from shoal.planning.cost.flops import layer_flops
from shoal.planning.cost.memory.stage import StageMemory
from shoal.planning.describe import DEFAULT_MODEL, build_run, choose_batch
from shoal.planning.estimable import check_closed_form, check_trained
from shoal.planning.full_training import FullTraining, find_price, train_fully
from shoal.planning.run import EstimatedRun
from shoal.planning.search.kinds import TIE
from shoal.planning.search.nearby import nearby_runs
from shoal.planning.search.plan import Plan, Progressing
from shoal.planning.search.search import search
from shoal.planning.search.space import LayoutSpace, check_fixed, layouts
from shoal.planning.search.usual import find_usual
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.catalog.software import Software
from shoal.spec.config import RunConfig
from shoal.spec.layout import MOST_RANKS, Layout

SIMPLE = ("1f1b", "interleaved-1f1b", "zb-h1")  # schedules of `nearby` plans
MOST_NODES = 4096  # maximum number of nodes that `fewest` tries


class TrainingAnswer(NamedTuple):
    """Number of nodes for a complete training within a time or a budget.

    Attributes:
        tokens: tokens of the training.
        price: dollars per device and hour; None if unknown.
        days, budget: limit in days, or in dollars.
        found: with a budget the fastest affordable plan, with days the one with the fewest nodes; None if no plan is.
        plans: the best on 1, 2, 4, ... nodes, and the one found; fewest devices first.
    """

    tokens: float
    price: float | None
    days: float | None
    budget: float | None
    found: Plan | None
    plans: list[Plan]

    def training(self, plan: Plan) -> FullTraining:
        """Return the complete training by a plan's best layout."""
        return train_fully(plan.run, plan.found.seconds, tokens=self.tokens, price=self.price)


class LayoutPlanner:
    """Searches the layouts of one model on one cluster.

    Args: as for `plan`.

    Attributes:
        run: the run to plan; its layout is ignored.
        space: the searched choices.

    Raises:
        UsageError: an unknown name, a batch smaller than one sequence, or a field that is not searched.

    >>> import shoal
    >>> planner = shoal.LayoutPlanner("llama-3-8b", "2x8xH100", global_batch=8, fixed={"recompute": "none", "pp": 1})
    >>> planner.fewest().run.cluster.size
    4
    """

    @check_arguments
    def __init__(
        self, model: str | None = None, cluster: str = "8xH100", *, config: RunConfig | None = None,
        global_batch: int | str | None = None, sequence_length: PositiveInt | None = None, precision: str | None = None,
        optimizer: str | None = None, fixed: str | Mapping[str, Any] = "", software: str | Software = "shoal",
    ):  # fmt: skip
        self.run = build_run(model, cluster, config, sequence_length, global_batch, precision, optimizer, software)
        self._chooses_batch = global_batch is None and config is None
        if (size := self.run.cluster.size) > MOST_RANKS:
            raise UsageError(f"--cluster {cluster}: {size:,} devices; a layout has at most {MOST_RANKS:,}.")
        self.model = model or (config.model.name if config else DEFAULT_MODEL)
        self.fixed = fixed if isinstance(fixed, str) else ",".join(f"{name}={value}" for name, value in fixed.items())
        self.space = LayoutSpace(fixed=check_fixed(fixed))
        if self.run.software.name == "shoal":
            check_trained(self.run, Layout(micro_batch=self.run.global_batch))  # requirements independent of the layout
        else:
            check_closed_form(replace(self.run, layout=Layout().model_copy(update=self.space.fixed)))

    def plan(self, progress: Progressing | None = None) -> Plan:
        """Find the best layouts that fit, of each kind.

        Args:
            progress: called with branches done, all branches, and the results so far.

        Raises:
            UsageError: no layout can split the model and the batch over the cluster.
        """
        if self._chooses_batch:
            batch = choose_batch(self.run.sequence_length, self.run.cluster.size)
            chosen = replace(self.run, global_batch=batch)
            self.run = chosen if self._divides(chosen) else self.run  # fixed fields may need another
        run = self.run
        if not self._divides(run):
            given = f" with --fix {self.fixed}" if self.fixed else ""
            raise UsageError(
                f"no layout of {run.cluster.size:,} devices{given} can split {self.model} and "
                f"{run.global_batch:,} sequences of {run.sequence_length:,} tokens, whatever the memory."
                f"\n  {self._remedy()}"
            )
        plan = search(run, self.space, progress=progress)
        plan.nearby = self._faster_nearby(plan, progress)
        if not self.fixed and run.shape.depths is None and (usual := find_usual(run)):
            plan.usual = usual
        return plan

    def _divides(self, run: EstimatedRun) -> bool:
        """Return whether any layout can split the model and the batch over the cluster."""
        return next(layouts(run, self.space), None) is not None

    def _remedy(self) -> str:
        """Return the nearest global batch and cluster that a layout can split."""
        batch, part = (next(filter(self._divides, runs), None) for runs in nearby_runs(self.run, more=0))
        found = [f"--global-batch {batch.global_batch}"] if batch else []
        found += [f"--cluster {part.cluster.name}"] if part else []
        if found:
            return f"Give {' or '.join(found)}."
        return "Fix fewer fields, or change --cluster, --global-batch or --sequence-length."

    def _faster_nearby(self, plan: Plan, progress: Progressing | None) -> list[Plan]:
        """Find plans with more tokens per second, beyond a tie, with another global batch, and on fewer devices.

        If nothing fits, the fastest that do. Only even stages and the simpler schedules are tried, unless fields are
        fixed.
        """
        found, space = [], self.space if self.fixed else replace(self.space, schedules=SIMPLE, uneven=False)
        for runs in nearby_runs(plan.run):
            best, rate = None, plan.tokens_per_second
            for run in runs:
                within = run.tokens / (rate * (1 + TIE)) if rate else inf
                other = search(run, space, diverse=False, within=within, progress=progress)
                if other.best:
                    best, rate = other, other.tokens_per_second
            if best:
                found.append(best)
        return found

    def best_on(self, cluster: Cluster, progress: Progressing | None = None, within: float = inf) -> Plan | None:
        """Find the fastest layout on another cluster; None if none fits within ``within`` seconds per step."""
        run = replace(self.run, cluster=cluster)
        plan = search(run, self.space, diverse=False, within=within, progress=progress)
        return plan if plan.best else None

    def on_nodes(self, nodes: Sequence[int], progress: Progressing | None = None) -> list[Plan | None]:
        """Find the best layout for each number of nodes; None if nothing fits.

        Raises:
            UsageError: the cluster cannot have this number of nodes.
        """
        return [self.best_on(machine, progress) for machine in [self.run.cluster.part(count) for count in nodes]]

    def fewest(self, progress: Progressing | None = None) -> Plan | None:
        """Find the fewest devices of the cluster's kind on which the model fits; None if it fits on none.

        Tries one device, then one more of its node at a time, then one more node at a time, starting at the number that
        the weights alone need.
        """
        run, machine = self.run, self.run.cluster
        sizes = [(1, each) for each in range(1, machine.per_node + 1)]
        if machine.nic:
            sizes += [(nodes, machine.per_node) for nodes in range(2, MOST_NODES + 1)]
        weights, capacity = run.shape.parameters() * run.policy.compute.itemsize, StageMemory(run).capacity
        enough = (self.run.cluster.part(nodes, each) for nodes, each in sizes if nodes * each * capacity >= weights)
        return next(filter(None, (self.best_on(cluster, progress) for cluster in enough)), None)

    def what_if(self, progress: Progressing | None = None) -> dict[str, Plan | None]:
        """Find the best layout on the unchanged cluster and with each single change; None if nothing fits."""
        machine = self.run.cluster
        chip = machine.accelerator

        def accelerator(**changed: Any) -> Cluster:
            return replace(machine, accelerator=chip.model_copy(update=changed))

        cases = {"as it is": machine}
        for place, link in (("network between nodes", "nic"), ("links inside a node", "inside")):
            if found := getattr(machine, link):
                for word, factor in (("twice", 2), ("half", 0.5)):
                    wider = found.model_copy(update={"bandwidth": factor * found.bandwidth})
                    cases[f"{word} the {place}"] = replace(machine, **{link: wider})
        cases |= {
            "twice the memory": accelerator(memory_bytes=2 * chip.memory_bytes),
            "half the memory": accelerator(memory_bytes=0.5 * chip.memory_bytes),
            "twice the memory's bandwidth": accelerator(memory_bandwidth=2 * chip.memory_bandwidth),
            "twice the arithmetic": accelerator(peak_flops={kind: 2 * peak for kind, peak in chip.peak_flops.items()}),
        }
        return {words: self.best_on(changed, progress) for words, changed in cases.items()}

    def train_within(
        self, *, days: float | None = None, budget: float | None = None, tokens: float | None = None,
        price: float | None = None, progress: Progressing | None = None,
    ) -> TrainingAnswer:  # fmt: skip
        """Find the number of nodes, up to the cluster's, for a complete training within some days or dollars.

        Args:
            days: maximum duration; the fewest nodes that keep it are found.
            budget: maximum rent in dollars; the fastest affordable number of nodes is found.
            tokens: tokens of the complete training (default: 20 per parameter).
            price: dollars per device and hour (default: the catalog's list price).

        Raises:
            UsageError: a budget, no price, and the catalog has none.
        """
        run = self.run
        tokens, hourly = tokens or 20 * run.shape.parameters(), find_price(run, price, needed=budget is not None)
        steps = tokens / run.tokens
        of_size = {plan.run.cluster.size: plan for plan in self.doubling(progress)}
        if budget is not None and hourly:
            found = self.affordable(budget / hourly * HOUR / steps, progress)
        elif days is not None:
            found = self.fast_enough(days * DAY / steps, list(of_size.values()), progress)
        if found:
            of_size[found.run.cluster.size] = found
        return TrainingAnswer(tokens, hourly, days, budget, found, [of_size[size] for size in sorted(of_size)])

    def limit(self, days: float, budget: float, price: float | None = None) -> None:
        """Reduce the cluster to the most nodes that a budget in dollars pays for some days.

        Raises:
            UsageError: it pays for no node, or there is no price.
        """
        machine, hourly = self.run.cluster, find_price(self.run, price, needed=True) or inf
        nodes = int(budget / (days * DAY / HOUR * hourly) / machine.per_node)
        if not nodes:
            least = days * DAY / HOUR * hourly * machine.per_node
            given = f"--budget {budget:g}: a node for {days:g} days is ${least:,.0f}"
            raise UsageError(f"{given}.\n  Give more, or fewer days.")
        if nodes < machine.nodes:
            self.run = replace(self.run, cluster=machine.part(nodes))

    def doubling(self, progress: Progressing | None = None) -> Iterator[Plan]:
        """Find the best plan on 1, 2, 4, ... nodes up to the cluster's, where the run fits."""
        nodes = self.run.cluster.nodes
        counts = [1 << power for power in range((nodes - 1).bit_length())]
        return filter(None, self.on_nodes([*counts, nodes], progress))

    def fast_enough(
        self, seconds: float, known: Sequence[Plan], progress: Progressing | None = None
    ) -> Plan | None:  # fmt: skip
        """Find the fewest nodes, up to the cluster's, whose step takes at most some seconds.

        Bisects between the largest known plan that is too slow and the smallest that is not: with one node less, a step
        takes longer.

        Args:
            known: plans of some numbers of nodes, see `doubling`.
        """
        found = next((plan for plan in known if plan.found.seconds <= seconds), None)
        if found is None:
            return None
        most = found.run.cluster.nodes
        least = max((plan.run.cluster.nodes for plan in known if plan.run.cluster.nodes < most), default=0)
        while most - least > 1:
            nodes = (least + most) // 2
            plan = self.best_on(self.run.cluster.part(nodes), progress, seconds)
            least, most, found = (least, nodes, plan) if plan else (nodes, most, found)
        return found

    def affordable(self, device_seconds: float, progress: Progressing | None = None) -> Plan | None:
        """Find the fastest plan, on up to the cluster's nodes, within these device-seconds per step.

        Neither time nor price is monotonic in the number of nodes, because a batch divides only into some numbers of
        replicas. So every number is searched for a layout that is cheap enough and faster than the best before, until
        the matrix products alone would take too long at the accelerators' peak.
        """
        run, found = self.run, None
        layers = [layer_flops(run.shape, run.sequence_length, layer) for layer in range(run.shape.layers)]
        flops = 3 * run.tokens * sum(layer.projections + layer.mlp for layer in layers)  # attention may be halved
        products = flops / run.cluster.accelerator.dense_flops(run.products)
        for nodes in range(run.cluster.nodes, 0, -1):
            machine = self.run.cluster.part(nodes)
            most = min(device_seconds / machine.size, found.found.seconds if found else inf)
            if products / machine.size > most:
                break
            found = self.best_on(machine, progress, most) or found
        return found


def plan(
    model: str | None = None, cluster: str = "8xH100", *, config: RunConfig | None = None,
    global_batch: int | str | None = None, sequence_length: PositiveInt | None = None, precision: str | None = None,
    optimizer: str | None = None, fixed: str | Mapping[str, Any] = "", software: str | Software = "shoal",
) -> Plan:  # fmt: skip
    """Find the fastest layouts of a model on a cluster that fit its memory.

    Args:
        model: catalog name (default: the config's model, else llama-3-8b).
        cluster: cluster name, such as 8xH100, 64x8xH100-IB400 or v5p-4096.
        config: a run's config, the source of arguments that are not given; its layout is ignored.
        global_batch: sequences per step, or tokens as "512K" or "4M" (4 x 1024 x 1024; default: the config's, else
            about 4M, divided by the devices as far as possible).
        sequence_length: tokens per sequence (default: the config's, else the longest that the model was trained for).
        precision: precision, see ``train.precision`` (default: the config's, else bf16).
        optimizer: optimizer name (default: the config's, else adamw).
        fixed: fixed fields of the layout, as a mapping or as text: "tp=8,recompute=full".
        software: the software that trains, see `shoal.estimate`.

    Returns:
        The plan; ``best`` has layouts of different kinds with their step time in seconds, their memory and their role,
        the recommended one first. It is empty if nothing fits.

    Raises:
        UsageError: an unknown name, or no layout can split the model and the batch over the cluster.

    >>> import shoal
    >>> best = shoal.plan("llama-3.2-1b", "2xH100", global_batch=8, sequence_length=1024).best[0]
    >>> best.layout.world_size
    2
    """
    planner = LayoutPlanner(
        model, cluster, config=config, global_batch=global_batch, sequence_length=sequence_length,
        precision=precision, optimizer=optimizer, fixed=fixed, software=software,
    )  # fmt: skip
    return planner.plan()
