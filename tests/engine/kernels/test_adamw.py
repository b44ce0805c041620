"""AdamW with stochastic rounding and clipping in one kernel."""

import math
from itertools import pairwise

import pytest
import torch

from shoal.base.boxes import Box
from shoal.engine.kernels.adamw import adamw_
from shoal.engine.models.initial import positions
from shoal.engine.optim import low_precision_state
from shoal.engine.optim.build import build_for
from shoal.engine.optim.low_precision_state import FusedAdam, matrices
from shoal.engine.optim.shards import Shard, ShardPart, Shards
from shoal.engine.precision.policy import POLICIES
from shoal.spec.config import OptimizerConfig
from tests.engine.kernels.triton_tools import OPERATOR_CHECKS, TARGETS, compile_program

PARTS = [  # global shape, box
    ((7, 9), Box((0, 0), (7, 9))),
    ((5,), Box((2,), (3,))),
    ((64, 80), Box((3, 16), (61, 40))),  # columns of some rows
    ((3, 6, 8), Box((1, 0, 2), (2, 6, 5))),  # experts split along the last dim
    ((3, 6, 8), Box((1, 2, 0), (2, 3, 8))),
    ((3, 6, 8), Box((0, 1, 3), (3, 4, 2))),
]


def make_shards(dtype: torch.dtype, reduce: torch.dtype) -> Shards:
    """Return the parts in two shards of different decay, with padding at the end of each."""
    shards, shapes, generator = [], {}, torch.Generator().manual_seed(2)
    for first, last in pairwise((0, 3, len(PARTS))):
        parts, start = [], 0
        for i, (shape, box) in list(enumerate(PARTS))[first:last]:
            shapes[f"p{i}"] = shape
            parts.append(ShardPart(f"p{i}", shape, box, start))
            start += box.numel
        weights, gradient = torch.randn(2, start + 5, generator=generator)
        gradient[start:] = weights[start:] = 0
        shards.append(Shard(weights.to(dtype), gradient.to(reduce), tuple(parts), decay=0.1 * first, rate=1 + first))
    return Shards(shapes, shards, dtype)


@pytest.mark.parametrize(("shape", "box"), PARTS)
def test_matrices_have_the_positions_of_a_box(shape, box) -> None:
    found = [
        base + row * stride + column
        for rows, base, width, stride in matrices(ShardPart("p", shape, box, 0))
        for row in range(rows) for column in range(width)
    ]  # fmt: skip
    assert found == positions(box, shape, torch.device("cpu")).flatten().tolist()


def updated(rule, steps: int, **arguments) -> list[torch.Tensor]:
    given = [shard.gradient.clone() for shard in rule.shards.shards]
    for step in range(steps):
        for shard, gradient in zip(rule.shards.shards, given, strict=True):
            shard.gradient.copy_(torch.sin(gradient.float() * (step + 1)))
        rule.step(0.01, **arguments)
    states = [piece.tensor.flatten() for kind in rule.states().values() for of in kind.values() for piece in of]
    return [torch.cat([*(shard.weights for shard in rule.shards.shards)]), torch.cat(states)]


def compare(precision: str, name: str, tile: int) -> None:
    """Compare the rule, on whatever `adamw_` launches, with the blocks in float32 of the CPU."""
    policy, config, low_precision_state.TILE = POLICIES[precision], OptimizerConfig(name=name), tile
    results = []
    for fused in (False, True):
        shards = make_shards(policy.storage, policy.reduce)
        rule = build_for(policy, config, shards, seed=3)
        if fused:
            rule = FusedAdam(config, shards, decoupled=name == "adamw", state=policy.state, seed=3)
        results.append(updated(rule, 3, scale=torch.tensor(0.5)))
    for expected, actual in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        if actual.dtype == torch.float32:
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
            continue
        assert (actual == expected).float().mean() > 0.99  # rounding of the last bit in float32 may decide
        torch.testing.assert_close(actual, expected, rtol=2.0**-6, atol=1e-6)


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("precision", ["bf16-sums", "bf16-moments", "bf16-weights", "bf16-all"])
def test_operator_equals_blocks_in_float32(precision, name) -> None:
    compare(precision, name, 1 << 14)


@pytest.mark.parametrize("tile", [512, 1 << 14])
def test_program_equals_blocks_in_float32(interpreted, tile) -> None:
    for precision in ("bf16-all", "bf16-sums"):
        interpreted(check_program, precision, tile)


def check_program(precision: str, tile: int) -> None:
    from shoal.engine.kernels.programs import adamw as programs

    low_precision_state.adamw_ = programs.update
    compare(precision, "adamw", tile)


def test_program_skips(interpreted) -> None:
    interpreted(check_skip)


def check_skip() -> None:
    from shoal.engine.kernels.programs import adamw as programs

    for operator in (adamw_, programs.update):
        low_precision_state.adamw_ = operator
        shards = make_shards(torch.bfloat16, torch.bfloat16)
        rule = FusedAdam(OptimizerConfig(), shards, decoupled=True, state=torch.bfloat16, seed=3)
        before = [x.clone() for x in updated(rule, 1)]
        for shard in shards.shards:
            shard.gradient.fill_(math.nan)
        after = updated(rule, 1, skip=torch.ones(()))
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_operator() -> None:
    """Registrations: schema and fake tensors."""
    w, g, m, v = torch.rand(4, 40)
    tiles, keys = torch.tensor([[0, 32, 5, 2, 10, 20, 0]]), torch.zeros(1, 3, dtype=torch.int32)
    arguments = (w, g, m, v, tiles, keys, torch.ones(()), torch.zeros(()), 0.1, 0.1, 0.9, 0.9, 1e-8, 1, True, False)
    torch.library.opcheck(adamw_, arguments, test_utils=OPERATOR_CHECKS)


@pytest.mark.parametrize("capability", TARGETS.values(), ids=TARGETS)
def test_program_compiles(capability: int) -> None:
    from shoal.engine.kernels.programs import adamw as programs

    types = {name: "fp32" for name in programs.adamw_program.arg_names if name.islower()} | {
        **dict.fromkeys(("weights", "gradient", "mean", "square"), "*bf16"), "tiles": "*i64", "keys": "*i32",
        "scale": "*fp32", "skip": "*fp32",
    }  # fmt: skip
    constants = {"DECOUPLED": True, "BLOCK": programs.BLOCK}
    ptx = compile_program(programs.adamw_program, capability, types, **constants, ALIGNED=True)
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx  # 16 bytes at a time
    compile_program(programs.adamw_program, capability, types, **constants, ALIGNED=False)
