"""What a run needs is counted before it starts; where it does not fit, layouts that do are named."""

import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.launch.checks import memory
from shoal.launch.checks.memory import check_memory, count_rank_memory
from shoal.spec.config import RunConfig, build_config
from shoal.spec.layout import Layout

GPU = torch.device("cuda")


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the machine has H100s of 80 GB."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=85 * 10**9))


def llama(name: str, **parallel: object) -> RunConfig:
    return build_config({
        "model": {"name": name}, "data": {"source": "synthetic", "sequence_length": 8192}, "parallel": parallel,
        "train": {"precision": "bf16", "global_batch": 16},
    })  # fmt: skip


def check(config: RunConfig) -> None:
    shape = config.model.shape(vocab=128256, sequence_length=8192)
    check_memory(config, shape, GPU, range(config.parallel.world_size))


@pytest.mark.parametrize("parallel", [
    {"dp": 8}, {"dp": 8, "zero": 1, "micro_batch": 2}, {"dp": 2, "tp": 4, "micro_batch": 8},
])
def test_layouts_that_fit_are_named_and_do(h100: None, parallel: dict) -> None:
    config = llama("llama-3-8b", **parallel)
    with pytest.raises(UsageError, match="does not fit: the fullest rank needs") as error:
        check(config)
    assert "These options fit on 8 ranks" in str(error.value)
    found = re.findall(r"^    (--.*)$", str(error.value), re.M)
    assert 0 < len(found) <= memory.SUGGESTED
    for options in found:
        words = options.split()
        changes = {
            word.removeprefix("--parallel."): int(value) if value.isdigit() else value
            for word, value in zip(words[::2], words[1::2], strict=True)
        }
        check(llama("llama-3-8b", **{**parallel, **changes}))


@given(
    st.sampled_from((1, 2, 3)), st.sampled_from((1, 2)), st.sampled_from((1, 2)), st.sampled_from((1, 2, 4)),
    st.integers(0, 3), st.integers(1, 6),
)
def test_proposed_layouts_save_memory_on_as_many_ranks(dp, tp, cp, pp, zero, micro_batch):
    layout = Layout(dp=dp, tp=tp, cp=cp, pp=pp, zero=zero, micro_batch=micro_batch)
    changes = list(memory._changes(layout))
    assert [len(change) for change in changes] == sorted(len(change) for change in changes)
    assert {"recompute": "full"} in changes
    for change in changes:
        new = layout.model_copy(update=change)
        assert new.world_size == layout.world_size and new != layout
        assert new.tp >= tp and new.pp >= pp and new.zero >= zero and micro_batch % new.micro_batch == 0


def test_a_model_for_which_there_is_no_layout(h100: None) -> None:
    with pytest.raises(UsageError, match="No layout that was tried on as many ranks fits"):
        check(llama("llama-3-70b", dp=8, zero=3))


def test_logits_and_libraries_count_on_a_gpu(h100: None) -> None:
    config = llama("llama-3-8b", dp=8, zero=3, recompute="full")
    shapes = [config.model.shape(vocab=vocab, sequence_length=8192) for vocab in (32000, 128256)]
    small, large = (count_rank_memory(config, shape, GPU)[0] for shape in shapes)
    assert small.libraries == large.libraries > 10**9
    assert large.temporary + large.activations - small.temporary - small.activations > 8192 * (128256 - 32000) * 4
    assert "CUDA and NCCL 1.3 GB" in str(large)


def test_a_device_that_the_catalog_does_not_have_gets_the_lower_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an accelerator of tomorrow")
    config = llama("llama-3-8b", dp=8, zero=3)
    shape = config.model.shape(vocab=32000, sequence_length=8192)
    assert count_rank_memory(config, shape, GPU)[0].libraries == 0


def test_codes_of_4_bits_share_bytes_where_the_device_multiplies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, which decodes them everywhere, they never do."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an accelerator of tomorrow")
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def count(precision: str, major: int) -> int:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
        config = build_config({"train": {"precision": precision}})
        shape = config.model.shape(vocab=259, sequence_length=256)
        return count_rank_memory(config, shape, GPU)[0].activations

    assert count("nvfp4", 10) < count("nvfp4", 9)
    assert count("fp64-nvfp4", 10) == count("fp64-nvfp4", 9)


def test_on_the_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    config = build_config({"parallel": {"dp": 2, "micro_batch": 4}, "train": {"global_batch": 8}})
    shape = config.model.shape(vocab=259, sequence_length=256)
    needed = sum(rank.total for rank in count_rank_memory(config, shape, torch.device("cpu"), one_host=True) * 2)
    monkeypatch.setattr(memory, "host_memory", lambda: needed - 1)
    with pytest.raises(UsageError, match=r"its 2 ranks here need .*\n  These options fit on 2 ranks:\n    --parallel"):
        check_memory(config, shape, torch.device("cpu"), range(2))
