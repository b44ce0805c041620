"""8-bit and 4-bit products of a model: which layers have them, and their settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from shoal.engine.collectives.group import Group
from shoal.engine.collectives.ops import all_reduce
from shoal.engine.models.transformer import Transformer
from shoal.engine.parallel.float8.encoding import IN, OUT, TOKENS
from shoal.engine.parallel.float8.product import Float8Product
from shoal.engine.parallel.linear import ColumnLinear, HeadsLinear, Linear
from shoal.engine.parallel.placement import ParamPlacement
from shoal.engine.parallel.weight_grad import GradSink
from shoal.engine.parallel.zero.zero_engine import ShardedParameters
from shoal.engine.precision.nvfp4 import RoundingDraws
from shoal.engine.precision.policy import Policy
from shoal.engine.precision.recipe import AmaxHistory, Recipe, find_unfit, name_block
from shoal.spec.catalog import ModelShape
from shoal.spec.compatibility.sizes import float8_products
from shoal.spec.config import Float8Config


@dataclass(frozen=True)
class Float8:
    """Settings of a model's products in 8 or 4 bits.

    Attributes:
        products: names of the linear layers that use such products, in tuples of those that are one product.
        history: history of absolute maxima, for delayed scaling.
        draws: random numbers that round gradients, if the recipe draws any.
    """

    products: tuple[tuple[str, ...], ...]
    recipe: Recipe
    history: AmaxHistory | None
    draws: RoundingDraws | None = None

    @staticmethod
    def from_policy(
        policy: Policy, config: Float8Config, shape: ModelShape, device: torch.device, seed: int = 0
    ) -> Float8 | None:
        """Return these settings of a run; None if its products use the compute dtype."""
        products = policy.formats.products
        if products == "compute":
            return None
        recipe, groups = Recipe.from_config(products, config), float8_products(shape, config.keep)
        history = None
        if recipe.history:
            history = AmaxHistory(recipe, [name for name, *_ in groups], policy.compute, device)
        return Float8(tuple(groups), recipe, history, RoundingDraws(seed) if recipe.rotates else None)

    def native(self, compute: torch.dtype, device: torch.device) -> bool:
        """Return whether the device multiplies the codes directly, without decoding them first."""
        return self.recipe.is_native(compute, device)

    def end_step(self, world: Group | None) -> None:
        """Finish a step: reduce the recorded absolute maxima over all ranks."""
        if self.history:
            all_reduce(self.history.now, world, dist.ReduceOp.MAX)
            self.history.end_step()


def apply_float8(
    model: Transformer, float8: Float8, placements: dict[str, ParamPlacement], parameters: ShardedParameters,
    sink: GradSink,
) -> None:  # fmt: skip
    """Replace products of linear layers, in place, by ones in 8 or 4 bits; ``placements`` are by name of the weight."""
    mesh, recipe = parameters.mesh, float8.recipe
    modules = dict(model.named_modules())
    layers = {name: modules[name] for group in float8.products for name in group if name in modules}
    unfit = {name_block(name) for name in layers}
    if recipe.is_native(parameters.buckets[0].policy.compute, mesh.device):
        unfit = find_unfit({name: layer.weight.shape for name, layer in layers.items()}, recipe, warn=mesh.rank == 0)
    if float8.draws is not None:
        float8.draws.follow(model)
    for name, *others in float8.products:
        if name not in layers:
            continue  # of another stage
        joined = [layers[each] for each in (name, *others)]
        assert all(isinstance(layer, Linear) for layer in joined)
        weights, split = [layer.weight for layer in joined], placements[f"{name}.weight"]
        assert parameters.are_adjacent(weights)
        along = next((dim for i, dim in enumerate((OUT, IN)) if split.box.shape[i] != split.global_shape[i]), "")
        if joined[0].at is None and mesh.layout.sequence_parallel:
            along = TOKENS  # outside of the tensor-parallel regions
        product = Float8Product(
            name, recipe, float8.history, along, mesh.group("tp"), native=name_block(name) not in unfit,
            weights=weights, bucket=parameters.buckets[parameters.places[weights[0]][0]], sink=sink, device=mesh.device,
            keepers=_find_keepers(joined, modules[name.rpartition(".")[0]]),
        )  # fmt: skip
        if float8.draws is not None:
            splits = [placements[f"{each}.weight"] for each in (name, *others)]
            sizes = [each.global_shape[0] for each in splits]
            begins = [sum(sizes[:i]) + each.box.offset[0] for i, each in enumerate(splits)]
            parts = [torch.arange(n, n + each.box.shape[0]) for n, each in zip(begins, splits, strict=True)]
            product.draws, product.features = float8.draws, torch.cat(parts).to(mesh.device)
        product.warns, product.waits = mesh.rank == 0, joined[0].at is not None
        for layer in joined:
            layer.product = product


def _find_keepers(layers: Sequence[Linear], block: nn.Module) -> Group | None:
    """Return the ranks that gather the codes of an input again: that enter a block, by one product with its layers."""
    entering = [
        each for each in block.children() if isinstance(each, ColumnLinear) and not isinstance(each, HeadsLinear)
    ]
    at = layers[0].at
    if at is None or entering != layers:
        return None
    divides = layers[0].in_features % at.size == 0
    return at.y if at.sequence_parallel and at.again and divides else None
