"""The mistakes of `shoal.testing.verify.faults`: each takes the right function and gives one that is wrong in one
thing."""


from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.engine import runtime
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_reduce
from shoal.engine.parallel import overlap
from shoal.engine.parallel.context import causal_blocks
from shoal.engine.parallel.context.apply import ContextParallel
from shoal.engine.parallel.context.ring import RingPosition
from shoal.engine.parallel.context.token_order import count
from shoal.engine.parallel.tensor_2d import Grid
from shoal.engine.parallel.weight_grad import sum_of_products
from shoal.engine.parallel.zero import zero_engine
from shoal.pipeline.program import Op, Program


def entry_without_sum(right: Callable) -> Callable:
    def copy_to(x: Tensor, group, meanwhile: Callable) -> Tensor:
        x = x.view_as(x)
        if x.requires_grad:
            x.register_hook(lambda _: meanwhile())
        return x

    return copy_to


def row_without_sum(right: Callable) -> Callable:
    return lambda layer, x, layers: (F.linear(x, layer.weight, layer.bias),)


def ring_without_sum(right: Callable) -> Callable:
    def scatter_products(xs, factors, group, tokenwise: bool, meanwhile: Callable = lambda: None) -> Tensor:
        mine = sum_of_products([overlap.parts_of(x, group.size(), tokenwise)[group.rank()] for x in xs], factors)
        meanwhile()
        return mine

    return scatter_products


def last_chunk_without_sum(right: Callable) -> Callable:
    def reduced_products(xs, factors, group, meanwhile: Callable = lambda: None) -> Tensor:
        total = right(xs, factors, group, meanwhile)
        total[-1, -1] = sum_of_products(xs, factors)[-1, -1]
        return total

    return reduced_products


def own_partial_sums(right: Callable) -> Callable:
    def own_units(at: Grid, partial_sums, users) -> list[Tensor]:
        x, rank = at.x.size(), at.x.rank()
        both = zip(partial_sums, users, strict=True)
        return [sums.unflatten(-1, (x // n, -1))[..., rank // n, :] for sums, n in both]

    return own_units


def local_statistics(right: Callable) -> Callable:
    return lambda at, sums: sums * at.x.size()


def forget_sum(forgotten: Callable[[str], bool]) -> Callable[[Callable], Callable]:
    """Gradients that are partial sums along an axis are taken for complete."""

    def wrong(right: Callable) -> Callable:
        def splits(*args, **options):
            return {
                key: replace(split, sum_over=tuple(axis for axis in split.sum_over if not forgotten(axis)))
                for key, split in right(*args, **options).items()
            }

        return splits

    return wrong


def wrong_group(right: Callable) -> Callable:
    def group(mesh: Mesh, axis: str, purpose: str = ""):
        return right(mesh, "tp" if axis == "replicate" else axis, purpose)

    return group


def mean_over_replicas(right: Callable) -> Callable:
    def finish(parameters: zero_engine.ShardedParameters) -> None:
        right(parameters)
        parameters.scale(1 / parameters.mesh.size("dp"))

    return finish


def clip_per_rank(right: Callable) -> Callable:
    def scale(parameters: zero_engine.ShardedParameters, factor: float) -> None:
        own = parameters.square_norm()
        clip = factor * math.sqrt(all_reduce(own.clone(), parameters.mesh.group("world")))
        right(parameters, min(1.0, clip / math.sqrt(own)))

    return scale


def count_copies(right: Callable) -> Callable:
    def square_norm(parameters: zero_engine.ShardedParameters) -> Tensor:
        gradients = [gradient for _, _, gradient in parameters.runs()]
        return torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()

    return square_norm


def rest_dropped(right: Callable) -> Callable:
    def stage_layers(layers: int, stages: int, head: float) -> list[range]:
        each = layers // stages
        return [range(each * stage, each * (stage + 1)) for stage in range(stages)]

    return stage_layers


def leaking_padding(right: Callable) -> Callable:
    return lambda ctx, logits, targets, counts, here, gather: right(
        ctx, logits, targets, counts, logits.shape[-1], gather
    )


def forgetful_reduce(right: Callable) -> Callable:
    def reduce(parameters: zero_engine.ShardedParameters, gradients) -> None:
        gradients.unreduced = True
        right(parameters, gradients)

    return reduce


def first_dropped(right: Callable) -> Callable:
    def nothing(total: Tensor, fresh: bool) -> None:
        if fresh:
            total.zero_()

    def add_deferred(parameters: zero_engine.ShardedParameters, key) -> None:
        if key == 0:
            parameters._deferred[key] = [(parameter, nothing) for parameter, _ in parameters._deferred[key]]
        right(parameters, key)

    return add_deferred


def next_targets(right: Callable) -> Callable:
    def forward(run: runtime.Runtime, action, batch, scale) -> None:
        if action.stage:
            batch = replace(batch, targets=batch.targets.roll(1, dims=1))
        right(run, action, batch, scale)

    return forward


def without_gather(right: Callable) -> Callable:
    """Behind the checker, which would refuse such a program."""

    def init(run: runtime.Runtime, program: Program, *args, **options) -> None:
        left = tuple(tuple(a for a in actions if a.op is not Op.GATHER) for actions in program.actions)
        right(run, replace(program, actions=left), *args, **options)

    return init


def same_samples(right: Callable) -> Callable:
    return lambda mesh, axis: 0 if axis == "dp" else right(mesh, axis)


def one_run(right: Callable) -> Callable:
    def positions(at: ContextParallel, start: int, s: int, device) -> Tensor:
        return torch.arange(start, start + s, device=device) + at.rank * sum(at.spread.lengths(at.rank))

    return positions


def by_place(right: Callable) -> Callable:
    def pieces(queries, keys) -> list[causal_blocks.ScoreBlock]:
        if queries == keys:
            return right(queries, keys)
        everything = causal_blocks.ScoreBlock(slice(0, count(queries)), slice(0, count(keys)))
        return [everything] if keys[0][0] < queries[0][0] else []

    return pieces


def nothing_comes(right: Callable) -> Callable:
    def shift(ring: RingPosition, x: Tensor, out: Tensor, group):
        work = right(ring, x, out, group)
        if group is ring.gradients:
            work.wait()
            out.zero_()
        return work

    return shift


def alone(right: Callable) -> Callable:
    def along(axis: str, mesh: Mesh) -> zero_engine.DataParallelGroups:
        found = right(axis, mesh)
        return replace(found, replicate_group=None) if axis == "edp" else found

    return along


def dense_copies(right: Callable) -> Callable:
    def square_norm(parameters: zero_engine.ShardedParameters) -> Tensor:
        own = parameters.replicas
        parameters.replicas = {axis: replace(here, copies=own["replicas"].copies) for axis, here in own.items()}
        try:
            return right(parameters)
        finally:
            parameters.replicas = own

    return square_norm


def own_scores(right: Callable) -> Callable:
    return lambda x, group, dim, lengths: torch.cat([x] * len(lengths), dim)


def of_the_token_before(right: Callable) -> Callable:
    def choose(router, logits: Tensor, context) -> tuple:
        choice, logits = right(router, logits, context)
        moved = choice._replace(weights=choice.weights.roll(1, dims=1), chosen=choice.chosen.roll(1, dims=1))
        return moved, logits

    return choose


def in_order(right: Callable) -> Callable:
    return lambda places, taken: places.context.expand(len(taken), -1)


def not_back(right: Callable) -> Callable:
    def by_expert(counts: Tensor) -> tuple[Tensor, Tensor]:
        order, _ = right(counts)
        return order, torch.arange(len(order))

    return by_expert
