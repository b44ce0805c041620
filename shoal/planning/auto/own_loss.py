"""Plans of the losses of models of one's own: how their operators are split over the ranks of ``parallel.tp``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shoal.base.errors import UsageError
from shoal.engine.own.definition import PICKLED, OwnModel, load_own_model, save_own_model
from shoal.engine.own.formats import autocast
from shoal.engine.own.samples import OwnBatch, OwnDataset
from shoal.engine.own.trial import run_first
from shoal.engine.own.user_code import explain
from shoal.engine.precision.policy import POLICIES, Policy
from shoal.engine.sharding.graph import FORWARD, OperatorGraph
from shoal.engine.sharding.loss import LossPlan
from shoal.engine.sharding.named_axes import NamedMesh
from shoal.engine.sharding.plan import UPDATE, ShardingPlan
from shoal.planning.auto.capture.forward import Forward, export_forward
from shoal.planning.auto.capture.trace import differentiate
from shoal.planning.auto.intra.ilp import NothingFits
from shoal.planning.auto.intra.problem import Builder
from shoal.planning.auto.plan import build_plan
from shoal.planning.auto.search import Target, find_capacity
from shoal.planning.own_counts import OwnCounts
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.catalog.clusters import cluster as cluster_of
from shoal.spec.config import RunConfig
from shoal.spec.number_formats import FORMATS


def is_planned(own: OwnModel) -> bool:
    """Return whether the search splits the operators of a definition: it has no table."""
    given = own.tensor_parallel
    return given == "auto" or isinstance(given, LossPlan)


def with_plan(config: RunConfig, folder: Path, cluster: str = "8xH100") -> RunConfig:
    """Return a config whose definition has a plan for its layout, written into a folder.

    A definition with a table, or with a plan that suits, stays as it is.

    Raises:
        UsageError: the loss has no graph.
    """
    layout, precision = config.parallel, config.train.precision
    own = load_own_model(config.model.module) if config.model.module and layout.tp > 1 else None
    given = own.tensor_parallel if own else None
    suits = isinstance(given, LossPlan) and given.suits(layout.tp, layout.micro_batch, precision)
    if own is None or suits or not is_planned(own):
        return config
    plan = plan_loss(own, config, cluster_of(cluster)).plan
    file = folder / f"planned-{precision}{PICKLED}"
    save_own_model(replace(own, tensor_parallel=plan), file)
    return config.replace(model={"module": str(file)})


def plan_loss(own: OwnModel, config: RunConfig, cluster: Cluster) -> OwnCounts:
    """Find the fastest split of a definition's loss over the ranks of ``parallel.tp``, neighbours in a cluster.

    Returns:
        The counts of a micro-batch on one of these ranks, with the plan.

    Raises:
        UsageError: the loss has no graph, or draws random numbers.
    """
    layout, train = config.parallel, config.train
    batch = OwnDataset(own, "train", train.seed).batch(range(layout.micro_batch))
    policy = POLICIES[train.precision]
    found, _ = run_first(own, policy, train.seed, batch, partial(_capture, own, policy))
    if isinstance(found, UsageError):
        raise found
    forward, graph, captured = found
    target = Target(cluster, FORMATS[train.precision], microbatches=1, capacity=find_capacity(cluster), in_place=True,
                    shards=layout.shards if layout.zero else 1)
    grids = [NamedMesh("x", (layout.tp,))]  # replicas are the other axis
    try:
        builder, problem, solution = target.best(graph, grids)
    except NothingFits:  # which the estimate says
        builder, problem, solution = replace(target, capacity=inf).best(graph, grids)
    plan = build_plan(builder, problem, solution)
    return _count(plan, builder, _describe(plan, forward, captured, config))


@dataclass
class _Captured:
    """What is known of a loss beside its graph."""

    leaves: list[Any]  # of the batch
    spec: TreeSpec
    buffers: frozenset[str]  # names of the buffers of the module
    # of the loss, the terms, and each metric's sum and terms: a number, or None for a tensor
    returned: tuple[Any, ...] = ()
    metrics: tuple[str, ...] = ()


class _Loss(nn.Module):
    """A definition's loss as a module, of the tensors of a batch."""

    def __init__(self, own: OwnModel, module: nn.Module, captured: _Captured):
        super().__init__()
        self.module, self.own, self.captured = module, own, captured

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given, captured = iter(tensors), self.captured
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in captured.leaves]
        loss, terms, metrics = self.own.compute(self.module, tree_unflatten(leaves, captured.spec))
        captured.metrics = tuple(sorted(metrics))
        values = [loss, terms, *(value for name in captured.metrics for value in metrics[name])]
        captured.returned = tuple(None if isinstance(value, Tensor) else value for value in values)
        return tuple(value for value in values if isinstance(value, Tensor))


def _capture(
    own: OwnModel, policy: Policy, module: nn.Module, batch: OwnBatch
) -> tuple[Forward, OperatorGraph, _Captured] | UsageError:
    """Return the graph of a loss; or why it has none, so that it is not tried again with values."""
    leaves, spec = tree_flatten(batch.values)
    captured = _Captured(leaves, spec, frozenset(name for name, _ in module.named_buffers()))
    tensors, prefix = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor)), "module."
    try:
        with autocast(policy, torch.device("cpu")):
            forward = export_forward(_Loss(own, module, captured), tensors, type(module).__name__)
            forward.sources = {n: (kind, name.removeprefix(prefix)) for n, (kind, name) in forward.sources.items()}
            forward.values = {name.removeprefix(prefix): value for name, value in forward.values.items()}
            return forward, differentiate(forward, draws=True), captured
    except UsageError as error:
        return error
    except Exception as error:  # an operator that torch cannot trace
        return UsageError(f"{type(module).__name__}: its operators are not traced: {explain(error)}.")


def _describe(plan: ShardingPlan, forward: Forward, captured: _Captured, config: RunConfig) -> LossPlan:
    made = dict(zip([node.name for node in forward.outputs], plan.graph.outputs, strict=True))
    outputs = iter([made[node.name] for node in forward.returned])
    constants = {op.target: forward.values[op.target] for op in plan.graph.ops.values()
                 if op.kind == "buffer" and op.target not in captured.buffers}  # fmt: skip
    return LossPlan(
        plan, config.train.precision, config.parallel.micro_batch,
        tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in captured.leaves),
        tuple(f"input {name}" for kind, name in forward.sources.values() if kind == "input"),
        tuple(next(outputs) if value is None else value for value in captured.returned), captured.metrics, constants,
    )  # fmt: skip


def _count(plan: ShardingPlan, builder: Builder, loss: LossPlan) -> OwnCounts:
    """Count a micro-batch on one rank. What it sends is counted as the bytes of all-reduces that take as long."""
    mesh, prices, ops = plan.mesh, builder.prices, plan.graph.ops
    flops = {FORWARD: 0.0, "": 0.0}
    for name, split in plan.splits.items():
        if (space := builder.spaces[name]) is not None:
            flops[FORWARD if ops[name].phase == FORWARD else ""] += space.flops / split.parts
    trained = [op for op in plan.graph.parameters if UPDATE + op.name in plan.splits]
    frozen = [op for op in ops.values() if op.kind in ("parameter", "buffer") and op not in trained]
    return OwnCounts(
        parameters=int(sum(prices.local_numel(op, plan.sharding(op.name)) for op in trained)), in_blocks=0,
        frozen=sum(op.numel * op.dtype.itemsize for op in frozen),
        flops=int(sum(flops.values())), saved=int(plan.saved), forward_flops=int(flops[FORWARD]),
        sent=int(sum(each.sent for each in plan.reshardings) * mesh.ranks / (2 * (mesh.ranks - 1))),
        sums=len(plan.reshardings), plan=loss,
    )  # fmt: skip

