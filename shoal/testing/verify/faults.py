"""Typical faults of parallel training, to be injected into a correct run: `shoal verify run.toml --inject NAME`.

Each replaces one function in the rank's process by a faulty one, to show that the verifier finds it. Most of them
occurred in published codebases.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.engine import runtime
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce
from shoal.engine.collectives.position import MeshPosition
from shoal.engine.models.experts.router import Router
from shoal.engine.models.loss import SummedCrossEntropy
from shoal.engine.parallel import apply, expert, linear, mixture_of_depths, overlap
from shoal.engine.parallel.context import causal_blocks
from shoal.engine.parallel.context.apply import ContextPositions
from shoal.engine.parallel.context.ring import RingPosition
from shoal.engine.parallel.context.token_order import count_tokens
from shoal.engine.parallel.linear import SplitNorm
from shoal.engine.parallel.tensor_2d import Grid
from shoal.engine.parallel.weight_grad import sum_products
from shoal.engine.parallel.zero.bucket import DataParallelGroups
from shoal.engine.parallel.zero.rank_parameters import RankParameters
from shoal.engine.parallel.zero.zero_engine import ShardedParameters
from shoal.engine.weight_versions import WeightVersions
from shoal.pipeline import partition
from shoal.pipeline.program import Op, Program
from shoal.training.step.engine_state import EngineState
from shoal.training.step.model_state import ModelState


@dataclass(frozen=True)
class Fault:
    """A fault that can be injected."""

    what: str  # one line
    owner: Any  # of the replaced function
    name: str  # of the replaced function
    wrong: Callable  # the replacement, which gets the right function before the arguments
    needs: dict[str, Any]  # layout without which it has no effect
    model: str = ""  # section of the model without which it has no effect: "experts", "depths", or ""

    def inject(self) -> AbstractContextManager:
        right = self.owner.__dict__[self.name]
        static = isinstance(right, staticmethod)
        function = right.__func__ if static else right

        def replacement(*args: Any, **options: Any) -> Any:
            return self.wrong(function, *args, **options)

        return mock.patch.object(self.owner, self.name, staticmethod(replacement) if static else replacement)


# ---- faulty functions: each gets the right function, and then its arguments ------------------------------------------


def entry_without_sum(right: Callable, x: Tensor, group, meanwhile: Callable) -> Tensor:
    x = x.view_as(x)
    if x.requires_grad:
        x.register_hook(lambda _: meanwhile())
    return x


def gather_in_another_order(right: Callable, entry: overlap.GatheredEntry, kept: Tensor) -> Callable[[], Tensor]:
    wait = right(entry, kept)
    return lambda: wait().roll(kept.shape[1], 1)


def ring_without_sum(
    right: Callable, xs, factors, group, tokenwise: bool, meanwhile: Callable = lambda: None
) -> Tensor:
    mine = sum_products([overlap.split_parts(x, group.size(), tokenwise)[group.rank()] for x in xs], factors)
    meanwhile()
    return mine


def last_chunk_without_sum(right: Callable, xs, factors, *args) -> Tensor:
    total = right(xs, factors, *args)
    total[-1, -1] = sum_products(xs, factors)[-1, -1]
    return total


def own_partial_sums(right: Callable, grid: Grid, partial_sums, users) -> list[Tensor]:
    x, rank = grid.x.size(), grid.x.rank()
    both = zip(partial_sums, users, strict=True)
    return [sums.unflatten(-1, (x // n, -1))[..., rank // n, :] for sums, n in both]


def forget_sum(forgotten: Callable[[str], bool]) -> Callable[..., dict]:
    """Treat gradients that are partial sums along an axis as complete."""
    return lambda right, *args, **options: {
        key: replace(split, sum_over=tuple(axis for axis in split.sum_over if not forgotten(axis)))
        for key, split in right(*args, **options).items()
    }


def mean_over_replicas(right: Callable, parameters: ShardedParameters) -> None:
    right(parameters)
    for gradients in parameters.gradients:
        gradients.update.div_(parameters.mesh.size("dp"))


def clip_per_rank(right: Callable, parameters: RankParameters, factor: float) -> None:
    own = parameters.square_norm()
    clip = factor * math.sqrt(all_reduce(own.clone(), parameters.stages[0].mesh.group("world")))
    right(parameters, min(1.0, clip / math.sqrt(own)))


def count_copies(right: Callable, parameters: RankParameters) -> Tensor:
    gradients = [gradient for _, _, gradient in parameters.shards()]
    return torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()


def forgetful_reduce(right: Callable, parameters: ShardedParameters, gradients) -> None:
    gradients.unreduced = True
    right(parameters, gradients)


def first_dropped(right: Callable, parameters: ShardedParameters, key) -> None:
    def nothing(total: Tensor, fresh: bool) -> None:
        if fresh:
            total.zero_()

    if key == 0:
        parameters._deferred[key] = [(parameter, nothing) for parameter, _ in parameters._deferred[key]]
    right(parameters, key)


def next_targets(right: Callable, run: runtime.Runtime, action, batch, scale) -> None:
    if action.stage:
        batch = replace(batch, targets=batch.targets.roll(1, dims=1))
    right(run, action, batch, scale)


def without_gather(right: Callable, run: runtime.Runtime, program: Program, *args, **options) -> None:
    """Remove gathers after the checker, which would reject such a program."""
    left = tuple(tuple(a for a in actions if a.op is not Op.GATHER) for actions in program.actions)
    right(run, replace(program, actions=left), *args, **options)


def one_run(right: Callable, module: ContextPositions, start: int, s: int, device) -> Tensor:
    at = module.at
    return torch.arange(start, start + s, device=device) + at.rank * sum(at.tokens.lengths(at.rank))


def by_place(right: Callable, queries, keys, *window) -> list[causal_blocks.ScoreBlock]:
    if queries == keys:
        return right(queries, keys, *window)
    everything = causal_blocks.ScoreBlock(slice(0, count_tokens(queries)), slice(0, count_tokens(keys)))
    return [everything] if keys[0][0] < queries[0][0] else []


def nothing_comes(right: Callable, ring: RingPosition, x: Tensor, out: Tensor, group):
    work = right(ring, x, out, group)
    if group is ring.gradients:
        work.wait()
        out.zero_()
    return work


def alone(right: Callable, axis: str, mesh: Mesh) -> DataParallelGroups:
    found = right(axis, mesh)
    return replace(found, replicate_group=None) if axis == "edp" else found


def dense_copies(right: Callable, parameters: RankParameters) -> Tensor:
    own = [bucket.groups for bucket in parameters.buckets]
    dense = DataParallelGroups.along("replicas", parameters.stages[0].mesh).copies
    try:
        for bucket in parameters.buckets:
            bucket.groups = replace(bucket.groups, copies=dense)
        return right(parameters)
    finally:
        for bucket, groups in zip(parameters.buckets, own, strict=True):
            bucket.groups = groups


def choose_like_neighbour(right: Callable, router, logits: Tensor, context) -> tuple:
    choice, logits = right(router, logits, context)
    moved = choice._replace(weights=choice.weights.roll(1, dims=1), chosen=choice.chosen.roll(1, dims=1))
    return moved, logits


def not_back(right: Callable, counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    order, _ = right(counts, total)
    return order, torch.arange(len(order))


FAULTS: dict[str, Fault] = {
    "row-sum": Fault(
        "no all-reduce after a row-parallel product",
        linear.RowLinear, "results", lambda right, layer, x, layers: (F.linear(x, layer.weight, layer.bias),),
        {"tp": 2},
    ),
    "entry-gradient": Fault(
        "no all-reduce of the gradient at the entry of a tensor-parallel block",
        linear, "copy_to", entry_without_sum, {"tp": 2},
    ),
    "input-order": Fault(
        "backward gathers the parts of a block's input in another order",
        overlap.GatheredEntry, "start_gather", gather_in_another_order, {"tp": 2, "sequence_parallel": True},
    ),
    "ring-sum": Fault(
        "the reduce-scatter ring drops the previous rank's part",
        overlap, "scatter_products", ring_without_sum,
        {"tp": 2, "sequence_parallel": True, "tp_overlap": True},
    ),
    "chunk-sum": Fault(
        "the last token of a chunked product is not summed over the ranks",
        overlap, "reduced_products", last_chunk_without_sum, {"tp": 2, "tp_overlap": True},
    ),
    "grid-sum": Fault(
        "partial sums of a product along tp_x are not summed",
        Grid, "own_units", own_partial_sums, {"tp": 4, "tp_x": 2},
    ),
    "grid-norm": Fault(
        "each rank along tp_x normalises by its own part of the hidden state",
        SplitNorm, "_mean", lambda right, norm, x: x.mean(-1, keepdim=True), {"tp": 4, "tp_x": 2},
    ),
    "vocabulary-padding": Fault(
        "the padding of the vocabulary is part of the softmax",
        SummedCrossEntropy, "forward",
        lambda right, ctx, logits, targets, counts, columns, *more: right(
            ctx, logits, targets, counts, logits.shape[-1], *more
        ), {"tp": 2},
    ),
    "norm-gradients": Fault(
        "gradients of norms are not summed over the parts of the sequence",
        apply, "apply_tensor_parallel", forget_sum(lambda axis: axis == "tp"),
        {"tp": 2, "sequence_parallel": True},
    ),
    "key-value-copies": Fault(
        "gradients of a replicated key/value head are not summed",
        apply, "apply_tensor_parallel", forget_sum(lambda axis: axis.startswith("tp/")), {"tp": 4},
    ),
    "tied-ends": Fault(
        "the gradients of a tied embedding are not summed between the first and the last stage",
        apply, "share_tied", forget_sum(lambda axis: axis == "ends"), {"pp": 2},
    ),
    "copies-apart": Fault(
        "the gradients of two copies of the model (DualPipe) are not summed",
        apply, "share_copies", forget_sum(lambda axis: axis.startswith("pp:")),
        {"pp": 2, "schedule": "dualpipe"},
    ),
    "weights-dropped": Fault(
        "the second half of the backward of one micro-batch is left out",
        ShardedParameters, "add_deferred", first_dropped, {"pp": 2, "schedule": "zb-h1"},
    ),
    "unstashed": Fault(
        "an asynchronous pipeline runs backward through newer weights than forward",
        WeightVersions, "_use", lambda right, versions, version: None, {"pp": 2, "schedule": "pipedream"},
    ),
    "dropped-layer": Fault(
        "an uneven pipeline split leaves layers out",
        partition, "stage_layers",
        lambda right, layers, stages, *_: right(layers - layers % stages, stages), {"pp": 2},
    ),
    "wrong-targets": Fault(
        "the last pipeline stage scores the wrong targets",
        runtime.Runtime, "_forward", next_targets, {"pp": 2},
    ),
    "accumulation-scale": Fault(
        "the loss is divided again by the number of micro-batches",
        runtime.Runtime, "step",
        lambda right, run, batches, scale, update: right(run, batches, scale / len(batches), update), {},
    ),
    "local-tokens": Fault(
        "the loss is normalised by the tokens of this replica instead of all",
        ModelState, "count_tokens", lambda right, engine, batches, *_: [sum(b.unmasked() for b in batches)], {"dp": 2},
    ),
    "chunk-positions": Fault(
        "a context-parallel rank treats its chunks as one contiguous sequence",
        ContextPositions, "forward", one_run, {"cp": 2},
    ),
    "chunk-order": Fault(
        "ring attention orders blocks by their place in the ring instead of the sequence",
        causal_blocks, "split_scores", by_place, {"cp": 2},
    ),
    "key-gradients-stay": Fault(
        "gradients of keys and values do not return around the ring",
        RingPosition, "shift", nothing_comes, {"cp": 2},
    ),
    "same-samples": Fault(
        "every replica reads the same samples",
        MeshPosition, "index", lambda right, mesh, axis: 0 if axis == "dp" else right(mesh, axis), {"dp": 2},
    ),
    "next-samples": Fault(
        "a replica reads the samples of the next step",
        EngineState, "make_batches",
        lambda right, engine, step: right(engine, step + engine.mesh.index("dp")), {"dp": 2},
    ),
    "wrong-group": Fault(
        "gradients are reduced over the tensor-parallel group instead of the data-parallel one",
        Mesh, "group",
        lambda right, mesh, axis, purpose="": right(mesh, "tp" if axis == "replicate" else axis, purpose),
        {"dp": 2, "tp": 2},
    ),
    "mean-over-replicas": Fault(
        "gradients are averaged over replicas though the loss is already divided by the global number of tokens",
        ShardedParameters, "finish", mean_over_replicas, {"dp": 2},
    ),
    "zero1-stale": Fault(
        "ZeRO-1 does not gather the updated parameters",
        runtime.Runtime, "__init__", without_gather,
        {"dp": 2, "zero": 1, "offload": "optimizer"},  # otherwise, on one host, all update the same memory
    ),
    "zero2-forgets": Fault(
        "ZeRO-2 keeps only the last micro-batch's gradients",
        ShardedParameters, "_reduce", forgetful_reduce, {"dp": 2, "zero": 2},
    ),
    "norm-counts-copies": Fault(
        "the gradient norm counts replicated parameters several times",
        RankParameters, "square_norm", count_copies, {"tp": 2},
    ),
    "expert-gradients": Fault(
        "gradients of replicated experts are not summed",
        DataParallelGroups, "along", alone, {"dp": 4, "ep": 2}, model="experts",
    ),
    "expert-norm": Fault(
        "the gradient norm assumes that experts have as many copies as the rest",
        RankParameters, "square_norm", dense_copies, {"dp": 2, "ep": 2}, model="experts",
    ),
    "capacity-per-rank": Fault(
        "each rank applies the capacity to its own part of a sequence",
        expert, "all_gather_uneven", lambda right, x, group, dim, lengths: torch.cat([x] * len(lengths), dim),
        {"tp": 2, "sequence_parallel": True}, model="experts",
    ),
    "rows-astray": Fault(
        "outputs of experts return in the order of the experts, to other tokens",
        expert, "_by_expert", not_back, {"dp": 2, "ep": 2}, model="experts",
    ),
    "neighbours-choice": Fault(
        "each token gets the experts of the previous token",
        Router, "_choose", choose_like_neighbour, {}, model="experts",
    ),
    "chosen-order": Fault(
        "mixture of depths: tokens are computed in the order of arrival from other ranks",
        mixture_of_depths, "permute_rows", lambda right, x, order, back: x,
        {"tp": 2, "sequence_parallel": True}, model="depths",
    ),
    "places-of-chosen": Fault(
        "mixture of depths: tokens are rotated by their places among the chosen ones",
        mixture_of_depths.SharedPlaces, "attending",
        lambda right, places, taken: places.context.expand(len(taken), -1), {"cp": 2}, model="depths",
    ),
    "clip-per-rank": Fault(
        "each rank clips by the norm of its own shard",
        RankParameters, "scale", clip_per_rank, {"dp": 2, "zero": 1},
    ),
}
