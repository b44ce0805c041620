"""Longer faulty functions of `shoal.testing.verify.faults`: each gets the right function and then its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from shoal.engine import runtime
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce
from shoal.engine.parallel import overlap
from shoal.engine.parallel.context import causal_blocks
from shoal.engine.parallel.context.apply import ContextPositions
from shoal.engine.parallel.context.ring import RingPosition
from shoal.engine.parallel.context.token_order import count_tokens
from shoal.engine.parallel.tensor_2d import Grid
from shoal.engine.parallel.weight_grad import sum_products
from shoal.engine.parallel.zero.bucket import DataParallelGroups
from shoal.engine.parallel.zero.rank_parameters import RankParameters
from shoal.engine.parallel.zero.zero_engine import ShardedParameters
from shoal.pipeline.program import Op, Program


def entry_without_sum(right: Callable, x: Tensor, group, meanwhile: Callable) -> Tensor:
    x = x.view_as(x)
    if x.requires_grad:
        x.register_hook(lambda _: meanwhile())
    return x


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


def by_place(right: Callable, queries, keys) -> list[causal_blocks.ScoreBlock]:
    if queries == keys:
        return right(queries, keys)
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


def of_the_token_before(right: Callable, router, logits: Tensor, context) -> tuple:
    choice, logits = right(router, logits, context)
    moved = choice._replace(weights=choice.weights.roll(1, dims=1), chosen=choice.chosen.roll(1, dims=1))
    return moved, logits


def not_back(right: Callable, counts: Tensor) -> tuple[Tensor, Tensor]:
    order, _ = right(counts)
    return order, torch.arange(len(order))
