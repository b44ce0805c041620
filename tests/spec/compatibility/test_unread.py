"""Settings of a run that do not go together, or that nothing would read."""

from typing import Any, get_args

import pytest

from shoal.base.errors import UsageError
from shoal.base.section import docstrings
from shoal.pipeline.from_layout import check_run
from shoal.spec import sync_methods
from shoal.spec.catalog import model_shape
from shoal.spec.compatibility.unread import check_unread
from shoal.spec.config import RunConfig, build_config
from shoal.spec.config.sections import RelaxedConfig
from shoal.spec.layout import Sync
from shoal.spec.number_formats import FORMATS


@pytest.mark.parametrize(("settings", "said"), [
    ({"momentum": 0.9}, "optimizer.momentum = 0.9 with optimizer.name = 'adamw', which does not read it."
                        "\n  Leave it out, or use optimizer.name momentum or muon."),
    ({"name": "muon", "nesterov": True}, "use optimizer.name momentum."),
    ({"name": "sgd", "betas": [0.8, 0.9]}, "optimizer.betas = "),
    ({"name": "adafactor", "eps": 1e-6}, "optimizer.eps = 1e-06"),
    ({"hessian_every": 5}, "optimizer.hessian_every = 5"),
    ({"decay_fraction": 0.5}, "optimizer.schedule = 'cosine', which does not read it.\n  Leave it out, or use "
                              "optimizer.schedule wsd."),
    ({"schedule": "constant", "min_lr_fraction": 0.0}, "optimizer.min_lr_fraction = 0.0"),
])  # fmt: skip
def test_settings_that_nothing_reads_are_refused(settings: dict, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_run(build_config({"optimizer": settings}), model_shape("tiny"))
    assert said in str(refused.value)


def refuses(**sections: dict[str, Any]) -> bool:
    try:
        check_unread(RunConfig().replace(**sections))
    except UsageError:
        return True
    return False


def other(value: Any) -> Any:
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value / 2


@pytest.mark.parametrize("sync", get_args(Sync))
def test_a_relaxed_setting_is_read_by_the_methods_that_its_description_names(sync: str) -> None:
    for name, field in RelaxedConfig.model_fields.items():
        readers = docstrings(RelaxedConfig)[name].partition(":")[0].split(", ")
        for outer in ("outer_int8",) if sync in sync_methods.LOCAL else ():
            assert refuses(parallel={"sync": sync}, relaxed={outer: True, name: other(field.default)}) == (
                sync not in readers and outer not in readers)
        assert refuses(parallel={"sync": sync}, relaxed={name: other(field.default)}) == (sync not in readers), name
        assert not refuses(parallel={"sync": sync}, relaxed={name: field.default})


@pytest.mark.parametrize("scales", ["tensor", "row", "block"])
@pytest.mark.parametrize("amax", ["current", "delayed"])
def test_settings_of_8_bits_are_read_by_the_kind_of_scales_that_has_them(scales: str, amax: str) -> None:
    for changed in ({}, {"block": 64}, {"history": 8}, {"margin": 1}):
        read = {"block": scales == "block", "history": amax == "delayed", "margin": amax == "delayed"}
        fits = (amax == "current" or scales == "tensor") and all(read[name] for name in changed)
        assert refuses(train={"precision": "fp8"}, float8={"scales": scales, "amax": amax, **changed}) != fits


@pytest.mark.parametrize("precision", FORMATS)
def test_settings_of_a_precision_are_read_by_it(precision: str) -> None:
    given = {"train": {"precision": precision}}
    products = FORMATS[precision].products
    read = {"float8": ("scales", "gradient", "keep"), "mxfp8": ("gradient", "keep"), "nvfp4": ("keep",)}
    for name, value in {"scales": "row", "gradient": "e4m3", "keep": ("layers.0.*",)}.items():
        assert refuses(float8={name: value}, **given) == (name not in read.get(products, ())), name
    assert refuses(loss_scale={"initial": 4.0}, **given) != FORMATS[precision].scaled
    assert not refuses(**given)


def test_what_nothing_but_one_other_setting_reads_is_refused_without_it() -> None:
    assert refuses(data={"overlap": 0.5}) and not refuses(data={"overlap": 0.5, "sampler": "overlap"})
    moments = {"name": "adamw", "from_weights": True}
    assert refuses(optimizer=moments) and not refuses(optimizer=moments, model={"weights": "somewhere"})
