"""The numbers panel: one number in every format, bit by bit, and gradients against the range of a format."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from shoal.base.errors import UsageError
from shoal.base.section import Section
from shoal.engine.models.transformer import Transformer, initialise
from shoal.spec.catalog import model_shape
from shoal.spec.number_formats import BF16, E2M1, E4M3, E5M2, FP16, FP32, FP64, Format

# Kharya 2020 (NVIDIA), "TensorFloat-32": inputs of matrix products have the range of fp32 and the fraction of fp16
TF32 = Format("tf32", 4, 10, -126, (2 - 2.0**-10) * 2.0**127)


class Kind(NamedTuple):
    """A floating-point format as bits.

    Attributes:
        exponent: bits of the exponent.
        saturates: whether larger numbers become the largest one, since the format has no infinity.
    """

    format: Format
    exponent: int
    saturates: bool = False


KINDS = {
    "fp64": Kind(FP64, 11),
    "fp32": Kind(FP32, 8),
    "tf32": Kind(TF32, 8),
    "bf16": Kind(BF16, 8),
    "fp16": Kind(FP16, 5),
    "fp8 e4m3": Kind(E4M3, 4, saturates=True),
    "fp8 e5m2": Kind(E5M2, 5),
    "fp4 e2m1": Kind(E2M1, 2, saturates=True),
}
INT8 = "int8"
LONGEST, FARTHEST = 60, 400  # characters of a number, and its exponent of ten
BINS = (-60, 24)  # exponents of 2 of a histogram


class NumberRequest(Section):
    """A number as it is typed."""

    value: str = "0.1"


def show_number(request: NumberRequest) -> dict[str, Any]:
    """Round a number to the nearest value of each format, ties to even.

    Returns:
        For each format its bits, the nearest value, the error, and the format's range. The number as typed is exact:
        0.1 has an error in every format.

    Raises:
        UsageError: the text is no number, or too large or small.
    """
    exact = parse_number(request.value)
    rows = [_describe(name, kind, exact) for name, kind in KINDS.items()]
    return {"value": request.value.strip(), "formats": [*rows, _describe_int8(exact)]}


def parse_number(text: str) -> Fraction:
    """Parse a decimal number exactly.

    Raises:
        UsageError: the text is no number, or too large or small.
    """
    found = re.fullmatch(r"\s*([-+]?(?:\d+\.?\d*|\.\d+))(?:[eE]([-+]?\d{1,4}))?\s*", text)
    if found is None or len(text) > LONGEST:
        raise UsageError(f"value {text[:LONGEST]!r}: not a number. Type one as 0.1, -65504 or 6e-8.")
    exponent = int(found[2] or 0)
    if abs(exponent) > FARTHEST:
        raise UsageError(f"value {text}: the exponent must be from -{FARTHEST} to {FARTHEST}.")
    return Fraction(Decimal(found[1])) * Fraction(10) ** exponent


def round_to(kind: Kind, exact: Fraction) -> Fraction | None:
    """Return the nearest value of a format, ties to even; None for its infinity."""
    form, size = kind.format, abs(exact)
    if size == 0:
        return Fraction(0)
    power = max(_floor_log2(size), form.smallest) - form.digits  # of a step between neighbours
    nearest = round(size / Fraction(2) ** power) * Fraction(2) ** power
    largest = Fraction(form.largest)
    if nearest > largest:
        if not kind.saturates:
            return None
        nearest = largest
    return nearest if exact > 0 else -nearest


def encode_bits(kind: Kind, value: Fraction | None, *, negative: bool) -> tuple[str, str, str]:
    """Return the bits of a value of a format: sign, exponent, fraction; None is its infinity."""
    form, sign = kind.format, "1" if negative else "0"
    if value is None:
        return sign, "1" * kind.exponent, "0" * form.digits
    size = abs(value)
    power = max(_floor_log2(size), form.smallest) if size else form.smallest
    steps = int(size / Fraction(2) ** (power - form.digits))
    exponent = power - form.smallest + 1 if steps >> form.digits else 0  # 0: subnormal
    fraction = steps & ((1 << form.digits) - 1)
    return sign, f"{exponent:0{kind.exponent}b}", f"{fraction:0{form.digits}b}"


def _floor_log2(size: Fraction) -> int:
    guess = size.numerator.bit_length() - size.denominator.bit_length()
    return guess if size >= Fraction(2) ** guess else guess - 1


def _describe(name: str, kind: Kind, exact: Fraction) -> dict[str, Any]:
    nearest, form = round_to(kind, exact), kind.format
    bits = encode_bits(kind, nearest, negative=exact < 0)
    power = max(_floor_log2(abs(nearest)), form.smallest) - form.digits if nearest else form.tiniest
    return {
        "name": name, "bits": bits, "stored": "".join(bits), **_compare(exact, nearest),
        "infinite": nearest is None, "saturated": nearest is not None and abs(exact) > form.largest >= abs(nearest),
        "subnormal": nearest is not None and 0 < abs(nearest) < Fraction(2) ** form.smallest,
        "step": 2.0**power if power > -1075 else 0.0, "largest": form.largest, "smallest": 2.0**form.smallest,
        "tiniest": 2.0**form.tiniest,
    }  # fmt: skip


def _describe_int8(exact: Fraction) -> dict[str, Any]:
    nearest = Fraction(min(127, max(-128, round(exact))))
    bits = f"{int(nearest) & 255:08b}"
    return {
        "name": INT8, "bits": ("", "", bits), "stored": bits, **_compare(exact, nearest),
        "infinite": False, "saturated": not -128 <= exact <= 127, "subnormal": False, "step": 1.0, "largest": 127.0,
        "smallest": 1.0, "tiniest": 1.0,
    }  # fmt: skip


def _compare(exact: Fraction, nearest: Fraction | None) -> dict[str, Any]:
    """Return the nearest value as text of all its digits, and its errors as text, since they can be below fp64."""
    if nearest is None:
        return {"nearest": "", "error": "", "relative": ""}
    error = abs(nearest - exact)
    if not error:
        return {"nearest": f"{_to_decimal(nearest):.17g}", "error": "0", "relative": "0"}
    relative = _to_decimal(error / abs(exact))
    digits = f"{_to_decimal(nearest):.17g}"
    return {"nearest": digits, "error": f"{_to_decimal(error):.2e}", "relative": f"{relative:.2e}"}


def _to_decimal(value: Fraction) -> Decimal:
    return Decimal(value.numerator) / Decimal(value.denominator)


# ---- gradients ------------------------------------------------------------------------------------------------------


class GradientsRequest(Section):
    """Gradients of a small model, scaled and stored in a format."""

    format: Literal["fp32", "bf16", "fp16", "fp8 e4m3", "fp8 e5m2"] = "fp16"
    of: Literal["activations", "weights"] = "activations"
    exponent: Annotated[int, Field(ge=-8, le=32)] = 0
    """The scale is 2 to the power of this."""


def scale_gradients(request: GradientsRequest) -> dict[str, Any]:
    """Cast the gradients of a small model, times the scale, to a format of torch, and count what becomes of them.

    Returns:
        ``counts``: gradients by the exponent of 2 of their unscaled size, from ``first`` on; ``shares`` of those stored
        as zero, as subnormal and as normal numbers, and beyond the largest; and the format's range as exponents of 2.
    """
    gradients, form = measure_gradients(request.of), KINDS[request.format].format
    scaled = gradients * 2.0**request.exponent
    stored = scaled.to(getattr(torch, form.name)).to(torch.float64)
    size = stored.abs()
    lost = (size == 0) & (gradients != 0)
    step = 2.0 ** (_floor_log2(Fraction(form.largest)) - form.digits)
    beyond = ~stored.isfinite() | (scaled.abs() > form.largest + step / 2)
    small = (size > 0) & (size < 2.0**form.smallest)
    counts = count_exponents(request.of)
    total = sum(counts)
    shares = {"zero": int(lost.sum()), "subnormal": int(small.sum()), "too large": int(beyond.sum())}
    return {
        "first": BINS[0],
        "counts": counts,
        "total": total,
        "shares": {
            **{name: count / total for name, count in shares.items()}, "normal": 1 - sum(shares.values()) / total,
        },
        "tiniest": form.tiniest, "smallest": form.smallest, "largest": _floor_log2(Fraction(form.largest)) + 1,
    }  # fmt: skip


@cache
def count_exponents(of: str) -> list[int]:
    """Count the gradients that are not zero by the exponent of 2 of their size, over `BINS`."""
    gradients = measure_gradients(of)
    exponents = torch.frexp(gradients[gradients != 0])[1] - 1
    first, last = BINS
    return torch.bincount(exponents.clamp(first, last) - first, minlength=last - first + 1).tolist()


@cache
def measure_gradients(of: str) -> Tensor:
    """Return the gradients of the tiny model for one batch at its first weights: one flat float64 tensor.

    Of activations, these are the gradients of every layer's output, whose small values are the reason for loss scaling
    (Micikevicius et al. 2018, section 3.2 and figure 3).
    """
    shape = model_shape("tiny")
    model = Transformer(shape)
    initialise(model, seed=0)
    outputs: list[Tensor] = []

    def keep(module: object, given: object, output: Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    hooks = [layer.register_forward_hook(keep) for layer in model.layers.values()]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape.vocab, (4, 129), generator=generator)  # [b, s + 1]
    logits = model(tokens[:, :-1])  # [b, s, v]
    functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
    for hook in hooks:
        hook.remove()
    found = [x.grad for x in (outputs if of == "activations" else model.parameters())]
    return torch.cat([gradient.flatten().to(torch.float64) for gradient in found if gradient is not None])


def record_requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the requests of a saved page: a number, and every scale of fp16."""
    yield "numbers", NumberRequest().model_dump()
    for exponent in range(-8, 33):
        yield "gradients", {**GradientsRequest().model_dump(), "exponent": exponent}
