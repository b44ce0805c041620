"""The constants and the facts of software hang together."""

import re
import tomllib
from math import inf, nan

import numpy as np
import pytest
import tomli_w

from shoal.base.errors import UsageError
from shoal.planning.cost.batched_runs import ATTENTION
from shoal.spec.catalog.calibration import calibration, constant_names, read_calibration
from shoal.spec.catalog.software import software_named, software_table
from shoal.spec.catalog.tables import FOLDER


def test_every_constant_is_for_what_is_known_and_no_larger_than_it_can_be() -> None:
    constants = calibration().constants
    assert len(constants) < 70, "few"
    for name, of in constants.items():
        assert len(of.meaning) > 10
        values = of.value if isinstance(of.value, dict) else {"": of.value}
        assert set(values) <= set(constant_names(of.by)), name
        assert all(0 <= value <= (of.most or np.inf) * 1.001 for value in values.values()), name


def test_what_no_measurement_reached_is_what_one_expects() -> None:
    own = calibration()
    for name, of in own.constants.items():
        if of.by == "software" and of.fitted:
            expected = of.expected if isinstance(of.expected, float) else of.expected["rest"]
            assert own[name][list(software_table()).index("shoal")] == expected, name


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("hbm", {"value": {"hoper": 0.7}}, "hbm: value: there is no generation 'hoper'; did you mean 'hopper'?"),
        ("hbm", {"value": {"hopper": nan}}, "hbm.value = nan: input should be a finite number"),
        ("hbm", {"value": {"hopper": -0.1}}, "hbm.value = -0.1: input should be greater than or equal to 0"),
        ("hbm", {"value": 0.5}, "hbm: value: it is a table, with some of volta, ampere"),
        ("product_fp8", {"by": "network"}, "product_fp8: value: there is no network 'blackwell'"),
        ("product_fp8", {"by": "network", "value": {}}, "[product_fp8] by = 'network', but in shoal's own it is"),
        ("hbm", {"most": inf}, "hbm.most = inf: input should be a finite number"),
        ("narrow_head", {"value": {"hopper": 15.0}}, "narrow_head: value: it is one number"),
        ("narrow_head", {"value": inf}, "narrow_head.value = inf: input should be a finite number"),
    ],
)
def test_constants_of_a_user_that_would_count_for_nothing_or_as_nonsense(name, changes, said, tmp_path) -> None:
    tables = tomllib.loads((FOLDER / "calibration.toml").read_text("utf-8"))
    tables[name] |= changes
    file = tmp_path / "constants.toml"
    file.write_text(tomli_w.dumps(tables))
    with pytest.raises(UsageError, match=re.escape(said)):
        read_calibration(file)


def test_a_file_of_constants_is_one_of_tables(tmp_path) -> None:
    (tmp_path / "flat.toml").write_text("hbm = 0.5\n")
    with pytest.raises(UsageError, match=r"hbm = 0\.5: input should be a table"):
        read_calibration(tmp_path / "flat.toml")


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
