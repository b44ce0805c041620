"""`shoal explain` of sharded products: what is printed and drawn is what the routes say; what cannot be is refused."""

import re
import xml.etree.ElementTree as ET
from itertools import product

import pytest

from shoal.cli.main import main
from shoal.engine.sharding.named_axes import NamedMesh, Sharding
from shoal.labs.explain.blocks import directions

SVG = "{http://www.w3.org/2000/svg}"
PRODUCT = "A[I, Jx] * B[Jx, K] -> C[I, K]"
CHAIN = "In[Bx, D] * Win[D, Fy] * Wout[Fy, D] -> Out[Bx, D]"


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def explained(capsys, *words):
    assert main(["explain", *words]) == 0
    return capsys.readouterr().out


def test_a_product(capsys):
    out = explained(capsys, PRODUCT, "--mesh", "x=4,y=2")
    assert "on 8 devices, x=4, y=2; I = 4096, J = 4096, K = 4096; bf16" in out
    assert re.search(r"A\[I, Jx\] +4096 x 4096 +4096 x 1024 +8.39 MB +2 +67.1 MB", out)
    assert "│ 0 1 │ 2 3 │ 4 5 │ 6 7 │" in out
    assert "case 3, J is sharded along x in both factors" in out
    assert "21 legal routes on fully connected, nvlink-4" in out
    assert "and 13 more (--routes 21)" in out
    assert re.search(r"reduce-scatter x into K +C\[I, Ky\]\{Ux\} +C\[I, Kyx\] +recursive-halving +12.6 MB +46 µs", out)
    assert "communication-bound" in out


def test_ties_between_routes_do_not_depend_on_hashes(capsys, monkeypatch):
    printed = set()
    for salt in range(4):
        monkeypatch.setattr(Sharding, "__hash__", lambda self, salt=salt: hash((salt, self.dims, self.unreduced)))
        printed.add(explained(capsys, "A[Ixy, J] * B[J, Kx] -> C[I, K]", "--mesh", "x=2,y=2", "--routes", "99"))
    assert len(printed) == 1


def test_a_large_mesh_is_one_of_rings(capsys):
    assert "routes on rings" in " ".join(explained(capsys, PRODUCT, "--mesh", "x=8,y=16").split())


def test_a_chain_has_a_backward_pass(capsys):
    out = explained(capsys, CHAIN, "--mesh", "x=4,y=2")
    backward = out[out.index("backward:") :]
    assert re.search(r"all-reduce x +dWout\[Fy, D\]\{Ux\} +dWout\[Fy, D\]", backward)
    assert re.search(r"all-reduce y +dIn\[Bx, D\]\{Uy\} +dIn\[Bx, D\]", backward)
    assert "backward:" not in explained(capsys, PRODUCT, "--mesh", "x=4")
    assert "backward:" in explained(capsys, PRODUCT, "--mesh", "x=4", "--backward")


def test_the_run_is_compared_with_the_plain_product(capsys):
    out = explained(capsys, "A[Ix, J] * B[J, Kx] -> C[Ix, K]", "--mesh", "x=2", "--run", "--backward")
    found = re.search(r"run on 2 ranks in float64, every dim 4; .*: C (\S+), dA (\S+), dB (\S+)", " ".join(out.split()))
    assert found and all(float(error) < 1e-12 for error in found.groups())


@pytest.mark.parametrize("text", ["A[Ix, J] -> A[I, Jx]", "A[I, J]{Ux} -> A[I, Jx]", "A[Ix] -> A[Ix]"])
def test_the_moves_of_one_array_are_run(capsys, text):
    out = explained(capsys, text, "--mesh", "x=2", "--run")
    found = re.search(r"run on 2 ranks in float64, every dim 4; largest difference from the plain array: A (\S+)",
                      " ".join(out.split()))  # fmt: skip
    assert found and float(found[1]) < 1e-12


def test_one_array_and_a_resharding(capsys):
    out = explained(capsys, "A[Ix, J]", "--mesh", "x=4,y=8,z=2", "--sizes", "I=256,J=2048")
    assert re.search(r"256 x 2048 +64 x 2048 +262 kB +16 +16.8 MB", out)
    assert "0 1 2 .. 15" in out
    out = explained(capsys, "A[Ix, J] -> A[I, Jx]", "--mesh", "x=4")
    assert re.search(r"all-to-all x from I to J +A\[Ix, J\] +A\[I, Jx\]", out)
    assert "none: it has this sharding already" in explained(capsys, "A[Ix] -> A[Ix]", "--mesh", "x=4")


NETWORKS = ["full", "ring", "torus", "fat-tree", "islands", "rings"]


@pytest.mark.parametrize("text, topology", [*product([PRODUCT, "A[Ix, J] -> A[I, Jx]"], NETWORKS)])
def test_every_network(capsys, text, topology):
    assert "µs" in explained(capsys, text, "--mesh", "x=2,y=2", "--topology", topology)


@pytest.mark.parametrize("text", [PRODUCT, CHAIN, "A[Ix, J] -> A[I, Jx]", "A[I, J]{Ux}"])
def test_everything_is_drawn(capsys, tmp_path, text):
    drawn = tmp_path / "x.svg"
    out = explained(capsys, text, "--mesh", "x=2,y=2", "--out", str(drawn))
    root = ET.parse(drawn).getroot()
    words = [element.text for element in root.iter(f"{SVG}text")]
    states = len([word for word in words if word == "given" or word.startswith("→")])
    assert states and [words.count(str(rank)) for rank in range(4)] == [states] * 4  # each device once in each state
    hatched = len(re.findall(r"fill: url\(#", drawn.read_text()))
    unreduced = [word for word in words if re.fullmatch(r"\w+\[[^]]*\]\{U\w+\}", word)]
    assert hatched == 4 * len(unreduced)  # an unreduced block is a term of a sum
    assert f"drawn: {drawn}" in out


def test_the_longer_of_the_last_two_axes_goes_to_the_right():
    assert directions(NamedMesh("x", (4,))) == ("x", "", "")
    assert directions(NamedMesh("xy", (2, 4))) == ("y", "x", "")
    assert directions(NamedMesh("zxy", (2, 4, 2))) == ("x", "y", "z")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([PRODUCT], "--mesh: missing"),
        ([PRODUCT, "--mesh", "x=4,y"], "a mesh axis is one lower-case letter"),
        ([PRODUCT, "--mesh", "y=4"], "the mesh has no axis 'x'"),
        ([PRODUCT, "--mesh", "x=3"], "does not divide evenly over 3 devices along x; nearest: --sizes J=4095"),
        ([PRODUCT, "--mesh", "x=4", "--sizes", "L=3"], "has no dim L"),
        ([PRODUCT, "--mesh", "x=4", "--dtype", "bf61"], "--dtype bf61: did you mean 'bf16'?"),
        ([PRODUCT, "--mesh", "x=4", "--dtype", "fp8", "--accelerator", "tpu-v5p"], "no speed of tpu-v5p for it"),
        ([PRODUCT, "--mesh", "x=4", "--topology", "tours"], "did you mean 'torus'"),
        ([PRODUCT, "--mesh", "x=32", "--run"], "at most 16 are started"),
        ([PRODUCT, "--mesh", "x=128", "--topology", "full"], "--topology rings"),
        ([PRODUCT, "--mesh", "x=4", "--out", "x.png"], "ending in .svg"),
        ([PRODUCT, "--mesh", "x=4", "--nics", "2"], "only for --topology islands, not full"),
        ([PRODUCT, "--mesh", "x=4", "--topology", "rings", "--per-node", "2"], "for --topology fat-tree or islands"),
        (["A[Ix] -> A[I]", "--mesh", "x=4", "--backward"], "--backward: only for a product, not for one array"),
        (["A[Ix] -> A[I]", "--mesh", "x=4", "--routes", "3"], "--routes 3: only for a product, not for one array"),
        (["A[Ix]", "--mesh", "x=4", "--run"], "--run: a single array is not moved; give its target"),
        (["A[Ix]", "--mesh", "x=4", "--link", "nvlink-3"], "--link nvlink-3: a single array is not moved"),
        (["A[I] -> B[J]", "--mesh", "x=4"], "only a product changes dims"),
        (["A[I, J] -> B[J, I]", "--mesh", "x=4"], "transposes are not supported"),
        (["A[I] -> A[I]{Ux}", "--mesh", "x=4"], "no collective leaves an array unreduced"),
    ],
)
def test_what_cannot_be_explained(capsys, words, message):
    assert main(["explain", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out or "--run" not in words


def test_the_link_is_the_accelerators(capsys):
    assert "ici-v5p with" in explained(capsys, PRODUCT, "--mesh", "x=4", "--accelerator", "tpu-v5p")
    assert "pcie-4 with" in explained(capsys, PRODUCT, "--mesh", "x=4", "--accelerator", "tpu-v5p", "--link", "pcie-4")
    assert main(["explain", PRODUCT, "--mesh", "x=4", "--accelerator", "macbook-m3", "--dtype", "fp16"]) == 2
    assert "the catalog has no node with it.\n  Name a link" in capsys.readouterr().err
