"""Attention on fake CUDA tensors: no synchronisation, no copies of key heads, no mask but where one is said to be."""

from collections import Counter
from collections.abc import Callable

import pytest


def counted(changed: dict) -> tuple[list, int, Counter]:
    """Mismatches, synchronisations, and the launches of attention by operation, of the first step of a layer or two."""
    from shoal.spec.config import build_config
    from tests.fake_cuda.census import take_census

    values = {
        "model": {"name": "tiny", "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 16},
        "data": {"source": "synthetic", "sequence_length": 64, "document_mask": False},
        "train": {"global_batch": 1, "precision": "bf16"}, "parallel": {"micro_batch": 1},
    }  # fmt: skip
    for section, fields in changed.items():
        values[section] = values[section] | fields
    census = take_census(build_config(values), step=0)
    launches: Counter[str] = Counter()
    for line, number in census.launches.items():
        if "attention" in line.lower() or "segments" in line or "context/" in line:
            launches[line.split(" at ")[0]] += number
    return [*census.mismatches], census.synchronisations.total(), launches


DOCUMENTS = {"document_mask": True}
CASES = {
    "documents": {"data": DOCUMENTS, "parallel": {"recompute": "selective"}},
    "slices": {"data": DOCUMENTS, "parallel": {"pp": 2, "schedule": "terapipe"}, "model": {"layers": 2}},
    "ring": {"parallel": {"cp": 2}},
    "ring and exchange, documents": {"data": DOCUMENTS, "parallel": {"cp": 4, "ulysses": 2, "cp_order": "striped"}},
}
MASKS = {"tril", "triu", "bitwise_and", "index", "repeat_interleave", "bmm"}


@pytest.mark.parametrize("name", CASES)
def test_flash_attention_without_masks(on_fake_cuda: Callable, name: str) -> None:
    mismatches, synchronisations, launches = on_fake_cuda(counted, CASES[name])
    assert not mismatches and synchronisations <= 2, "of the step, none of attention"
    assert launches["flash_attention"] and launches["flash_attention_backward"]
    assert not launches.keys() & MASKS


def test_number_formats_without_flash_attention_get_a_mask(on_fake_cuda: Callable) -> None:
    mismatches, synchronisations, launches = on_fake_cuda(counted, {"data": DOCUMENTS, "train": {"precision": "fp32"}})
    assert not mismatches and synchronisations <= 2 and not launches["flash_attention"]
    assert launches["tril"] and launches["_scaled_dot_product_efficient_attention"]
