"""Faults that parallel training is known for, to be planted in a working run and found again.

Each replaces one function of shoal in the rank's process by one with a mistake in it. They show what the verifier sees
and where it says it is: `shoal verify run.toml --plant NAME`. Most are faults that published codebases have had.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.comm.mesh import Mesh
from shoal.comm.ops import all_reduce
from shoal.parallel import apply, data, depths, expert, overlap, tensor
from shoal.parallel.context import sight
from shoal.parallel.context.apply import ContextParallel
from shoal.parallel.context.order import count
from shoal.parallel.context.ring import Ring
from shoal.parallel.grid import Grid
from shoal.parallel.weight import sum_of_products
from shoal.pipeline import runtime, split
from shoal.pipeline.program import Op, Program
from shoal.pipeline.stash import Stash
from shoal.train.engine import Engine


@dataclass(frozen=True)
class Fault:
    """A mistake that can be planted.

    Attributes:
        what: the mistake, in one line.
        owner, name: the function that it replaces.
        wrong: the replacement, given the right function.
        needs: values of the layout without which it does nothing: those on which it shows.
        model: the section of the model's settings without which it does nothing: "experts", "depths", or "".
    """

    what: str
    owner: Any
    name: str
    wrong: Callable[[Callable], Callable]
    needs: dict[str, Any]
    model: str = ""

    @contextmanager
    def plant(self) -> Iterator[None]:
        """Have the mistake in this process for the time of the context."""
        right = self.owner.__dict__[self.name]
        function = right.__func__ if isinstance(right, staticmethod) else right
        wrong = self.wrong(function)
        setattr(self.owner, self.name, staticmethod(wrong) if isinstance(right, staticmethod) else wrong)
        try:
            yield
        finally:
            setattr(self.owner, self.name, right)


def _entry_without_sum(right: Callable) -> Callable:
    def copy_to(x: Tensor, group, meanwhile: Callable) -> Tensor:
        x = x.view_as(x)
        if x.requires_grad:
            x.register_hook(lambda _: meanwhile())
        return x

    return copy_to


def _row_without_sum(right: Callable) -> Callable:
    def row_forward(module, x: Tensor, at, tokenwise: bool) -> Tensor:
        y = F.linear(x, module.weight)
        return y if module.bias is None else y + module.bias

    return row_forward


def _ring_without_sum(right: Callable) -> Callable:
    def scatter_products(xs, factors, group, tokenwise: bool, meanwhile: Callable = lambda: None) -> Tensor:
        mine = sum_of_products([overlap.parts_of(x, group.size(), tokenwise)[group.rank()] for x in xs], factors)
        meanwhile()
        return mine

    return scatter_products


def _last_chunk_without_sum(right: Callable) -> Callable:
    def reduced_products(xs, factors, group, meanwhile: Callable = lambda: None) -> Tensor:
        total = right(xs, factors, group, meanwhile)
        total[-1, -1] = sum_of_products(xs, factors)[-1, -1]
        return total

    return reduced_products


def _own_partial_sums(right: Callable) -> Callable:
    def own_units(at: Grid, partial_sums, users) -> list[Tensor]:
        x, rank = at.x.size(), at.x.rank()
        both = zip(partial_sums, users, strict=True)
        return [sums.unflatten(-1, (x // n, -1))[..., rank // n, :] for sums, n in both]

    return own_units


def _local_statistics(right: Callable) -> Callable:
    return lambda at, sums: sums * at.x.size()


def _forget_sum(forgotten: Callable[[str], bool]) -> Callable[[Callable], Callable]:
    """Gradients that are partial sums along an axis are taken for complete."""

    def wrong(right: Callable) -> Callable:
        def splits(*args, **options):
            return {
                key: replace(split, sum_over=tuple(axis for axis in split.sum_over if not forgotten(axis)))
                for key, split in right(*args, **options).items()
            }

        return splits

    return wrong


def _wrong_group(right: Callable) -> Callable:
    def group(mesh: Mesh, axis: str, purpose: str = ""):
        return right(mesh, "tp" if axis == "replicate" else axis, purpose)

    return group


def _mean_over_replicas(right: Callable) -> Callable:
    def finish(parameters: data.ShardedParameters) -> None:
        right(parameters)
        parameters.scale(1 / parameters.mesh.size("dp"))

    return finish


def _clip_per_rank(right: Callable) -> Callable:
    def scale(parameters: data.ShardedParameters, factor: float) -> None:
        own = parameters.square_norm()
        clip = factor * math.sqrt(all_reduce(own.clone(), parameters.mesh.group("world")))
        right(parameters, min(1.0, clip / math.sqrt(own)))

    return scale


def _count_copies(right: Callable) -> Callable:
    def square_norm(parameters: data.ShardedParameters) -> Tensor:
        gradients = [gradient for _, _, gradient in parameters.runs()]
        return sum(gradient.double().square().sum() for gradient in gradients)

    return square_norm


def _rest_dropped(right: Callable) -> Callable:
    def stage_layers(layers: int, stages: int, head: float) -> list[range]:
        each = layers // stages
        return [range(each * stage, each * (stage + 1)) for stage in range(stages)]

    return stage_layers


def _leaking_padding(right: Callable) -> Callable:
    return lambda ctx, logits, targets, counts, here, group: right(
        ctx, logits, targets, counts, logits.shape[-1], group
    )


def _forgetful_reduce(right: Callable) -> Callable:
    def reduce(parameters: data.ShardedParameters, gradients) -> None:
        gradients.unreduced = True
        right(parameters, gradients)

    return reduce


def _first_dropped(right: Callable) -> Callable:
    def nothing(total: Tensor, fresh: bool) -> None:
        if fresh:
            total.zero_()

    def add_deferred(parameters: data.ShardedParameters, key) -> None:
        if key == 0:
            parameters._deferred[key] = [(parameter, nothing) for parameter, _ in parameters._deferred[key]]
        right(parameters, key)

    return add_deferred


def _next_targets(right: Callable) -> Callable:
    def forward(run: runtime.Runtime, action, batch, scale) -> None:
        if action.stage:
            batch = replace(batch, targets=batch.targets.roll(1, dims=1))
        right(run, action, batch, scale)

    return forward


def _without_gather(right: Callable) -> Callable:
    """Behind the checker, which would refuse such a program."""

    def init(run: runtime.Runtime, program: Program, *args, **options) -> None:
        left = tuple(tuple(a for a in actions if a.op is not Op.GATHER) for actions in program.actions)
        right(run, replace(program, actions=left), *args, **options)

    return init


def _same_samples(right: Callable) -> Callable:
    return lambda mesh, axis: 0 if axis == "dp" else right(mesh, axis)


def _one_run(right: Callable) -> Callable:
    def positions(at: ContextParallel, start: int, s: int, device) -> Tensor:
        return torch.arange(start, start + s, device=device) + at.rank * sum(at.spread.lengths(at.rank))

    return positions


def _by_place(right: Callable) -> Callable:
    def pieces(queries, keys) -> list[sight.Piece]:
        if queries == keys:
            return right(queries, keys)
        everything = sight.Piece(slice(0, count(queries)), slice(0, count(keys)))
        return [everything] if keys[0][0] < queries[0][0] else []

    return pieces


def _nothing_comes(right: Callable) -> Callable:
    def shift(ring: Ring, x: Tensor, out: Tensor, group):
        work = right(ring, x, out, group)
        if group is ring.gradients:
            work.wait()
            out.zero_()
        return work

    return shift


def _alone(right: Callable) -> Callable:
    def along(axis: str, mesh: Mesh) -> data.Replicas:
        found = right(axis, mesh)
        return replace(found, replicate_group=None) if axis == "edp" else found

    return along


def _dense_copies(right: Callable) -> Callable:
    def square_norm(parameters: data.ShardedParameters) -> Tensor:
        own = parameters.replicas
        parameters.replicas = {axis: replace(here, copies=own["replicas"].copies) for axis, here in own.items()}
        try:
            return right(parameters)
        finally:
            parameters.replicas = own

    return square_norm


def _own_scores(right: Callable) -> Callable:
    return lambda x, group, dim, lengths: torch.cat([x] * len(lengths), dim)


def _in_order(right: Callable) -> Callable:
    return lambda places, taken: places.context.expand(len(taken), -1)


def _not_back(right: Callable) -> Callable:
    def by_expert(counts: Tensor) -> tuple[Tensor, Tensor]:
        order, _ = right(counts)
        return order, torch.arange(len(order))

    return by_expert


FAULTS: dict[str, Fault] = {
    "row-sum": Fault(
        "no all-reduce after a row-parallel product",
        tensor, "_row_forward", _row_without_sum, {"tp": 2},
    ),
    "entry-gradient": Fault(
        "no all-reduce of the gradient where a tensor-parallel block is entered",
        tensor, "copy_to", _entry_without_sum, {"tp": 2},
    ),
    "ring-sum": Fault(
        "the ring that sums and scatters forgets what comes from the rank before",
        overlap, "scatter_products", _ring_without_sum, {"tp": 2, "sequence_parallel": True, "tp_overlap": True},
    ),
    "chunk-sum": Fault(
        "the last token is not summed over the ranks where a product is made in runs of tokens",
        overlap, "reduced_products", _last_chunk_without_sum, {"tp": 2, "tp_overlap": True},
    ),
    "grid-sum": Fault(
        "each rank of a grid goes on with its own terms of a product whose input is split",
        Grid, "own_units", _own_partial_sums, {"tp": 4, "tp_x": 2},
    ),
    "grid-norm": Fault(
        "each rank of a grid normalises by its own part of the hidden state",
        Grid, "total", _local_statistics, {"tp": 4, "tp_x": 2},
    ),
    "vocabulary-padding": Fault(
        "the padding of the vocabulary takes part in the softmax",
        tensor.VocabularyCrossEntropy, "forward", _leaking_padding, {"tp": 2},
    ),
    "norm-gradients": Fault(
        "gradients of norms are not summed over the parts of the sequence",
        apply, "apply_tensor_parallel", _forget_sum(lambda axis: axis == "tp"), {"tp": 2, "sequence_parallel": True},
    ),
    "key-value-copies": Fault(
        "gradients of a key/value head that several ranks hold are not summed",
        apply, "apply_tensor_parallel", _forget_sum(lambda axis: axis.startswith("tp/")), {"tp": 4},
    ),
    "tied-ends": Fault(
        "the gradients of a tied embedding are not summed between the first and the last stage",
        apply, "share_tied", _forget_sum(lambda axis: axis == "ends"), {"pp": 2},
    ),
    "copies-apart": Fault(
        "the gradients of two copies of the model (DualPipe) are not summed",
        apply, "share_copies", _forget_sum(lambda axis: axis.startswith("pp:")),
        {"pp": 2, "schedule": "dualpipe"},
    ),
    "weights-dropped": Fault(
        "the second half of the backward of one micro-batch is left out",
        data.ShardedParameters, "add_deferred", _first_dropped, {"pp": 2, "schedule": "zb-h1"},
    ),
    "unstashed": Fault(
        "an asynchronous pipeline goes back through newer weights than it came forward through",
        Stash, "_use", lambda right: lambda stash, version: None, {"pp": 2, "schedule": "pipedream"},
    ),
    "dropped-layer": Fault(
        "an uneven pipeline split leaves layers out",
        split, "stage_layers", _rest_dropped, {"pp": 2},
    ),
    "wrong-targets": Fault(
        "the last pipeline stage scores the wrong targets",
        runtime.Runtime, "_forward", _next_targets, {"pp": 2},
    ),
    "accumulation-scale": Fault(
        "the loss is divided once more by the number of micro-batches",
        runtime.Runtime, "step",
        lambda right: lambda self, batches, scale, update: right(self, batches, scale / len(batches), update), {},
    ),
    "local-tokens": Fault(
        "the loss is normalised by the tokens of this replica instead of all",
        Engine, "_count", lambda right: lambda self, batches, _: [sum(b.unmasked() for b in batches)], {"dp": 2},
    ),
    "chunk-positions": Fault(
        "a context-parallel rank takes its chunks' tokens for one run of the sequence",
        ContextParallel, "positions", _one_run, {"cp": 2},
    ),
    "chunk-order": Fault(
        "ring attention goes by the place of a block in the ring, not by its tokens' places in the sequence",
        sight, "pieces", _by_place, {"cp": 2},
    ),
    "key-gradients-stay": Fault(
        "the gradients of keys and values that other ranks made do not come home round the ring",
        Ring, "shift", _nothing_comes, {"cp": 2},
    ),
    "same-samples": Fault(
        "every replica reads the same samples",
        Mesh, "index", _same_samples, {"dp": 2},
    ),
    "wrong-group": Fault(
        "gradients are reduced over the tensor-parallel group instead of the data-parallel one",
        Mesh, "group", _wrong_group, {"dp": 2, "tp": 2},
    ),
    "mean-over-replicas": Fault(
        "gradients are averaged over replicas though the loss is already divided by the global number of tokens",
        data.ShardedParameters, "finish", _mean_over_replicas, {"dp": 2},
    ),
    "zero1-stale": Fault(
        "ZeRO-1 does not gather the updated parameters",
        runtime.Runtime, "__init__", _without_gather,
        {"dp": 2, "zero": 1, "offload": "optimizer"},  # else, on one host, all update the same memory
    ),
    "zero2-forgets": Fault(
        "ZeRO-2 keeps only the last micro-batch's gradients",
        data.ShardedParameters, "_reduce", _forgetful_reduce, {"dp": 2, "zero": 2},
    ),
    "norm-counts-copies": Fault(
        "the gradient norm counts what several ranks hold several times",
        data.ShardedParameters, "square_norm", _count_copies, {"tp": 2},
    ),
    "expert-gradients": Fault(
        "gradients of experts that several ranks hold are not summed",
        data.Replicas, "along", _alone, {"dp": 4, "ep": 2}, model="experts",
    ),
    "expert-norm": Fault(
        "the gradient norm takes experts to be held as often as the rest",
        data.ShardedParameters, "square_norm", _dense_copies, {"dp": 2, "ep": 2}, model="experts",
    ),
    "capacity-per-rank": Fault(
        "each rank of a split sequence decides who finds room by its own part",
        expert, "whole_of", _own_scores, {"tp": 2, "sequence_parallel": True}, model="experts",
    ),
    "rows-astray": Fault(
        "what experts computed is sent back in the order of the experts, to other tokens",
        expert, "_by_expert", _not_back, {"dp": 2, "ep": 2}, model="experts",
    ),
    "chosen-order": Fault(
        "tokens that pass through a layer are computed in the order in which they come from other ranks",
        depths, "permuted", lambda right: lambda x, order, back: x,
        {"tp": 2, "sequence_parallel": True}, model="depths",
    ),
    "places-of-chosen": Fault(
        "tokens that pass through a layer are rotated by their places among each other, not in the sequence",
        depths.SharedPlaces, "attending", _in_order, {"cp": 2}, model="depths",
    ),
    "clip-per-rank": Fault(
        "each rank clips by the norm of its own shard",
        data.ShardedParameters, "scale", _clip_per_rank, {"dp": 2, "zero": 1},
    ),
}
