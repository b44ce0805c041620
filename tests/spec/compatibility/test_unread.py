"""Settings of a run that do not go together, or that nothing would read."""

import pytest

from shoal.base.errors import UsageError
from shoal.pipeline.from_layout import check_run
from shoal.spec.catalog import model_shape
from shoal.spec.config import build_config


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
