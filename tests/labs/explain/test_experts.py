"""The picture of who holds which experts is the mesh's."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.labs.explain.experts import place_experts
from shoal.spec.catalog import model_shape
from shoal.spec.compatibility.sizes import check_layout
from shoal.spec.layout import Layout

MIXTRAL = model_shape("mixtral-8x7b")


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2]),
       st.sampled_from([0, 1]))
def test_every_expert_is_held_whole_by_each_group_that_exchanges_tokens(
    dp: int, tp: int, ep: int, etp: int, zero: int
) -> None:
    layout = Layout(dp=dp, tp=tp, ep=ep, etp=etp, zero=zero)
    try:
        check_layout(layout, MIXTRAL, global_batch=dp, sequence_length=64)
    except UsageError:
        return
    held = place_experts(layout, MIXTRAL)
    for one in held:
        together = [held[rank].experts for rank in one.tokens_with]
        assert sorted(e for experts in together for e in experts) == list(range(8))
        assert len({held[rank].part for rank in one.tokens_with}) == 1
        assert {(held[rank].experts, held[rank].part) for rank in one.same} == {(one.experts, one.part)}
    assert len(held) == len(held[0].same) * ep * etp


def test_the_command_prints_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "experts.svg"
    assert main(["explain", "experts", "--dp", "8", "--tp", "2", "--ep", "4", "--etp", "1", "--out", str(file)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "edp 4 x ep 4 x etp 1 = dp 8 x cp 1 x tp 2 = 16 ranks" in printed
    assert "Rank 0 exchanges tokens with ranks 1, 2, 3" in printed
    assert "with ranks 4, 8, 12" in printed
    assert file.read_text().count(">experts 6 7<") == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "llama-3-8b"], "the model has no experts"),
        (["--ep", "3"], "does not divide"),
        (["--out", "picture.gif"], "ending in .svg"),
        (["--zero", "7"], "'0', '1', '2', '3'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "experts", *options]) == 2
    assert words in capsys.readouterr().err
