"""Clusters by name, and a user's own catalog."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.spec.catalog import accelerator, accelerators, model_shape, tables
from shoal.spec.catalog.clusters import cluster, nodes


@pytest.mark.parametrize(
    ("name", "accelerators", "nodes", "nic"),
    [
        ("8xH100", 8, 1, None),
        ("64x8xH100", 512, 64, "infiniband-ndr"),
        ("64x8xH100-IB200", 512, 64, "infiniband-hdr"),
        ("1024xA100", 1024, 128, "infiniband-hdr"),
        ("100xH100-IB200", 100, 13, "infiniband-hdr"),
        ("2x4xh200-eth100", 8, 2, "ethernet-100g"),
        ("4x72xGB200", 288, 4, "infiniband-ndr"),
        ("gb200-nvl72", 72, 1, None),
        ("8xGB300-NVL72-IB400", 576, 8, "infiniband-ndr"),
        ("2x64xGB200NVL72", 128, 2, "infiniband-ndr"),
        ("18x4xGB200", 72, 1, None),
        ("32x4xGB200", 128, 2, "infiniband-ndr"),
        ("h100-sxm", 1, 1, None),
        ("macbook-m3", 1, 1, None),
        ("4x8xH100-EFA400", 32, 4, "efa-400g"),
        ("2xA100-PCIe-40GB-IB100", 2, 1, None),
        ("9408x4xMI250X", 37632, 9408, "slingshot-11"),
        ("4x16xTrn2", 64, 4, "efa-400g"),
        ("v5p-256", 128, 1, None),
        ("5xv5p-8960", 22400, 5, "dcn"),
    ],
)
def test_a_name_says_what_there_is(name, accelerators, nodes, nic):
    found = cluster(name)
    assert (found.size, found.nodes, found.nic and found.nic.name) == (accelerators, nodes, nic)


def test_parts_of_a_cluster_have_full_nodes_and_names_of_their_own():
    uneven = cluster("100xH100-IB200")
    assert "13 nodes (the last has 4)" in uneven.describe()
    racks = cluster("8xGB200-NVL72")
    for part in (uneven.part(12), uneven.part(1), uneven.part(3, 4), racks.part(3), racks.part(1), racks.part(2, 64)):
        assert part.size == part.nodes * part.per_node
        again = cluster(part.name)
        assert (again.nodes, again.per_node, again.nic, again.nics) == (part.nodes, part.per_node, part.nic, part.nics)


def test_slices_of_pods_are_named_as_their_maker_does():
    """Of v4 and v5p the number counts TensorCores, two a chip; of v5e and v6e chips."""
    assert cluster("v5p-4096").torus == (8, 16, 16)
    assert cluster("v5p-17920").torus == (16, 20, 28), "the whole pod"
    assert cluster("v6e-256").torus == cluster("tpu-v5e-256").torus == (16, 16)


@given(st.integers(1, 8960))
def test_a_torus_has_all_its_chips(chips):
    assert prod(cluster(f"v5p-{2 * chips}").torus) == chips


@pytest.mark.parametrize("name", nodes())
def test_every_node_type_makes_a_cluster(name):
    node = nodes()[name]
    found = cluster(f"{name}-64" if node.dimensions else f"2x2x{name}")
    assert found.size == (64 // node.cores_per_chip if node.dimensions else 4)
    assert found.describe()
    size = f"-{found.memory_bytes / 1e9:.0f}GB"
    if not node.dimensions and not name.endswith(size):
        assert cluster(f"2x2x{name}{size}-IB200").accelerator == found.accelerator


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("8xH101", "did you mean 'H100'"),
        ("64x8xH100-IB401", "did you mean 'IB400'"),
        ("8xH100-40GB", "there is no node type 'H100-40GB'"),
        ("8xGB200-NVL36", "a rack of GB200 has 72"),
        ("2x9xH100", "a node has at most 8 H100"),
        ("0x8xH100", "at least one node"),
        ("v5p-1000000", "The largest is v5p-17920"),
        ("v5p-3", "counts 2 for each"),
        ("0xv5p-128", "at least one slice"),
        ("8xv5p", "slices of a pod"),
        ("", "Write 8xH100"),
    ],
)
def test_what_is_no_cluster_is_refused(name, says):
    with pytest.raises(UsageError, match=says):
        cluster(name)


@pytest.fixture
def own(tmp_path):
    yield tmp_path / "own.toml"
    tables.forget()


def test_users_add_their_own(own):
    own.write_text(
        '[accelerators.abacus]\npeak_flops = {bf16 = 1e12}\nmemory_bytes = 1e9\nmemory_bandwidth = 1e9\n'
        '[links.string]\nbandwidth = 1e9\nlatency = 1e-3\n'
        '[nodes.shelf]\naccelerator = "abacus"\nper_node = 4\ninside = "string"\nnic = "string"\nnics = 1\n'
        '[models.mine]\nfamily = "llama"\nlayers = 2\nhidden = 64\nheads = 4\nffn = 128\nvocab = 99\n'
        'max_sequence = 128\ntied = true\nsource = "mine"\n'
    )
    tables.add_catalog(own)
    assert cluster("3x4xshelf").accelerator.peak_flops == {"bf16": 1e12}
    assert cluster("3x4xshelf").accelerator.source == str(own), "a source of one's own numbers need not be given"
    assert model_shape("mine").vocab == 99
    assert "h100-sxm" in accelerators()
    tables.forget()
    assert "abacus" not in accelerators()


def test_an_entry_is_the_same_as_another_but_for_its_own_values(own):
    """A user's entry may start from one of shoal's; shoal's own start from shoal's."""
    own.write_text(
        '[models.short]\nsame_as = "llama-3.1-8b"\nlayers = 2\n\n'
        '[models.llama-3-8b]\nsame_as = "tiny"\n\n[nodes.quiet]\nsame_as = "H200"\nwatts = 5000\n'
        '[nodes.H100]\nsame_as = "H100"\nper_node = 4\n'
    )
    before, after = model_shape("llama-3.1-70b"), model_shape("llama-3.1-8b")
    tables.add_catalog(own)
    assert model_shape("short") == after.model_copy(update={"layers": 2})
    assert model_shape("llama-3-8b") == model_shape("tiny")
    assert model_shape("llama-3.1-70b") == before
    quiet, usual = cluster("2x8xquiet"), cluster("2x8xH200")
    assert (quiet.accelerator, quiet.nic, quiet.watts) == (usual.accelerator, usual.nic, 625.0)
    assert (cluster("4xH100").per_node, cluster("4xH100").accelerator.name) == (4, "h100-sxm"), "shoal's, changed"


def test_a_pod_without_its_size_is_refused(own):
    own.write_text(
        '[nodes.heap]\naccelerator = "tpu-v5p"\ninside = "ici-v5p"\ndimensions = 3\nsource = "mine"\n'
    )
    tables.add_catalog(own)
    with pytest.raises(UsageError, match=r"own.toml: nodes.heap: a pod needs both dimensions and most"):
        cluster("heap-8")


MINE = """
[models.mine]
family = "llama"
layers = 2
hidden = 64
heads = 4
ffn = 128
vocab = 99
max_sequence = 128
tied = true
source = "mine"
"""


@pytest.mark.parametrize(
    ("given", "instead", "says"),
    [
        ("heads = 4", "", r"own.toml: models.mine.heads: field required"),
        ("heads = 4", "heads = 0", r"models.mine.heads = 0: input should be greater than 0"),
        ("heads = 4", "heads = 7", "hidden: 64 is no multiple of heads 7"),
        ("heads = 4", 'heads = "four"', r"models.mine.heads = 'four': input should be a valid integer"),
        ("heads = 4", "heads = 4\nkv_heads = 3", "kv_heads: 3 does not divide heads 4"),
        ("layers = 2", "layers = -2", r"models.mine.layers = -2: input should be greater than 0"),
        ("layers = 2", "layer = 2", r"models.mine.layers: field required\n.*there is no key 'models.mine.layer'"),
        ("layers = 2", 'layers = 2\nname = "x"', "name: the table's own name is it"),
        ("layers = 2", 'layers = 2\nsame_as = "mine"', "models.mine: same_as = 'mine' leads back to it"),
        ("layers = 2", "layers = 2\nsame_as = [1]", r"same_as: there is no model '\[1\]'"),
        ("layers = 2", 'layers = 2\nsame_as = "b"\n[models.b]\nsame_as = "mine"', "same_as = 'mine' leads back to it"),
        ('family = "llama"', 'same_as = "llama-3-8"', "same_as: there is no model 'llama-3-8'; did you mean"),
    ],
)
def test_a_wrong_model_is_refused(own, given, instead, says):
    assert given in MINE
    own.write_text(MINE.replace(given, instead))
    tables.add_catalog(own)
    with pytest.raises(UsageError, match=says):
        model_shape("mine")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[accelerator.a]\nx = 1", "did you mean 'accelerators'"),
        ("[accelerators]\nx = 1", "holds tables with a name"),
        ("[accelerators", "is not TOML"),
        ("[accelerators.abacus]\npeak_flops = {}\nmemory_bytes = -1\nsource = 'x'", "memory_bytes"),
        ("[accelerators.abacus]\npeak_flops = {}\nmemory_bytes = 1\nmemory_bandwidth = 1\nsource = 'x'\n"
         "generation = 'hoppe'", "generation = 'hoppe'"),
        (None, "no such file"),
    ],
)
def test_a_wrong_file_is_refused(own, text, says):
    if text is not None:
        own.write_text(text)
    with pytest.raises(UsageError, match=says) as error:
        tables.add_catalog(own)
        accelerator("abacus")
    assert own.name in str(error.value)
