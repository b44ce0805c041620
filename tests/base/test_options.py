"""A command line of nothing but pairs means what tyro takes it for; any other is left to tyro."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.base import options
from shoal.base.options import defaults, pairs, read
from shoal.base.section import docstrings
from shoal.cli.estimate import EstimateOptions
from shoal.cli.run.data import TokenizerOptions
from shoal.spec.config import OptimizerConfig
from shoal.spec.layout import Layout

SECTIONS = {"": EstimateOptions, "parallel": Layout, "optimizer": OptimizerConfig}
DEFAULT = {name: defaults(kind) for name, kind in SECTIONS.items()}
PLAIN = [
    ["--model", "llama-3-8b"], ["--sequence-length", "2048"], ["--sequence_length=2048"], ["--tokens", "15e12"],
    ["--price", "3"], ["--dry-run"], ["--out", "a b.html"], ["--parallel.tp", "8"], ["--parallel.zero=3"],
    ["--parallel.sequence-parallel"], ["--parallel.sequence_parallel"], ["--parallel.schedule", "zb-v"],
    ["--parallel.virtual-stages", "2"], ["--parallel.recompute", "full"], ["--optimizer.learning-rate", "1.5e4"],
]  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(st.lists(st.sampled_from(PLAIN), unique_by=lambda words: words[0].split("=")[0].replace("_", "-")))
def test_what_is_read_here_is_what_tyro_reads(given: list[list[str]]) -> None:
    args = [word for words in given for word in words]
    assert pairs(SECTIONS, args) is not None
    here = read("shoal", "", SECTIONS, DEFAULT, args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "pairs", lambda sections, args: None)
        assert read("shoal", "", SECTIONS, DEFAULT, args) == here


@pytest.mark.parametrize("words", [
    "--help", "--modle x", "--rank -1", "--rank one", "--rank", "--parallel.zero 4", "--parallel.no-overlap",
    "--parallel.overlap True", "--model None", "--model a --model b", "model", "--parallel.tp 2 3", "--dry-run=yes",
    "--parallel.tp-overlap True", "--optimizer.betas 0.9 0.95", "--tokens inf", "--rank 1_0", "--out=",
    "--folder x", "--parallel", "--paralel.tp 2",
])  # fmt: skip
def test_what_is_not_plain_is_tyros(words: str) -> None:
    assert pairs(SECTIONS, words.split()) is None


def test_help_says_what_stands_below_a_field() -> None:
    assert docstrings(TokenizerOptions)["vocab_size"].startswith("Token ids, the 256 bytes")
    assert docstrings(Layout).keys() == Layout.model_fields.keys()
