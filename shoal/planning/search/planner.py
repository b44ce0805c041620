"""A model and a cluster by their names, and the best layouts for them: the public side of the search."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.base.errors import UsageError
from shoal.planning.describe import with_positions
from shoal.planning.estimable import check_device, check_names, check_trained
from shoal.planning.run import EstimatedRun
from shoal.planning.search.fixed import check_fixed
from shoal.planning.search.queries import Answer, BudgetAnswer, fewest, on_nodes, what_if, within_budget
from shoal.planning.search.search import Plan, Progressing, search
from shoal.planning.search.space import LayoutSpace, layouts
from shoal.spec.catalog import model_shape
from shoal.spec.catalog.clusters import cluster as cluster_of
from shoal.spec.layout import Layout
from shoal.spec.layout.layout import MOST_RANKS


class LayoutPlanner:
    """Searches the layouts of one model on one cluster.

    Args:
        model: a name of the catalog.
        cluster: such as 8xH100, 64x8xH100-IB400 or v5p-4096.
        global_batch: sequences of a step, or tokens as "512K" or "4M" (4 x 1024 x 1024).
        sequence_length: tokens of a sequence.
        precision: number formats, as ``train.precision`` names them.
        optimizer: the update rule.
        fixed: fields of the layout that are given, as a mapping or as text: "tp=8,recompute=full".

    Attributes:
        run: what is planned; its layout says nothing.
        space: what is chosen from.

    Raises:
        UsageError: a name that is not known, a batch that makes no sequence, or a field that is not searched.

    >>> import shoal
    >>> planner = shoal.LayoutPlanner("llama-3-8b", "2x8xH100", global_batch=8, fixed={"recompute": "none", "pp": 1})
    >>> planner.fewest().run.cluster.size
    4
    """

    def __init__(
        self, model: str = "llama-3-8b", cluster: str = "8xH100", *, global_batch: int | str = "4M",
        sequence_length: int = 4096, precision: str = "bf16", optimizer: str = "adamw",
        fixed: str | Mapping[str, Any] = "",
    ):  # fmt: skip
        shape = with_positions(model_shape(model), sequence_length)
        check_names(precision, optimizer)
        machine = cluster_of(cluster)
        if machine.size > MOST_RANKS:
            raise UsageError(f"--cluster {cluster}: {machine.size:,} devices; a layout has at most {MOST_RANKS:,}.")
        sequences = _sequences(global_batch, sequence_length)
        self.model = model
        self.fixed = fixed if isinstance(fixed, str) else ",".join(f"{name}={value}" for name, value in fixed.items())
        self.run = EstimatedRun(shape, Layout(), machine, sequence_length, sequences, precision, optimizer)
        check_device(self.run)
        check_trained(self.run, Layout(micro_batch=self.run.global_batch))  # what no layout could change
        self.space = LayoutSpace(fixed=check_fixed(fixed))

    def plan(self, count: int = 10, progress: Progressing | None = None) -> Plan:
        """Find the fastest layouts that fit.

        Args:
            count: how many to list.
            progress: called with branches done, all branches, and what is found so far.

        Raises:
            UsageError: no layout can split the model and the batch over the cluster.
        """
        run = self.run
        if next(layouts(run, self.space), None) is None:
            given = f" with --fix {self.fixed}" if self.fixed else ""
            raise UsageError(
                f"no layout of {run.cluster.size:,} devices{given} can split {self.model} and "
                f"{run.global_batch:,} sequences of {run.sequence_length:,} tokens, whatever the memory."
                "\n  Fix fewer fields, or change --cluster, --global-batch or --seq."
            )
        return search(run, self.space, count=count, progress=progress)

    def fewest(self, progress: Progressing | None = None) -> Answer | None:
        """Find the fewest devices of the cluster's kind on which the model fits; None if it fits on none."""
        return fewest(self.run, self.space, progress)

    def what_if(self, progress: Progressing | None = None) -> dict[str, Answer | None]:
        """Find the best layout on the cluster as it is, and with one thing of it changed; None where nothing fits."""
        return dict(what_if(self.run, self.space, progress))

    def within_budget(
        self, budget: float, tokens: float | None = None, price: float | None = None,
        progress: Progressing | None = None,
    ) -> BudgetAnswer:  # fmt: skip
        """Find the number of nodes, up to the cluster's, on which a whole training is fastest for some money.

        Args:
            budget: dollars.
            tokens: of the whole training (default: 20 for each parameter).
            price: dollars for a device and hour (default: the catalog's list price).

        Raises:
            UsageError: neither the catalog nor the caller has a price.
        """
        return within_budget(self.run, self.space, budget, tokens=tokens, price=price, progress=progress)

    def on_nodes(self, nodes: Sequence[int], progress: Progressing | None = None) -> list[Answer | None]:
        """Find the best layout on each of some numbers of nodes; None where nothing fits.

        Raises:
            UsageError: the cluster cannot have so many nodes.
        """
        return on_nodes(self.run, nodes, self.space, progress)


def plan(
    model: str = "llama-3-8b", cluster: str = "8xH100", *, global_batch: int | str = "4M", sequence_length: int = 4096,
    precision: str = "bf16", optimizer: str = "adamw", fixed: str | Mapping[str, Any] = "", count: int = 10,
) -> Plan:  # fmt: skip
    """Find the fastest layouts of a model on a cluster that fit its memory.

    Args:
        model: a name of the catalog.
        cluster: such as 8xH100, 64x8xH100-IB400 or v5p-4096.
        global_batch: sequences of a step, or tokens as "512K" or "4M" (4 x 1024 x 1024).
        sequence_length: tokens of a sequence.
        precision: number formats, as ``train.precision`` names them.
        optimizer: the update rule.
        fixed: fields of the layout that are given, as a mapping or as text: "tp=8,recompute=full".
        count: how many layouts to list.

    Returns:
        The plan; ``best`` has the layouts with their step time in seconds and their memory, the fastest first. It is
        empty if nothing fits.

    Raises:
        UsageError: a name that is not known, or no layout can split the model and the batch over the cluster.

    >>> import shoal
    >>> best = shoal.plan("llama-3.2-1b", "2xH100", global_batch=8, sequence_length=1024, count=1).best[0]
    >>> best.layout.world_size
    2
    """
    planner = LayoutPlanner(
        model, cluster, global_batch=global_batch, sequence_length=sequence_length, precision=precision,
        optimizer=optimizer, fixed=fixed,
    )  # fmt: skip
    return planner.plan(count)


def _sequences(given: int | str, sequence_length: int) -> int:
    """The sequences of a step, from their number or from tokens."""
    text = str(given)
    unit = {"K": 2**10, "M": 2**20}.get(text[-1:].upper(), 0)
    number = text[:-1] if unit else text
    if not re.fullmatch("[0-9]{1,15}", number) or not int(number):
        raise UsageError(f"--global-batch {text}: give sequences, as 1024, or tokens, as 4M")
    if not unit:
        return int(number)
    tokens = int(number) * unit
    if tokens % sequence_length:
        raise UsageError(
            f"--global-batch {text} = {tokens:,} tokens is no multiple of --seq {sequence_length}."
            f"\n  Give sequences, as {max(1, tokens // sequence_length)}."
        )
    return tokens // sequence_length
