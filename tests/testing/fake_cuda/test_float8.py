"""A step with 8-bit products on a Hopper GPU: no host synchronisation, and each matrix encoded once."""

from collections.abc import Callable

import pytest

from shoal.spec.config import build_config

LINEARS, INPUTS, MICRO_BATCHES = 7, 4, 2
RUN = {
    "model": {"name": "tiny", "layers": 1, "hidden": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn": 1024},
    "data": {"source": "synthetic", "sequence_length": 512},
    "parallel": {"micro_batch": 1},
}


def count_launches(settings: dict) -> tuple[list, list, dict]:
    import torch

    from shoal.testing.fake_cuda import census

    train = {"precision": "fp8", "global_batch": MICRO_BATCHES}
    config = build_config(RUN | {"train": train, "float8": settings})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "cuda", "13.0")
        found = census.take_census(config)
    launches: dict[str, int] = {}
    for line, count in found.launches.items():
        if "engine/parallel/float8.py" in line or "engine/precision" in line:
            launches[line.split(" at ")[0]] = launches.get(line.split(" at ")[0], 0) + count
    return [*found.mismatches], [line for line in found.synchronisations if "precision" in line], launches


@pytest.mark.parametrize(("settings", "encoding"), [
    ({}, ["maxima", "quantise"]),
    ({"amax": "delayed"}, ["quantise", "add"]),
    ({"scales": "row"}, ["maxima", "quantise"]),
    ({"scales": "block"}, ["quantise_blocks"]),
], ids=str)
def test_matrices_are_encoded_once(on_fake_cuda: Callable, settings: dict, encoding: list) -> None:
    mismatches, synchronisations, launches = on_fake_cuda(count_launches, settings)
    assert not mismatches and not synchronisations
    matrices = LINEARS + MICRO_BATCHES * (INPUTS + LINEARS)
    assert {name: launches.get(name) for name in encoding} == dict.fromkeys(encoding, matrices)
    into = MICRO_BATCHES * LINEARS // 2 if settings.get("scales") != "row" else 0
    products = 3 * MICRO_BATCHES * LINEARS
    assert launches["_scaled_mm"] == products - into and launches.get("float8_multiply_into", 0) == into
