"""`shoal explain context` says and draws what the functions that run do; what cannot be is refused."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.engine.parallel.context.token_order import assign_tokens
from shoal.labs.explain.context import RingOrder, count_scores
from shoal.spec.layout import Layout

SVG = "{http://www.w3.org/2000/svg}"


def explained(capsys: pytest.CaptureFixture, *words: str) -> str:
    assert main(["explain", "context", *words]) == 0
    return capsys.readouterr().out


def test_who_has_what(capsys: pytest.CaptureFixture) -> None:
    out = explained(capsys, "--ranks", "2", "--sequence-length", "16")
    assert "16 tokens on cp 2 (ring 2, zig-zag)" in out
    assert "  0000111111110000\n" in out
    assert re.search(r"0  0-3; 12-15 +36 +32 +68\n", out), "8 x 9 / 2 scores of its own block, half of the other's 64"
    assert re.search(r"1  4-11 +36 +32 +68\n", out)


def test_ranks_at_one_place_share_its_tokens(capsys: pytest.CaptureFixture) -> None:
    out = explained(capsys, "--ranks", "4", "--ulysses", "2", "--order", "contiguous", "--sequence-length", "16")
    assert "  0000111122223333\n" in out
    assert re.search(r"0  0 to 1 +0-7 +36 +0 +36\n", out)
    assert re.search(r"1  2 to 3 +8-15 +36 +64 +100\n", out)
    assert "heads for tokens and back" in out


def test_zig_zag_waits_for_nobody() -> None:
    for places in (2, 4, 8):
        layouts = {order: Layout(cp=places, cp_order=order) for order in ("zig-zag", "contiguous")}
        held = {order: assign_tokens(layout, 64 * places) for order, layout in layouts.items()}
        assert RingOrder((), count_scores(held["zig-zag"])).slowdown == 1
        assert RingOrder((), count_scores(held["contiguous"])).slowdown == pytest.approx(2 - 1 / places, rel=0.01)


def test_the_drawing_has_every_score_once(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    file = tmp_path / "context.svg"
    explained(capsys, "--ranks", "3", "--out", str(file))
    words = [text.text for text in ET.parse(file).iter(f"{SVG}text")]
    assert {"zig-zag", "striped", "contiguous", "step 0", "step 1", "step 2"} <= set(words)
    numbers = [word for word in words if word in {"0", "1", "2"}]
    assert len(numbers) == 3 * 12 * 13 // 2


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--out", "context.png"], "--out context.png: give a file ending in .svg"),
        (["--ranks", "4", "--ulysses", "3"], "parallel.ulysses = 3 does not divide cp 4"),
        (["--ranks", "8", "--sequence-length", "8"], "too short for cp 8"),
    ],
)
def test_what_cannot_be_is_refused(capsys: pytest.CaptureFixture, words: list[str], complaint: str) -> None:
    assert main(["explain", "context", *words]) == 2
    assert complaint in capsys.readouterr().err
