"""Products in 8 bits on one device, in float64 and as plain as possible: the reference of
`shoal.engine.parallel.float8`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from shoal.engine.models.transformer import Transformer
from shoal.engine.precision.float8 import encode, largest, scale_of
from shoal.engine.precision.policy import POLICIES
from shoal.engine.precision.recipe import GRADIENT, INPUT, WEIGHT, AmaxHistory, Recipe
from shoal.spec.compatibility.sizes import float8_layers
from shoal.spec.config import RunConfig


def multiply_in_float8(model: Transformer, config: RunConfig) -> AmaxHistory | None:
    """Make a model's layers multiply in the run's precision, in place; return the scales' history, if it has one."""
    products = POLICIES[config.train.precision].formats.products
    if products == "compute":
        return None
    recipe, layers = Recipe.of(products, config.float8), float8_layers(model.shape, config.float8.keep)
    history = AmaxHistory(recipe, layers, torch.float64, torch.device("cpu")) if recipe.history else None
    modules = dict(model.named_modules())
    for name in layers:
        modules[name].forward = partial(_forward, modules[name], partial(_round, name, recipe, history))
    return history


def _forward(module: nn.Linear, rounded, x: Tensor) -> Tensor:
    y = RoundedProduct.apply(rounded, x, module.weight)
    return y if module.bias is None else y + module.bias


def _round(name: str, recipe: Recipe, history: AmaxHistory | None, what: int, x: Tensor) -> Tensor:
    """Round a matrix to 8 bits, with scales along its rows."""
    kind, grain = recipe.kinds[what], recipe.grains[what]
    most = largest(x, grain)
    scale = None
    if history:
        history.note(name, what, most)
        scale = history.scale(name, what)
    return encode(x, scale_of(most, kind, grain) if scale is None else scale, kind, grain).values(x.dtype)


class RoundedProduct(torch.autograd.Function):
    """x W^T with the operands of all three products rounded."""

    @staticmethod
    def forward(ctx, rounded, x: Tensor, weight: Tensor) -> Tensor:
        ctx.rounded = rounded
        ctx.save_for_backward(x, weight)
        return rounded(INPUT, x.flatten(0, -2)).matmul(rounded(WEIGHT, weight).t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, weight = ctx.saved_tensors
        d_y = gradient.flatten(0, -2)
        d_x = ctx.rounded(GRADIENT, d_y) @ ctx.rounded(WEIGHT, weight.t()).t()
        d_weight = ctx.rounded(GRADIENT, d_y.t()) @ ctx.rounded(INPUT, x.flatten(0, -2).t()).t()
        return None, d_x.view_as(x), d_weight
