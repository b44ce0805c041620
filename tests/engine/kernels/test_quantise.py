"""Quantisation to 8 bits: the Triton programs against the reference of `shoal.engine.precision.float8`, bit for bit."""

import math

import pytest
import torch

from shoal.engine.kernels.quantise import (
    FORMAT,
    SOURCES,
    TILE,
    _empty,
    _empty_blocks,
    _empty_nvfp4,
    _locate,
    _parts,
    _size,
    maxima,
    nvfp4_maxima,
    quantise,
    quantise_blocks,
    quantise_nvfp4,
)
from shoal.engine.precision.float8 import Grain, octave
from tests.engine.kernels.triton_tools import OPERATOR_CHECKS, TARGETS, compile_program

KINDS = list(FORMAT)
BLOCKS = [(1, 128, "power"), (128, 128, "power"), (1, 32, "mx"), (1, 16, "power"), (32, 32, "power")]


def sample(m: int, k: int, dtype: torch.dtype, *, bad: bool = False) -> torch.Tensor:
    """Rows of very different size, with zeros, halves between codes, tiny numbers, perhaps not finite."""
    generator = torch.Generator().manual_seed(m + k)
    x = torch.randn(m, k, generator=generator) * 10.0 ** torch.randint(-12, 12, (m, 1), generator=generator)
    x[0, : k // 4], x[-1, k // 2 :] = 0, 0
    x[m // 2, :] = torch.arange(k) / 16  # many are halfway between two codes
    # Triton's interpreter converts no subnormal bfloat16.
    x[m // 3, ::3] = 2.0**-125 if dtype == torch.bfloat16 else 2.0**-130
    if bad:
        x[3, 50], x[9, 100], x[129, 150] = math.inf, -math.inf, math.nan
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_programs_equal_the_reference(interpreted, dtype: torch.dtype) -> None:
    interpreted(check_programs, sample(130, 200, dtype), KINDS if dtype == torch.bfloat16 else KINDS[:1])
    interpreted(check_programs, sample(1, 40, dtype), KINDS[:1])


def test_what_is_not_finite_stays_so(interpreted) -> None:
    interpreted(check_programs, sample(130, 200, torch.bfloat16, bad=True), KINDS[:1])


def check_programs(x: torch.Tensor, kinds: list[str]) -> None:
    round_like_hardware()
    for by_row in (False, True):
        most = maxima(x, by_row)
        equal([launch_maxima(x, by_row)], [most])
        for kind in kinds:
            equal(launch(x, most, kind, by_row, False), quantise(x, most, kind, by_row, False))
    for kind in kinds:
        scale = torch.tensor([3.0])
        equal(launch(x, scale, kind, False, True), quantise(x, scale, kind, False, True))
        for block in BLOCKS if kind == kinds[0] else BLOCKS[1:4]:  # the second kind once of each kind of block
            equal(launch_blocks(x, kind, *block), quantise_blocks(x, kind, *block))


def round_like_hardware() -> None:
    """Let Triton's interpreter convert to and from 8 bits as torch does, to nearest even, as hardware does.

    The interpreter's own conversion rounds halves up, and knows no NaN. `test_programs_compile` looks for the
    instruction, which PTX defines to round to nearest even.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def convert(self, source, kind, rounding):
        dtypes, x = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}, torch.from_numpy(source.data)
        if kind.scalar not in dtypes:
            return TensorHandle(x.view(dtypes[source.dtype.scalar]).float().numpy(), kind.scalar)
        return TensorHandle(x.to(dtypes[kind.scalar]).view(torch.uint8).numpy(), kind.scalar)

    InterpreterBuilder.create_fp_to_fp = convert


def launch_maxima(x, by_row, *source):
    from shoal.engine.kernels.programs import quantise as programs

    located = _locate(x, *source)
    found = torch.zeros(sum(located[-2:]) if by_row else 1, dtype=torch.int32)
    programs.maxima(located, found, by_row=by_row, tile=TILE)
    return found.view(torch.float32)


def launch(x, values, kind, by_row, given, *source):
    from shoal.engine.kernels.programs import quantise as programs

    located, most = _locate(x, *source), torch.zeros(int(given), dtype=torch.int32)
    out, largest = _empty(x, located[-2:], kind, by_row), FORMAT[kind].largest
    programs.quantise(located, values, (*out, most), largest=largest, by_row=by_row, given=given, tile=TILE)
    return *out, most.view(torch.float32)


def launch_blocks(x, kind, rows, columns, scale, *source):
    from shoal.engine.kernels.programs import quantise as programs

    located, mx = _locate(x, *source), scale == "mx"
    out = _empty_blocks(x, located[-2:], kind, Grain(rows, columns, scale))
    as_bytes = [*out[:2], *(each.view(torch.uint8) if mx else each for each in out[2:])]
    programs.quantise_blocks(
        located, as_bytes, largest=FORMAT[kind].largest, octave=octave(FORMAT[kind]), block=columns, mx=mx,
        square=rows == columns, tile=TILE,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("bad", [False, True])
def test_programs_in_4_bits_equal_the_reference(interpreted, bad: bool) -> None:
    interpreted(check_4_bits, sample(256, 256 if bad else 384, torch.bfloat16, bad=bad), bad)


def check_4_bits(x: torch.Tensor, bad: bool) -> None:
    from shoal.engine.kernels.programs import nvfp4 as programs

    round_like_hardware()
    both = torch.zeros(2, dtype=torch.int32)
    programs.maxima(x, both)
    equal([both.view(torch.float32)], [nvfp4_maxima(x)])
    drawn = torch.tensor(2**33 + 77), torch.arange(x.shape[1]) + 100
    for square, given in ((False, (None, None)), (False, drawn), (True, (None, None))):
        # as if another rank had larger values in its part
        most = 1.5 * (maxima(x, False) if square else nvfp4_maxima(x))
        found, key = _empty_nvfp4(x, square), -0x123456789ABCDEF1
        programs.quantise(x, most, key, *given, _parts(found), square=square)
        expected = quantise_nvfp4(x, most, square, key, *given)
        for a, b in zip(found, expected, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            if not bad:  # else the codes are any
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        equal([each[:-4] for each in found[2:]], [each[:-4] for each in expected[2:]])
        factors = torch.cat([each[-4:].view(torch.float32) for each in found[2:]])
        assert bad == factors.isnan().all() == factors.isnan().any()


def test_two_codes_of_4_bits_share_a_byte() -> None:
    """Codes in the order of their numbers; the tensor's largest block has the scale 448, and the last row's half."""
    x = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).repeat(256, 8)
    x[:, 1::2] *= -1
    x[255] *= 0.5
    codes, _, inverse, _ = quantise_nvfp4(x, nvfp4_maxima(x), False, 0, None, None)
    assert codes.tolist() == [[0x90, 0xB2, 0xD4, 0xF6] * 8] * 256
    scales = inverse[:-4].float()
    assert (scales[:512] == 448).all() and scales[512 + 127 % 32 * 16 + 127 // 32 * 4] == 224
    assert inverse[-4:].view(torch.float32).item() == pytest.approx(1 / 448)


def test_a_rank_that_loses_a_nan_of_the_axis_keeps_its_own() -> None:
    """A maximum over ranks may drop a NaN: the scale of its block has it."""
    x = torch.ones(128, 128)
    x[5, 50] = math.nan
    for square, count in ((False, 1), (True, 16)):
        _, _, inverse, turned_inverse = quantise_nvfp4(x, torch.full((2,), 2.0), square, 0, None, None)
        bad = [each[:-4].float().isnan().sum() for each in (inverse, turned_inverse)]
        assert bad == [count, 1 if not square else 16]


def equal(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and (1 in a.shape or a.stride() == b.stride())
        if a.dtype == torch.float8_e8m0fnu:
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        else:
            assert torch.equal(a.double().nan_to_num(1e300), b.double().nan_to_num(1e300))


@pytest.mark.parametrize("source", [name for name in SOURCES if name != "plain"])
def test_results_of_operations_are_quantised_without_being_written(interpreted, source: str) -> None:
    interpreted(check_source, source, 130, 200)
    if source == "swiglu_backward":
        interpreted(check_source, source, 60, 2 * TILE)  # tiles of gate and up take turns


def operands(source: str, m: int, k: int) -> list[torch.Tensor]:
    """Inputs of an operation whose result is [m, k]; of the norm, without 1/rms."""
    shapes = {"norm": [(m, k), (k,)], "swiglu": [(m, 2 * k)], "swiglu_backward": [(m, k // 2), (m, k)]}[source]
    generator = torch.Generator().manual_seed(m)
    return [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]


def check_source(source: str, m: int, k: int) -> None:
    """Bit for bit the reference's codes of the separate operation's result; and near the result in float64."""
    from shoal.engine.kernels.programs import rms_norm, swiglu

    round_like_hardware()
    x, *others = operands(source, m, k)
    if source == "norm":
        (weight,) = others
        _, result, inverse = rms_norm.forward(x, None, weight, 1e-5)
        others = [inverse, weight]
    elif source == "swiglu":
        result = swiglu.forward(x)
    else:
        (gate_up,) = others
        result = swiglu.backward(x, gate_up)
    exact = SOURCES[source](x.double(), *(each.double() for each in others))
    others += [None] * (2 - len(others))
    assert _size(x, others[0], None, source) == tuple(result.shape) == (m, k)
    for by_row in (False, True):
        most = launch_maxima(x, by_row, *others, source)
        equal([most], [maxima(result, by_row)])
        equal(launch(x, most, "float8_e5m2", by_row, False, *others, source),
              quantise(result, most, "float8_e5m2", by_row, False))
        codes, _, inverse, *_ = launch(x, most, "float8_e4m3fn", by_row, False, *others, source)
        scaled = codes.double() * inverse.double()
        assert ((scaled - exact).abs() <= (2**-4 + 2**-8) * exact.abs() + 2**-9 * inverse.double()).all()
    for block in BLOCKS[:3]:
        separate = quantise_blocks(result, "float8_e4m3fn", *block)
        equal(launch_blocks(x, "float8_e4m3fn", *block, *others, source), separate)


def test_scales_of_mx_are_where_cublas_reads_them() -> None:
    """Row r and block c of a tile of 128 x 4 are at 16 (r mod 32) + 4 (r div 32) + c; tiles in row-major order."""
    x = torch.exp2(torch.arange(256 * 8).view(256, 8) % 101 - 50.0).repeat_interleave(32, 1)
    scales = quantise_blocks(x, "float8_e4m3fn", 1, 32, "mx")[2].float()
    for row, block in ((0, 0), (1, 0), (31, 3), (32, 0), (127, 7), (128, 4), (255, 5)):
        place = (row // 128 * 2 + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
        assert scales[place] == x[row, 32 * block] * 2.0**-8


def test_operators() -> None:
    x = sample(40, 64, torch.bfloat16)
    samples = [
        (maxima, (x, False)), (maxima, (x, True)),
        *((quantise, (x, maxima(x, by_row), "float8_e5m2", by_row, False)) for by_row in (False, True)),
        (quantise, (x, torch.ones(1), "float8_e4m3fn", False, True)),
        *((quantise_blocks, (x, "float8_e4m3fn", *block)) for block in BLOCKS),
        (nvfp4_maxima, (x,)), (quantise_nvfp4, (x, torch.ones(1), True, 0, None, None)),
        (quantise_nvfp4, (x, torch.ones(2), False, 5, torch.tensor(3), torch.arange(64))),
    ]  # fmt: skip
    for operator, args in samples:
        torch.library.opcheck(operator, args, test_utils=OPERATOR_CHECKS)


E4M3, E5M2 = KINDS
PROGRAMS = [  # on the GPUs whose products take their results; 8.0 has no 8-bit numbers, and its products are emulated
    ("maxima", "sm_90a", E4M3, {"BY_ROW": True}),
    ("maxima", "sm_90a", E4M3, {"BY_ROW": False, "SOURCE": "swiglu"}),
    ("quantise", "sm_90a", E4M3, {"BY_ROW": False, "GIVEN": False, "SOURCE": "norm"}),
    ("quantise", "sm_90a", E5M2, {"BY_ROW": True, "GIVEN": False, "SOURCE": "swiglu_backward"}),
    ("quantise_blocks", "sm_90a", E4M3, {"BLOCK": 128, "MX": False, "SQUARE": False, "SOURCE": "norm"}),
    ("quantise_blocks", "sm_90a", E4M3, {"BLOCK": 128, "MX": False, "SQUARE": False, "SOURCE": "swiglu"}),
    ("quantise_blocks", "sm_90a", E5M2, {"BLOCK": 128, "MX": False, "SQUARE": False, "SOURCE": "swiglu_backward"}),
    ("quantise_blocks", "sm_100a", E5M2, {"BLOCK": 32, "MX": True, "SQUARE": False, "SOURCE": "swiglu_backward"}),
    ("quantise", "sm_90a", E5M2, {"BY_ROW": False, "GIVEN": True}),
    ("quantise", "sm_100a", E4M3, {"BY_ROW": True, "GIVEN": False}),
    ("quantise_blocks", "sm_90a", E5M2, {"BLOCK": 128, "MX": False, "SQUARE": False}),
    ("quantise_blocks", "sm_90a", E4M3, {"BLOCK": 128, "MX": False, "SQUARE": True}),
    ("quantise_blocks", "sm_100a", E4M3, {"BLOCK": 32, "MX": True, "SQUARE": False}),
]


@pytest.mark.parametrize(("name", "target", "kind", "options"), PROGRAMS)
def test_programs_compile(name: str, target: str, kind: str, options: dict) -> None:
    from shoal.engine.kernels.programs import quantise as programs

    program, codes = getattr(programs, f"{name}_program"), {E4M3: "*fp8e4nv", E5M2: "*fp8e5"}[kind]
    scales = "*u8" if options.get("MX") else "*fp32"
    types = {
        "x": "*bf16", "a": "*fp32" if options.get("SOURCE") == "norm" else "*bf16", "b": "*bf16",
        "codes": codes, "turned": codes, "inverse": scales, "turned_inverse": scales,
        "scales": "*fp32", "most": "*i32", "maxima": "*i32", "m": "i32", "k": "i32",
    }  # fmt: skip
    format = {"LARGEST": FORMAT[kind].largest, "OCTAVE": octave(FORMAT[kind])}
    options = format | {"TILE": TILE, "SOURCE": "plain"} | options
    options = {name: value for name, value in options.items() if name in program.arg_names}
    ptx = compile_program(program, TARGETS[target], types, num_warps=programs.WARPS, **options)
    assert "ld.global.v4.b32" in ptx  # 16 bytes at a time, and of both results
    if name != "maxima":
        assert "st.global.v4.b32" in ptx
        assert f"cvt.rn.satfinite.{'e4m3x2' if kind == E4M3 else 'e5m2x2'}.f32" in ptx


@pytest.mark.parametrize(("name", "drawn", "square"), [
    ("maxima", False, False), ("quantise", True, False), ("quantise", False, True)
])  # fmt: skip
def test_programs_in_4_bits_compile(name: str, drawn: bool, square: bool) -> None:
    from shoal.engine.kernels.programs import nvfp4 as programs

    types = {
        "x": "*bf16", "found": "*i32", "most": "*fp32", "key": "i64", "codes": "*i32", "turned": "*i32",
        "inverse": "*u8", "turned_inverse": "*u8", "factor": "*fp32", "turned_factor": "*fp32", "m": "i32", "k": "i32",
    }  # fmt: skip
    options: dict = {"SQUARE": square}
    if drawn:
        types |= {"start": "*i64", "features": "*i64"}
    else:
        options |= {"start": None, "features": None}
    program = getattr(programs, f"{name}_program")
    options = {name: value for name, value in options.items() if name in program.arg_names}
    ptx = compile_program(program, TARGETS["sm_100a"], types, num_warps=programs.WARPS, **options)
    assert "ld.global.v4.b32" in ptx
    if name == "quantise":
        assert "st.global.v2.b32" in ptx and "cvt.rn.satfinite.e4m3x2.f32" in ptx
        assert drawn or "0f4B000000" in ptx  # 2^23, by which the codes of all weights are rounded
