"""Publications made up: rows of the columns that `shoal validate` reads, with times and memory from known constants."""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shoal.labs.validate.fit import estimate_points
from shoal.labs.validate.rows import Point, read_row, stack
from shoal.spec.catalog.calibration import Calibration

MODELS = {"small": (16, 3072, 24), "middle": (24, 4096, 32), "large": (40, 5120, 40)}
LAYOUTS = [(8, 1, 1), (4, 2, 1), (2, 4, 1), (2, 2, 2), (1, 8, 1), (1, 4, 2), (16, 1, 1), (8, 2, 1), (4, 2, 2)]
COLUMNS = (
    "row_id", "kind", "status", "quality", "framework", "year", "gpu", "gpu_mem_gb", "n_gpus", "gpus_per_node", "model",
    "layers", "hidden", "heads", "ffn", "mlp_type", "vocab", "seq", "global_batch", "micro_batch", "dp", "tp", "pp",
    "vpp", "zero_stage", "dp_mode", "sp", "recompute", "precision", "attn_kernel", "step_time_s", "mem_gb", "mem_kind",
    "note",
)  # fmt: skip


def row(
    model: str = "small", layout: tuple[int, int, int] = (8, 1, 1), each: int = 1, **columns: object
) -> dict[str, str]:
    """A row: a model of `MODELS` on dp, tp and pp, with sequences of a micro-batch; without a measurement."""
    (layers, hidden, heads), (dp, tp, pp) = MODELS[model], layout
    found = dict.fromkeys(COLUMNS, "") | {
        "row_id": f"{model}-{dp}-{tp}-{pp}-{each}", "kind": "measured", "status": "ok", "quality": "A", "year": 2024,
        "framework": "Megatron-Core", "gpu": "H100-SXM-80GB", "gpu_mem_gb": 80, "n_gpus": dp * tp * pp,
        "gpus_per_node": 8, "model": model, "layers": layers, "hidden": hidden, "heads": heads, "ffn": 4 * hidden,
        "mlp_type": "swiglu", "vocab": 32000, "seq": 2048, "global_batch": 64, "micro_batch": each, "dp": dp, "tp": tp,
        "pp": pp, "vpp": 1, "zero_stage": 1, "sp": "y" if tp > 1 else "n", "recompute": "none", "precision": "bf16",
    } | columns  # fmt: skip
    return {name: str(value) for name, value in found.items()}


def measured(rows: Sequence[dict[str, str]], constants: Calibration, noise: float = 0.0) -> list[dict[str, str]]:
    """The rows with the times and the memory that these constants give, off by a random part."""
    points = [read_row(dict(r, step_time_s="1"), "made") for r in rows]
    seconds, size, part = estimate_points(stack(points), points, constants)
    off = np.exp(noise * np.random.default_rng(0).standard_normal((2, len(rows))))
    return [
        dict(r, kind="measured_oom", status="oom")
        if p > 1
        else dict(r, step_time_s=str(t * a), mem_gb=str(m * b / 1e9), mem_kind="max reserved GB")
        for r, t, m, p, a, b in zip(rows, seconds, size / 1.073741824, part, *off, strict=True)
    ]


def points_of(rows: Sequence[dict[str, str]]) -> list[Point]:
    return [read_row(r, "made") for r in rows]


def sweep() -> list[dict[str, str]]:
    return [row(model, layout, each) for model in MODELS for layout in LAYOUTS for each in (1, 2, 4)]


def write(folder: Path, rows: Sequence[dict[str, str]], name: str = "made") -> None:
    columns = list(dict.fromkeys(column for r in rows for column in r))
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
