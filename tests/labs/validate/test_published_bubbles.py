"""The simulator against bubble rates that were printed, with the times that they were computed from."""

import warnings
from pathlib import Path

import pytest

from shoal.base.errors import UsageError
from shoal.labs.validate.published_bubbles import (
    PrintedBubble,
    compare_printed,
    compute_kept,
    read_printed,
    simulate_printed,
)

FOLDER = Path(__file__).parents[4] / "shared" / "measured"

# Qi et al. 2024 (arXiv:2401.10241), tables 5 and 6: rates by model and micro-batches, times in ms.
SMALL = {24: (18.522, 18.086, 9.337, 0.601), 32: (18.513, 18.086, 9.331, 0.626), 64: (18.546, 18.097, 9.321, 0.762)}
LARGE = {24: (29.718, 29.444, 19.927, 0.527), 32: (29.802, 29.428, 19.530, 0.577), 64: (29.935, 29.621, 19.388, 0.535)}
METHODS = ("1F1B", "1F1B-I", "ZB-H1", "ZB-H2", "ZB-1p", "ZB-2p")
RATES = {
    ("1.5B", 24): (0.2431, 0.1055, 0.1585, 0.1083, 0.1585, 0.0433),
    ("1.5B", 32): (0.1985, 0.0818, 0.1242, 0.0837, 0.1242, 0.0039),
    ("1.5B", 64): (0.1240, 0.0443, 0.0674, 0.0444, 0.0674, 0.0026),
    ("6.2B", 24): (0.2347, 0.0808, 0.1323, 0.0698, 0.1323, 0.0029),
    ("6.2B", 32): (0.1898, 0.0628, 0.1045, 0.0559, 0.1045, 0.0022),
    ("6.2B", 64): (0.1091, 0.0320, 0.0554, 0.0294, 0.0554, 0.0010),
}
TRANSCRIBED = [
    PrintedBubble(
        row=f"{model}, m {m}",
        method=method,
        ranks=8,
        microbatches=m,
        virtual=({"1.5B": 3, "6.2B": 4}[model] if method == "1F1B-I" else 1),  # each layer a stage
        times={"1.5B": SMALL, "6.2B": LARGE}[model][m],
        bubble=rate,
        kept=compute_kept(1024, *{"1.5B": (2304, 24), "6.2B": (4096, 32)}[model]),
    )
    for (model, m), rates in RATES.items()
    for method, rate in zip(METHODS, rates, strict=True)
]


@pytest.mark.parametrize("printed", TRANSCRIBED, ids=lambda printed: f"{printed.method}, {printed.row}")
def test_a_printed_bubble_is_found_again(printed: PrintedBubble) -> None:
    """To the last digit printed for orders that are written down; 1F1B-I's is not said in full, ZB-2p's is searched."""
    exact = printed.method in ("1F1B", "ZB-H1", "ZB-H2", "ZB-1p")
    tolerance = 0.00005 if exact else 0.004 if printed.method == "1F1B-I" else 0.0015
    assert simulate_printed(printed).bubble_of_slowest_rank == pytest.approx(printed.bubble, abs=tolerance + 1e-9)


def test_the_table_of_published_rates() -> None:
    """All rows within 1.5 points (hundredths of the step) on average, and no row further than half a point."""
    if not FOLDER.is_dir():
        warnings.warn(f"{FOLDER} is not here: compared with the transcribed rows alone", stacklevel=1)
    printed = read_printed(FOLDER) if FOLDER.is_dir() else TRANSCRIBED
    assert len(printed) >= 33
    lines, error = compare_printed(printed)
    assert len(lines) == len(printed) + 1
    assert error < 0.1
    assert max(abs(float(line.split()[-1])) for line in lines[1:]) <= 0.5


def test_a_folder_without_the_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no zero_bubble.csv"):
        read_printed(tmp_path)
    (tmp_path / "zero_bubble.csv").write_text("row_id,note\n1,nothing\n")
    with pytest.raises(UsageError, match="no row has a printed bubble rate"):
        read_printed(tmp_path)


def test_a_method_that_is_not_known_is_refused() -> None:
    with pytest.raises(UsageError, match="method ZB-9; known are 1F1B, 1F1B-I"):
        simulate_printed(PrintedBubble("row", "ZB-9", 2, 2, 1, (1.0, 1.0, 1.0, 0.0), 0.0))
