"""Every update rule on a layout that shards its states and splits its matrices, against the same rule on one device."""

from typing import Any

import pytest

from shoal.engine.optim.build import RULES
from shoal.engine.optim.from_torch import TORCH
from shoal.launch.worker_pool import Pool
from shoal.spec.optimizers import SOPHIA_PRECISIONS
from shoal.testing.verify.case import prepare, run_case
from tests.testing.verify.runs import small_run

SPLIT = {"tp": 2, "zero": 1, "micro_batch": 1}
EXPERTS = {"ep": 4, "etp": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "adafactor": {"dp": 2, "zero": 3, **EXPERTS},
    "adam8bit": {"cp": 2, "ulysses": 2, "zero": 3, "sequence_parallel": True, "offload": "optimizer"},
    "muon": {"cp": 2, "zero": 2, "sequence_parallel": True, "offload": "optimizer", **EXPERTS},
    "radam": {"dp": 2, "sequence_parallel": True, "offload": "optimizer"},
    "sage": {"dp": 2, "overlap": False},
    "sophia-g": {"cp": 2, "cp_order": "striped", "zero": 3, "sequence_parallel": True, "bucket_mb": 0.004},
    "sophia-h": {"dp": 2, "zero": 2, "bucket_mb": 0.004, "recompute": "selective"},
}


@pytest.mark.parametrize("name", sorted(set(RULES) - set(TORCH)))  # other tests of layouts use torch's rules
def test_a_layout_updates_as_one_device_does(pool: Pool, name: str) -> None:
    """``shoal verify --rule NAME --random N`` draws any layout."""
    parallel = {**SPLIT, **LAYOUTS[name]}
    # Matrices are large enough for states in blocks, and their sizes are odd where tp does not split them.
    model = {"hidden": 22, "head_dim": 6, "ffn": 262, "experts": {"count": 4, "ffn": 5} if "ep" in parallel else {}}
    settings: dict[str, Any] = {
        "name": name, "learning_rate": 1e-2, "lr_factors": {"embed.*": 0.5, "*norm*": 2.0, "layers.1.*": 0.25},
    }
    if name in SOPHIA_PRECISIONS:  # with a small scale, nearly all elements would be clipped
        settings |= {"hessian_every": 2, "hessian_scale": 100.0}
    run = small_run(parallel, model, steps=3)
    run = run.model_copy(update={"optimizer": run.optimizer.model_copy(update=settings)})
    verdict, _ = run_case(prepare(run, own_precision=False), pool, steps=2)
    assert not verdict.findings, f"{run.parallel.describe()}: {verdict.findings[0].text}"
