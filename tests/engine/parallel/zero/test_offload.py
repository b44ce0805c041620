"""Offload: the copies between host memory and the device wait for each other, however late they are made."""

import pytest
import torch

from shoal.engine.parallel.zero import bucket
from shoal.launch.worker_pool import Pool
from shoal.spec.config import RunConfig
from tests.engine.late_stream import LateStream
from tests.engine.parallel.counting import engine_of
from tests.testing.verify.runs import small_run


def train(config: RunConfig, late: bool) -> list[torch.Tensor]:
    """Return the weights after some steps, and the losses and norms."""
    streams = []

    def make_stream(device: torch.device) -> LateStream:
        streams.append(LateStream())
        return streams[-1]

    with pytest.MonkeyPatch.context() as patch:
        if late:
            patch.setattr(bucket, "SideStream", make_stream)
        engine = engine_of(config)
        steps = [engine.step(i) for i in range(3)]
    assert not late or all(stream.done for stream in streams), "both directions have copies"
    numbers = torch.tensor([(step.loss, step.gradient_norm) for step in steps], dtype=torch.float64)
    shadows = [each.shadow is not None for each in engine.parameters.buckets]
    assert all(shadows) == (late and config.train.precision == "bf16")
    return [numbers, *(piece.tensor.clone() for pieces in engine.weights().values() for piece in pieces)]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        ({"offload": "optimizer"}, 1),
        ({"dp": 2, "zero": 1, "offload": "optimizer"}, 2),
        ({"dp": 2, "zero": 3, "offload": "optimizer"}, 2),
        ({"dp": 2, "zero": 3, "offload": "parameters"}, 2),
        ({"pp": 2, "schedule": "pipedream", "dp": 1, "offload": "optimizer"}, 2),
    ],
    ids=str,
)
def test_late_copies_change_nothing(pool: Pool, parallel: dict, ranks: int, precision: str) -> None:
    config = small_run(parallel, precision=precision)
    if "pp" in parallel:  # each stage updates on its own
        config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"clip_norm": 0.0})})
    for early, late in zip(pool.run(train, ranks, config, False), pool.run(train, ranks, config, True), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(early, late, strict=True))
