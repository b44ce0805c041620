"""The three products of linear layers with operands in 8 or 4 bits.

    y = x W^T      x and W with rows along the input features
    dX = dY W      dY and W^T along the output features
    dW = dY^T X    dY^T and X^T along the tokens

Accumulation and all other operations use the compute dtype. Layers with the same input whose weights are adjacent are
one matrix, with the scales of one.

Weights are encoded at their first use after a change, and kept for all micro-batches of the step (not in ZeRO-3, where
the weights themselves are not kept). Inputs are encoded once for all layers that share them. Where backward gathers the
input of a tensor-parallel block again (`GatheredEntry`), it gathers codes of X^T, of which each rank keeps some rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from shoal.engine.collectives.group import Group
from shoal.engine.collectives.ops import all_gather_flat
from shoal.engine.parallel.float8 import operators
from shoal.engine.parallel.float8.encoding import DIMS, Encoded, Encoder
from shoal.engine.parallel.weight_grad import GradSink, ProductInput, add_gradient, make_key
from shoal.engine.parallel.zero.bucket import Bucket, join_adjacent
from shoal.engine.parallel.zero.gradients import Term
from shoal.engine.precision.float8 import ROW, Codes, Grain
from shoal.engine.precision.product import multiply, multiply_into, operand_scales
from shoal.engine.precision.recipe import GRADIENT, INPUT, WEIGHT, AmaxHistory, Recipe

_ALIGN = 16  # bytes: of results that `torch._scaled_mm` writes in place


class Float8Product(Encoder):
    """Products in 8 or 4 bits of one linear layer, or of several with one input and adjacent weights.

    Attributes:
        key: by which operators find it.
        form: what shapes the codes of its input, as text (`operators.register_form`).
        waits: whether weight gradients may wait for the next `GradSink.flush`.
    """

    waits = False

    def __init__(
        self, name: str, recipe: Recipe, history: AmaxHistory | None, split: str, group: Group | None, *, native: bool,
        weights: Sequence[nn.Parameter], bucket: Bucket, sink: GradSink, device: torch.device,
        keepers: Group | None = None,
    ):  # fmt: skip
        """Create the product; each of the ``keepers`` keeps rows of the codes of X^T, which backward gathers."""
        super().__init__(name, recipe, history, split, group, native=native)
        self.weights, self.bucket, self.sink, self.keepers = weights, bucket, sink, keepers
        self.parts, self.part = (keepers.size(), keepers.rank()) if keepers else (1, 0)
        self.key, self.form = make_key(self, device), operators.register_form(recipe, native, self.parts)

    def __call__(self, x: Tensor, encoded: Encoded) -> Tensor:
        """Compute x W^T: [.., in] -> [.., out of all layers]; ``encoded`` is x from `encode_input`."""
        if torch.compiler.is_compiling():
            rows = sum(len(weight) for weight in self.weights)
            return operators.multiply_input(x, *encoded, self.key, rows, torch.is_grad_enabled())
        if torch.is_grad_enabled():
            self.note(INPUT, encoded[-1])
        return _Float8Linear.apply(self, x, *encoded[:-1], *self.weights)

    def encode_input(self, x: Tensor) -> Encoded:
        """Encode an input [.., in], also for other products that share it."""
        # Detached: encoding needs no autograd, because the product computes the gradient of x.
        if torch.compiler.is_compiling():
            return operators.encode_input(x.detach(), self.key, self.form)
        return operators.keep_part(self.encode_tokens(x.detach().flatten(0, -2), INPUT), self.parts, self.part)

    def normalise(
        self, x: Tensor, update: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Encoded] | None:
        """Encode the RMSNorm of x + update as the input, in place of `encode_input`.

        Returns:
            x + update ([0] without an update), the hollow normalised sum, and its codes; None if the device does not
            multiply them, or in 4 bits.
        """
        if self.recipe.rotates or not self.fits(x.shape[:-1].numel()):
            return None
        return operators.call_normalise(x, update, weight, eps, self.key, self.form)

    def activate(self, x: Tensor, encoded: Encoded, following: Float8Product) -> tuple[Tensor, Encoded] | None:
        """Compute SwiGLU of x W^T, gate before up, as the input of another product.

        Returns:
            The hollow result and its codes; None if the device does not multiply them, or in 4 bits.
        """
        tokens = x.shape[:-1].numel()
        if self.recipe.rotates or not (self.fits(tokens) and following.fits(tokens)):
            return None
        rows, trains = sum(len(weight) for weight in self.weights), torch.is_grad_enabled()
        inputs = x, *encoded, self.key, following.key, following.form, rows, trains
        return operators.call_activate(*inputs)

    def forward(self, codes: Tensor, scale: Tensor, weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return x W^T, [tokens, out]."""
        native = self.on_hardware(len(codes))
        x = Codes(codes, scale, self.recipe.grains[INPUT], native)
        return multiply(x, self.encode_weight(weights, turned=False, native=native), dtype, fast=True)

    def backward_input(self, gradient: Codes, weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return dY W, [tokens, in]."""
        return multiply(gradient, self.encode_weight(weights, turned=True, native=gradient.for_hardware), dtype)

    def encode_gradient(self, gradient: Tensor, start: Tensor | int | None = None) -> tuple[Codes, Codes]:
        """Return the codes of dY by output feature and of dY^T by token; ``start`` as in `encode`."""
        gradient = gradient.flatten(0, -2)
        return self.take_codes(self.encode_tokens(gradient, GRADIENT, start), native=self.on_hardware(len(gradient)))

    def take_codes(self, encoded: Encoded, *, native: bool) -> tuple[Codes, Codes]:
        """Return the codes of dY and of dY^T; note its maxima."""
        codes, scale, turned, turned_scale, amax = encoded
        grain = self.recipe.grains[GRADIENT]
        self.note(GRADIENT, amax)
        return Codes(codes, scale, grain, native), Codes(turned, turned_scale, grain, native)

    def take_gradient(
        self, gradient: tuple[Codes, Codes], turned: Tensor, scale: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Accumulate the gradient of W from the codes of dY and dY^T, and return the gradient of x, [tokens, in]."""
        along, across = gradient
        term = self.gradient_term(across, turned, scale, dtype)
        d_x = self.backward_input(along, self.weights, dtype)
        (self.sink.defer_or_add if self.waits else self.sink.add)(self.weights, term)
        return d_x

    def gradient_term(self, gradient: Codes, turned: Tensor, scale: Tensor, dtype: torch.dtype) -> Term:
        """Return the term dY^T X of the weight's gradient, given dY^T by token and the saved codes of X^T by token.

        Where other ranks have kept rows of these codes, start gathering them, unless the term is for later.
        """
        x = ProductInput(partial(self._start_gather, turned), uses=1)
        if not self.sink.deferring:
            x.start()
        return partial(_add_multiplied, gradient, x, scale, self.recipe.grains[INPUT], dtype)

    def _start_gather(self, turned: Tensor) -> Callable[[], Tensor]:
        """Start gathering the codes of X^T by rows; the returned function waits for them."""
        if self.keepers is None:
            return lambda: turned
        every = turned.new_empty(self.parts * len(turned), turned.shape[1])
        work = all_gather_flat(every.view(torch.uint8).view(-1), turned.view(torch.uint8).view(-1), self.keepers)

        def wait() -> Tensor:
            work.wait()
            return every

        return wait

    def encode_weight(self, weights: Sequence[Tensor], *, turned: bool, native: bool) -> Codes:
        """Return the codes of W along the input features, or of W^T along the output features."""
        weight, grain, dims = join_adjacent(weights).detach(), self.recipe.grains[WEIGHT], DIMS[WEIGHT]
        together = native or self.recipe.is_square(WEIGHT)

        def compute() -> tuple[Codes, Codes]:
            if together:
                codes, scale, across, across_scale, amax = self.encode(weight, WEIGHT, native=native)
                both = Codes(codes, scale, grain, native), Codes(across, across_scale, grain, native)
            else:
                matrix, along = (weight.t(), dims[::-1]) if turned else (weight, dims)
                one, amax = self.encode_alone(matrix, WEIGHT, along)
                both = one, one
            self.note(WEIGHT, amax)
            return both

        key = self.name, native, turned and not together, self.history.changes if self.history else 0
        return self.bucket.derive(key, compute)[turned]


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, product: Float8Product, x: Tensor, codes: Tensor, scale: Tensor, turned: Tensor, turned_scale: Tensor,
        *weights: nn.Parameter,
    ) -> Tensor:  # fmt: skip
        ctx.product, ctx.shape, ctx.dtype = product, x.shape, x.dtype
        ctx.start = None if product.draws is None else product.draws.start
        ctx.save_for_backward(turned, turned_scale, *weights)
        y = product.forward(codes, scale, weights, x.dtype)
        return y.resize_(*x.shape[:-1], y.shape[-1])  # not a view: tensor-parallel ranks sum it in place

    @staticmethod
    def backward(ctx, gradient: Tensor):
        product, (turned, turned_scale, *weights) = ctx.product, ctx.saved_tensors
        along, across = product.encode_gradient(gradient, ctx.start)
        d_x = term = None
        if ctx.needs_input_grad[-1]:  # else frozen
            term = product.gradient_term(across, turned, turned_scale, ctx.dtype)
        if ctx.needs_input_grad[1]:
            d_x = product.backward_input(along, weights, ctx.dtype).view(ctx.shape)
        if term is not None:
            sink = product.sink
            (sink.defer_or_add if d_x is not None and product.waits else sink.add)(product.weights, term)
        return None, d_x, *(None,) * (4 + len(weights))


def _add_multiplied(
    a: Codes, x: ProductInput, scale: Tensor, grain: Grain, dtype: torch.dtype, total: Tensor, fresh: bool
) -> None:
    b = Codes(x.take(), scale, grain, a.for_hardware)
    aligned = total.storage_offset() * total.itemsize % _ALIGN == 0
    # With scales of rows, older devices have no results in float32. torch's public NVFP4 product writes to no tensor.
    if fresh and aligned and a.for_hardware and a.grain != ROW and a.grain.scale != "nv":
        multiply_into(a.codes, b.codes, *operand_scales(a, b), total)
        return
    # Rounded to bf16 as decoded products are: at most 2^-9 of an element, a small part of the error of 8-bit codes. The
    # sum stays in float32. A product in float32 would move 4 bytes more an element and take twice the memory.
    add_gradient(multiply(a, b, dtype), total, fresh)
