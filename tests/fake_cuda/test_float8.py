"""A step with 8-bit products on a Hopper GPU: no host synchronisation, and each matrix encoded once."""

from collections.abc import Callable

import pytest

from shoal.spec.config import build_config

PRODUCTS, MICRO_BATCHES = 4, 2
RUN = {
    "model": {"name": "tiny", "layers": 1, "hidden": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn": 1024},
    "data": {"source": "synthetic", "sequence_length": 512},
    "parallel": {"micro_batch": 1},
}


def count_launches(
    settings: dict, ffn: int = 1024, tokens: int = 512, precision: str = "fp8"
) -> tuple[list, list, dict, list]:
    import warnings

    import torch

    from shoal.engine.precision import recipe
    from tests.fake_cuda import census

    train = {"precision": precision, "global_batch": MICRO_BATCHES}
    model, data = RUN["model"] | {"ffn": ffn}, RUN["data"] | {"sequence_length": tokens}
    config = build_config(RUN | {"model": model, "data": data, "train": train, "float8": settings})
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setattr(torch.version, "cuda", "13.0")
        if precision == "nvfp4":
            patch.setattr(recipe, "hardware_scales", lambda device: {"nv"})
        found = census.take_census(config)
    launches: dict[str, int] = {}
    places = "engine/parallel/float8", "engine/precision", "engine/operators"
    for line, count in found.launches.items():
        if any(place in line for place in places):
            launches[line.split(" at ")[0]] = launches.get(line.split(" at ")[0], 0) + count
    synchronisations = [line for line in found.synchronisations if "precision" in line]
    said = [str(each.message) for each in warned if "multiplies matrices" in str(each.message)]
    return [*found.mismatches], synchronisations, launches, said


@pytest.mark.parametrize(("settings", "encoding"), [
    ({}, ["maxima", "quantise"]),
    ({"amax": "delayed"}, ["quantise", "add"]),
    ({"scales": "row"}, ["maxima", "quantise"]),
    ({"scales": "block"}, ["quantise_blocks"]),
], ids=str)
def test_matrices_are_encoded_once(on_fake_cuda: Callable, settings: dict, encoding: list) -> None:
    mismatches, synchronisations, launches, said = on_fake_cuda(count_launches, settings)
    assert not mismatches and not synchronisations and not said
    matrices = PRODUCTS * (1 + 2 * MICRO_BATCHES)
    expected, norms = dict.fromkeys(encoding, matrices), 2 * MICRO_BATCHES
    if not settings:  # a norm computes the maximum of its result
        expected["maxima"] -= norms
    assert {name: launches.get(name) for name in encoding} == expected
    assert launches["rms_statistics"] == norms and launches["rms_norm"] == MICRO_BATCHES  # before the head
    assert not {"swiglu", "swiglu_backward"} & launches.keys(), "no result is written before it is encoded"
    into = MICRO_BATCHES * PRODUCTS // 2 if settings.get("scales") != "row" else 0
    products = 3 * MICRO_BATCHES * PRODUCTS
    assert launches["_scaled_mm"] == products - into and launches.get("float8_multiply_into", 0) == into


def test_matrices_are_encoded_once_in_4_bits(on_fake_cuda: Callable) -> None:
    mismatches, synchronisations, launches, said = on_fake_cuda(count_launches, {}, 1024, 512, "nvfp4")
    assert not mismatches and not synchronisations and not said
    of_tokens = 2 * PRODUCTS * MICRO_BATCHES
    assert (launches["maxima"], launches["nvfp4_maxima"]) == (PRODUCTS, of_tokens)  # of weights; of inputs, gradients
    assert launches["quantise_nvfp4"] == PRODUCTS + of_tokens
    assert launches["_scaled_mm_v2"] == 3 * MICRO_BATCHES * PRODUCTS


def test_a_side_that_hardware_does_not_take_is_named(on_fake_cuda: Callable) -> None:
    """The feed-forward block is computed from decoded values, attention is not."""
    mismatches, synchronisations, launches, said = on_fake_cuda(count_launches, {"scales": "block"}, 768)
    assert not mismatches and not synchronisations
    of_attention = 3 * MICRO_BATCHES * 2
    assert launches["_scaled_mm"] + launches["float8_multiply_into"] == of_attention
    (warning,) = said
    assert warning.startswith("mlp.gate has 768 x 512 weights on a rank") and "multiples of 512" in warning


def test_a_number_of_tokens_that_hardware_does_not_take_is_named_once(on_fake_cuda: Callable) -> None:
    *_, launches, said = on_fake_cuda(count_launches, {"scales": "row"}, 1024, 24)
    assert "_scaled_mm" not in launches
    (warning,) = said
    assert warning.startswith("a micro-batch has 24 tokens on a rank") and "multiple of 16" in warning
