"""The constants and the facts of software hang together."""

import numpy as np
import pytest

from shoal.catalog.calibration import calibration, names_of
from shoal.catalog.software import software_named, software_table
from shoal.cost.runs import ATTENTION


def test_every_constant_is_for_what_is_known_and_no_larger_than_it_can_be() -> None:
    constants = calibration().constants
    assert len(constants) < 70, "few"
    for name, of in constants.items():
        assert len(of.meaning) > 10
        values = of.value if isinstance(of.value, dict) else {"": of.value}
        assert set(values) <= set(names_of(of.by)), name
        assert all(0 < value <= (of.most or np.inf) * 1.001 for value in values.values()), name


def test_what_no_measurement_reached_is_what_one_expects() -> None:
    own = calibration()
    for name, of in own.constants.items():
        if of.by == "software" and of.fitted:
            assert own[name][list(software_table()).index("shoal")] == of.expected, name


@pytest.mark.parametrize(
    ("text", "year", "name"),
    [
        ("Megatron-LM", 2021, "megatron-2021"),
        ("Megatron-LM", 2024, "megatron-core"),
        ("Megatron-LM fork", 2023, "zero-bubble"),
        ("NeMo 24.07", 2024, "megatron-core"),
        ("DeepSpeed ZeRO-3 in Megatron", 2021, "deepspeed"),
        ("llm-foundry/Composer FSDP1", 2024, "composer"),
        ("a trainer of tomorrow", 2027, "other"),
    ],
)
def test_software_is_found_by_its_name_and_year(text: str, year: int, name: str) -> None:
    assert software_named(text, year).name == name
    assert software_table()[name].attention in ATTENTION
