"""Accelerators, rooflines and budgets: what courses work out by hand, printed by the commands."""

import re
import xml.etree.ElementTree as ET

import pytest

from shoal.cli.main import main
from shoal.labs.explain.device import roofline
from shoal.labs.explain.device.accelerators import find_node
from shoal.labs.explain.device.roofline import Placed
from shoal.planning.cost.roofline import least_rows, matrix_product
from shoal.spec.catalog import accelerator
from shoal.spec.catalog.accelerators import accelerators
from tests.labs.explain.explained import explained


def test_every_accelerator_has_a_row(capsys):
    out = explained(capsys, "accelerators")
    for name in accelerators():
        assert re.search(rf"^{re.escape(name)} ", out, re.M)
    assert re.search(r"h100-sxm +989 +1,979 +80 +3\.35 +295 +450 +700", out)


def test_three_chips_side_by_side(capsys):
    out = explained(capsys, "accelerators --names h100-sxm tpu-v5p tpu-v6e")
    assert re.search(r"fp64 TFLOP/s +66\.9 *\n +without matrix units +33\.5", out)
    assert re.search(r"int8 TFLOP/s +1,979 *\n +with 2:4 sparsity +3,958", out)
    assert re.search(r"ridge FLOPs per byte, dense +295 +166 +574", out)
    assert re.search(r"ridge, with 2:4 sparsity +591", out)
    assert re.search(r"matrix units +528 x 512 at 1\.83 GHz +8 x 16,384 at 1\.75 GHz", out)
    assert re.search(r"connected by +nvlink-4, switched +6 x ici-v5p +4 x ici-v6e", out)


def test_matrix_units_give_the_peak_that_is_printed():
    known = [machine for machine in accelerators().values() if machine.matrix_units]
    assert len(known) >= 8
    for machine in known:
        assert machine.matrix_units.flops == pytest.approx(machine.dense_flops(machine.half), rel=0.005), machine.name
    assert accelerator("tpu-v5p").matrix_units.multiply_adds == 8 * 128 * 128 / 8, "8 rows in 8 cycles"


def test_an_accelerator_knows_its_node():
    assert find_node(accelerator("tpu-v5p")).most == 8960
    assert find_node(accelerator("t4")).nic == "ethernet-100g"
    assert find_node(accelerator("macbook-m3")) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("accelerators --names h100", "'h100' is not in the catalog; did you mean 'h100-pcie' or 'h100-sxm'"),
        ("accelerators --names t4 t4 t4 t4 t4", "at most 4 fit side by side"),
        ("roofline --product 3,4", "--product 3,4: give m,k,n"),
        ("roofline --product a", "--product a: give numbers of at least 1"),
        ("roofline --cluster h100-sxm --tp 2", "tp 2 = 2 ranks, but 1 were given"),
        ("budget --flops 1e20 --tokens 5", "--tokens"),
        ("budget --devices 8 --days 3", "--devices and --days: one determines the other"),
        ("budget --accelerator macbook-m3 --batch 4e6", "no network of macbook-m3"),
        ("budget --accelerator tpu-v5e --batch 4e6", "--axes 3: a torus of tpu-v5e has 2"),
        ("budget --format fp8 --accelerator tpu-v5p", "has no fp8 peak; allowed: bf16"),
    ],
)
def test_what_cannot_be_is_refused(words, message, capsys):
    assert main(["explain", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_operations_of_a_model(capsys, tmp_path):
    out = explained(capsys, f"roofline --out {tmp_path / 'roofline.svg'}")
    assert re.search(r"^up +962 GFLOP +419 MB +2,290 +arithmetic +989 TFLOP/s +100.0 % +972 µs", out, re.M)
    assert re.search(r"^residual .* 0\.167 +memory +558 GFLOP/s +0\.1 %", out, re.M)
    assert "ridge, dense" in out and re.search(r"least b that arithmetic bounds +326 in \[b, 4,096\]", out)
    texts = [e.text for e in ET.parse(tmp_path / "roofline.svg").iter() if e.text]
    assert "Roofline of h100-sxm, bf16" in texts and {"FLOPs per byte", "ridge: 295", "up: 2,290"} <= set(texts)


def test_a_few_tokens_are_bound_by_memory(capsys):
    out = explained(capsys, "roofline --sequence-length 64")
    assert re.search(r"^up .* memory +", out, re.M)
    half = explained(capsys, "roofline --sequence-length 64 --precision fp8")
    assert re.search(r"ridge, dense +591 FLOPs per byte", half)


def test_a_dot_product(capsys):
    out = explained(capsys, "roofline --product 1,1000000,1")
    assert re.search(r"2 MFLOP +4 MB +0\.5 memory +1\.67 TFLOP/s", out) and "is too narrow" in out


@pytest.mark.parametrize(
    ("k", "n", "ridge", "itemsize"), [(4096, 14336, 295, 2), (16384, 16384, 574, 2), (900, 5000, 40, 4)]
)
def test_least_rows_have_the_intensity_of_the_ridge(k, n, ridge, itemsize):
    rows = least_rows(k, n, ridge, itemsize)
    assert matrix_product(rows, k, n, itemsize).intensity == pytest.approx(ridge)
    assert matrix_product(0.99 * rows, k, n, itemsize).intensity < ridge


def test_measured_points_are_rates_of_this_machine(capsys, monkeypatch):
    monkeypatch.setattr(roofline, "MEASURED", ((1, 1 << 16, 1), (256, 256, 256)))
    monkeypatch.setattr(roofline, "REPEATED", 0.02)
    peak, bandwidth, points = roofline.measure_products()
    dot, square = points.values()
    assert square.rate == peak > 4 * dot.rate and bandwidth > 1e8
    assert dot.cost.intensity == pytest.approx(0.25, rel=1e-3)


def test_measured_products_fit_a_terminal_of_80_columns(monkeypatch, capsys):
    points = {f"{m},{k},{n}": Placed(matrix_product(m, k, n, 4), 55.6e9) for m, k, n in roofline.MEASURED}
    monkeypatch.setattr(roofline, "measure_products", lambda: (80.3e9, 20.3e9, points))
    monkeypatch.setenv("COLUMNS", "80")
    out = explained(capsys, "roofline --measure")
    assert all(re.search(rf"^{name} .* GFLOP/s 55.6 GFLOP/s .* [mµ]s$", out, re.M) for name in points)


def test_gpt_4_on_one_b200(capsys):
    out = explained(capsys, "budget --flops 2e25 --accelerator b200-sxm --utilisation 1")
    assert re.search(r"time +282 years", out)


def test_deepseek_and_llama_on_v5p(capsys):
    out = explained(capsys, "budget --accelerator tpu-v5p --batch 40e6")
    assert re.search(r"tokens of a device to be busy +850: ", out)
    assert re.search(r"most devices that are +47,058 with 4e\+07 tokens a step, 5\.25 pods of 8,960", out)
    out = explained(
        capsys, "budget --parameters 70e9 --tokens 15e12 --accelerator tpu-v5p --batch 16e6 --utilisation 0.5"
    )
    assert re.search(r"FLOPs, 6 N T +6\.3e\+24", out) and "18,823 x tpu-v5p" in out
    assert re.search(r"time +16\.9 days", out)
    assert "2,550: peak" in explained(capsys, "budget --accelerator tpu-v5p --batch 16e6 --axes 1")


def test_power_and_bytes(capsys):
    out = explained(capsys, "budget --parameters 405e9 --tokens 12e12 --devices 16000")
    assert re.search(r"power of the boards alone +11\.2 MW", out)
    assert re.search(r"tokens on disk +60 TB of text; as numbers 24 TB in 16 bits, 48 TB in 32 bits", out)
    assert re.search(r"power of all +22\.4 MW: 1,275 W each with its share of a node", out)


def test_devices_of_a_number_of_days(capsys):
    out = explained(capsys, "budget --flops 1e24 --days 30 --utilisation 0.5")
    devices = int(re.search(r"devices +([\d,]+) x", out)[1].replace(",", ""))
    needed = 1e24 / (0.5 * 989.4e12 * 30 * 86400)
    assert needed <= devices < needed + 1


def test_experts_count_where_a_token_goes(capsys):
    out = explained(capsys, "budget --model mixtral-8x7b")
    assert re.search(r"parameters N, tokens T +1\.288e\+10, 2\.576e\+11", out)
