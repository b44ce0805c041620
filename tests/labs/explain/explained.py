"""Output of `shoal explain`."""

import pytest

from shoal.cli.main import main


def explained(capsys: pytest.CaptureFixture[str], words: str) -> str:
    """Run `shoal explain` on a wide terminal; return what it prints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "160")
        assert main(["explain", *words.split()]) == 0
    return capsys.readouterr().out
