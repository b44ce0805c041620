"""A catalog file from the results of `shoal bench gpu`."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.labs.calibration.from_gpu import write_gpu_catalog
from shoal.spec.catalog.accelerators import accelerator
from shoal.spec.catalog.calibration import cluster_calibration
from shoal.spec.catalog.clusters import cluster

PEAK = accelerator("h200-sxm").dense_flops("bf16") / 1e12


def write_part(folder: Path, part: int, rows: list[dict[str, Any]], **header: Any) -> None:
    values = {"part": part, "date": "2026-01-01 00:00:00", "device": "NVIDIA H200", "versions": {"torch": "2.11"},
              "rehearsal": False, **header}  # fmt: skip
    text = "\n".join(json.dumps(value) for value in [values, *({"result": "", **row} for row in rows)])
    (folder / f"part-{part}.jsonl").write_text(text)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Results of a device whose large products attain 75 % of the peak, and cuDNN's attention 60 %."""
    numbers = cluster_calibration(cluster("h200-sxm"), "shoal").numbers
    short = {name: numbers[name] for name in ("short_m", "short_k")}
    rows: list[dict[str, Any]] = []
    for name, k, n in (("q, k, v", 4096, 6144), ("down", 14336, 4096)):
        rate = 0.75 * PEAK / (1 + short["short_m"] / 8192 + short["short_k"] * (1 / k + 1 / n))
        rates = {f"{way} TFLOP/s": rate for way in ("forward", "input gradient", "weight gradient")}
        rows.append({"table": "products", "item": "bf16", "product": name, "m": 8192, "k": k, "n": n, **rates})
    rows.append({**rows[0], "product": "square", "forward TFLOP/s": 0.8 * PEAK})
    rows.append({"table": "memory", "item": "copies", "transfer": "copy in device memory", "GB/s": 4320.0})
    flash = 0.6 * PEAK / ((1 + numbers["narrow_head"] / 128) * (1 + numbers["short_sequence"] / 4096))
    rows.append({"table": "attention", "item": "flash", "sequence": 4096, "heads": "32/8 x 128",
                 "forward TFLOP/s": flash / 2, "backward TFLOP/s": flash / 2})  # fmt: skip
    times = {"forward TFLOP/s": flash / 0.75, "backward TFLOP/s": 2.5 * flash / 2.75}  # 0.75 and 2.75 of a forward's
    rows.append({**rows[-1], "item": "cudnn", **times})
    rows.append({"table": "attention", "item": "cudnn", "result": "unsupported: RuntimeError"})
    write_part(tmp_path, 1, rows)
    more = {"layers": 12, "microbatches": 4}
    step = 1e3 * 12 * 4 * 4e-4 * (1 + numbers["launch_backward"])
    write_part(tmp_path, 4, [
        {"table": "small", "item": "gpt3-125m, eager", "host-bound %": 60.0, "step ms": step, "more": more},
        {"table": "small", "item": "16 layers, eager", "host-bound %": 3.0, "step ms": 9 * step,
         "kernels ms": 9 * step - 20, "allocated GB": 40.0, "more": {**more, "reserved GB": 40.25}},
        {"table": "small", "item": "lost, eager", "result": "lost: hung"},
    ])  # fmt: skip
    return tmp_path


def test_constants_are_recovered(results: Path, capsys: pytest.CaptureFixture) -> None:
    out = results / "gpu.toml"
    assert main(["calibrate", "--from-gpu", str(results), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for text in ("matmul_efficiency 0.8,", "product 0.75,", "hbm 0.9,", "flash_2 0.3,", "flash_3 0.6,", "launch 0.0004",
                 "base 0.25", "fixed 0.02"):  # fmt: skip
        assert text in printed
    run = ["--cluster", "1xhere", "--model", "llama-3.2-1b", "--global-batch", "1"]
    assert main(["estimate", "--catalog", str(out), *run]) == 0
    assert "here" in capsys.readouterr().out
    assert main(["calibrate", "--from-gpu", str(results), "--out", str(out)]) == 2  # it exists


def test_bad_results(results: Path, capsys: pytest.CaptureFixture) -> None:
    damaged = results / "damaged"
    damaged.mkdir()
    (damaged / "part-1.jsonl").write_text('{"kind": broken')
    for folder in (results / "none", damaged):
        with pytest.raises(UsageError, match="no readable run in part-1"):
            write_gpu_catalog(folder, results / "gpu.toml")
    good = (results / "part-1.jsonl").read_text()
    (results / "part-1.jsonl").write_text(good.replace('"m": 8192', '"m": 0', 1))
    with pytest.raises(UsageError, match="damaged: ZeroDivisionError"):
        write_gpu_catalog(results, results / "gpu.toml")
    (results / "part-1.jsonl").write_text(good + '\n{"table": "products"}\n')
    write_gpu_catalog(results, results / "other.toml")
    assert "left out line" in capsys.readouterr().err
    write_part(results, 1, [], device="Voodoo 2")
    with pytest.raises(UsageError, match="no node with the GPU 'Voodoo 2'"):
        write_gpu_catalog(results, results / "gpu.toml")
    write_part(results, 1, [], rehearsal=True)
    with pytest.raises(UsageError, match="rehearsal"):
        write_gpu_catalog(results, results / "gpu.toml")
