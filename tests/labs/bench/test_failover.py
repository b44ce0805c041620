"""`shoal bench failover`: a recovery is measured, written down, and priced by the command that it names."""

import csv
import re
from contextlib import nullcontext

from shoal.cli.main import main
from shoal.labs.bench import failover
from shoal.testing.chaos import run


def test_a_recovery_is_measured_and_priced(tmp_path, rank_server, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(run, "start_rank_server", lambda *_: nullcontext(rank_server))  # which has imported all
    monkeypatch.setattr(failover, "STEPS", 4)
    out = tmp_path / "failover.csv"
    assert main(["bench", "failover", "--ranks", "2", "--trials", "1", "--recoveries", "survivors, disk",
                 "--out", str(out)]) == 0
    said = capsys.readouterr().out
    (row,) = csv.DictReader(out.open())
    assert (row["recovery"], row["survived"], row["in process"]) == ("survivors, disk", "1", "1")
    assert 0 < float(row["seconds, median"]) < 60
    price = re.search(r"shoal (goodput) (--restart) '(survivors disk=[\d.]+s)'", said)
    assert price is not None and main([*price.groups(), "--failures", "100"]) == 0
    assert "a restart takes" in capsys.readouterr().out
