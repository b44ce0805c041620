"""Small runs to verify, and the hypothesis strategy that draws them."""

from typing import Any

from hypothesis import strategies as st

from shoal.spec.config import RunConfig, build_config
from shoal.testing.verify.draw import draw_run

MODEL = {"name": "tiny", "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 12, "vocab": 259}


def small_run(parallel: dict[str, Any], model: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    """Two micro-batches of two sequences of 8 tokens on each replica, of two layers, or of three over stages, which do
    not divide them; unless told otherwise."""
    parallel = {"micro_batch": 2, **parallel}
    train = {"global_batch": 2 * parallel["micro_batch"] * parallel.get("dp", 1), **train}
    data = {"source": "synthetic", "sequence_length": 8}
    layers = {"layers": 3 if parallel.get("pp", 1) > 1 else 2}
    return build_config({"model": MODEL | layers | (model or {}), "parallel": parallel, "data": data, "train": train})


@st.composite
def runs(draw: st.DrawFn, max_ranks: int = 8) -> RunConfig:
    """Any valid run; shrinks to one device, llama, one layer."""
    return draw_run(lambda options: draw(st.sampled_from(list(options))), max_ranks)
