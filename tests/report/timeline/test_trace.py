"""Traces: what Perfetto's importer of Chrome's format asks for."""

import gzip
import json
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings

from shoal.base.errors import UsageError
from shoal.report.timeline.trace import COMPUTE, events, write_trace
from shoal.report.timeline.write import write
from tests.report.charts import SHOWN, chart, charts


def by_phase(found) -> dict[str, list[dict]]:
    phases = defaultdict(list)
    for event in found:
        phases[event["ph"]].append(event)
    return phases


@given(charts())
@settings(max_examples=25, deadline=None)
def test_a_trace_is_well_formed(one):
    phases = by_phase(json.loads(json.dumps(list(events([one])))))
    assert set(phases) <= {"M", "X", "s", "f", "C"}
    tracks, scale = defaultdict(list), 1e6 if one.seconds else 1e3
    for event in phases["X"]:
        assert event["dur"] >= 0 and event["ts"] >= 0
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    named = {(event["pid"], event["tid"]) for event in phases["M"] if event["name"] == "thread_name"}
    assert set(tracks) <= named
    for (_, track), spans in tracks.items():
        if track == COMPUTE:
            assert all(end <= begin + 2e-4 for (_, end), (begin, _) in pairwise(spans))
    assert sum(event["tid"] == COMPUTE for event in phases["X"]) == one.timeline.columns.rows
    starts, ends = ({event["id"]: event for event in phases[phase]} for phase in "sf")
    assert starts.keys() == ends.keys() and len(starts) == len(one.timeline.messages.source) == len(phases["s"])
    for arrow, start in starts.items():
        assert start["ts"] <= ends[arrow]["ts"] + 2e-4 and start["pid"] != ends[arrow]["pid"]
    for rank in range(one.timeline.ranks):
        counted = [event["args"]["alive"] for event in phases["C"] if event["pid"] == rank]
        assert max(counted) == pytest.approx(one.timeline.peak_live[rank]) and abs(counted[-1]) < 1e-9
    last = max(event["ts"] + event["dur"] for event in phases["X"] if event["tid"] == COMPUTE)
    assert last == pytest.approx(one.timeline.step_time * scale, abs=1e-3)


def test_several_timelines_never_share_a_process_or_an_arrow():
    found = by_phase(events([chart(name) for name in SHOWN]))
    names = [event["args"]["name"] for event in found["M"] if event["name"] == "process_name"]
    assert len(names) == len(set(names)) == sum(chart(name).timeline.ranks for name in SHOWN)
    arrows = [event["id"] for event in found["s"]]
    assert len(arrows) == len(set(arrows))


def test_plain_and_gzipped_hold_the_same(tmp_path):
    plain, zipped = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    for path in (plain, zipped):
        write_trace(path, [chart()])
    assert json.loads(plain.read_text()) == json.loads(gzip.decompress(zipped.read_bytes()))
    with pytest.raises(UsageError, match=r"\.json"):
        write(tmp_path / "trace.txt", [chart()], title="", lead="")
