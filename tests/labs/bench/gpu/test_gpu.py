"""`shoal bench gpu`: the rehearsal of all parts, lost items, and the page."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from rich.console import Console

from shoal.base.errors import UsageError
from shoal.base.options import parse
from shoal.labs.bench.gpu import benchmark, item, parts
from shoal.labs.bench.gpu.benchmark import GpuBenchmark
from shoal.labs.bench.gpu.item import GpuSetting, Item, PartRun, read_run, run_part
from shoal.labs.bench.gpu.page import write_page
from shoal.labs.bench.gpu.smoke import CALLS, check_call
from shoal.launch.worker_pool import shared_server
from tests.labs.bench.gpu import lost_items as lost


def rehearse(out: Path, *options: str) -> bool:
    command = parse("shoal bench gpu", GpuBenchmark, ["--device", "cpu", "--out", str(out), *options])
    return command.run(Console(quiet=True), lambda text: None)


def one_item_of_each_table(items: list[Item]) -> list[Item]:
    """Leave out further items of a table, except the calls that work without a GPU too. Tables whose titles begin
    alike (of formats, or of numbers of layers) count as one."""

    def kind(item: Item) -> tuple[str, str]:
        works = item.measure is check_call and not CALLS[item.name][1]
        return item.title.partition(",")[0], item.name if works else ""

    kept = {kind(item): item for item in items[::-1]}
    return [item for item in items if item is kept[kind(item)]]


def test_all_parts_are_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (name, list_items) in list(parts.PARTS.items()):
        shorter = (name, lambda setting, each=list_items: one_item_of_each_table(each(setting)))
        monkeypatch.setitem(parts.PARTS, number, shorter)
    assert rehearse(tmp_path)
    for number in parts.PARTS:
        run = read_run(tmp_path / f"part-{number}.jsonl")
        assert run and run.header["rehearsal"] and run.header["versions"]["torch"]
        assert not run.failed and len({row["item"] for row in run.rows}) <= run.header["items"] <= len(run.rows)
    page = (tmp_path / "index.html").read_text()
    assert page.count("Rehearsal on the CPU") == len(parts.PARTS) and "Not run." not in page
    assert "TFLOP/s" in page


# ---- items that are lost ---------------------------------------------------------------------------------------------


def test_a_lost_item_ends_nothing(tmp_path: Path) -> None:
    functions = (lost.crash, lost.hang, lost.fail, lost.miss, lost.succeed)
    items = [Item("table", each.__name__, each, seconds=5.0 if each is lost.hang else 60.0) for each in functions]
    shown: list[str] = []
    setting = GpuSetting("cpu", tmp_path)
    run = run_part(1, items, setting, 5.0, shown.append, shared_server())
    late = run_part(1, items[-1:], setting, 0.0, shown.append, shared_server())  # appended
    results = [(row["item"], row.get("value"), row["result"]) for row in run.rows]
    assert results[0] == ("crash", 1, "") and results[2] == ("hang", 2, "") and results[6] == ("succeed", 3, "passed")
    assert results[1][2] == "lost: was killed by SIGSEGV"
    assert results[3][2].startswith("lost: hung and was killed") and "in hang" in (tmp_path / "log.txt").read_text()
    assert "MemoryError: no memory for 5 GB" in results[4][2]
    assert results[5] == ("miss", 0.123457, "failed") and run.rows[5]["limit"] == "inf"
    assert [row["item"] for row in run.failed] == ["crash", "hang", "fail", "miss"]
    assert len(shown) == 5
    assert read_run(setting.file(1)) == late
    assert [row["result"] for row in late.rows] == [item.NOT_RUN] and late.failed == []


def test_items_side_by_side_and_the_end_of_the_time(tmp_path: Path) -> None:
    setting, server = GpuSetting("cpu", tmp_path), shared_server()
    items = [Item("table", name, lost.meet) for name in ("one", "other")]
    run = run_part(2, items, setting, 5.0, lambda text: None, server, at_once=2)
    assert sorted((row["item"], row["result"]) for row in run.rows) == [("one", "passed"), ("other", "passed")]
    run = run_part(2, [Item("table", "hang", lost.hang)], setting, 0.03, lambda text: None, server)
    assert run.rows[-1]["result"] == item.ENDED and run.failed == []
    log = (tmp_path / "log.txt").read_text()
    assert item.ENDED in log and "in hang" not in log  # no stack of an item that did not hang


def test_only_the_named_items_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "start_server", lambda setting: nullcontext(shared_server()))
    assert rehearse(tmp_path, "--part", "3", "6", "--only", "collectives of one rank")
    run = read_run(tmp_path / "part-3.jsonl")
    assert run and run.header["items"] == 1 and {row["item"] for row in run.rows} == {"backend"}
    assert not (tmp_path / "part-6.jsonl").exists()  # a run without items would hide an older one


# ---- the page --------------------------------------------------------------------------------------------------------


def test_page_of_a_gpu(tmp_path: Path) -> None:
    header = {"part": 4, "rehearsal": False, "date": "2026-01-01", "command": "shoal bench gpu", "device": "GPU <0>",
              "versions": {"torch": "2.11"}}  # fmt: skip
    step = {"table": parts.SHAPES, "item": "16 layers", "result": "", "TFLOP/s": 600.0, "MFU %": 60.6, "step ms": 100.0,
            "estimated ms": 97.0, "allocated GB": 70.0, "estimated GB": 71.0, "more": {"layers": 16}}  # fmt: skip
    lost = {"table": parts.SHAPES, "item": "8 layers", "result": "lost: was killed by SIGSEGV"}
    same = {**step, "item": f"{parts.BESIDE}, eager"}
    rival = {"table": parts.OTHERS, "item": "fsdp", "result": "", "TFLOP/s": 540.0}
    write_page(tmp_path / "index.html", {1: None, 4: PartRun(header, [step, lost, same, rival])})
    page = (tmp_path / "index.html").read_text()
    assert "Not run." in page and "Rehearsal" not in page and "GPU &lt;0&gt;" in page
    assert "600 TFLOP/s, MFU 60.6 %" in page and "lost: was killed by SIGSEGV" in page
    assert f"shoal, {parts.BESIDE}, eager" in page and "540 TFLOP/s" in page
    assert "estimated GB over allocated GB" in page and "estimated ms over step ms" in page


@pytest.mark.parametrize("options, message", [
    (["--device", "cuda"], "no CUDA device"),
    (["--rivals", "megatron"], "'megatron' is unknown"),
    (["--part", "7"], "part"),
    (["--part", "1", "6", "--only", "sophia"], "--only 'sophia': no table or item of part 1, 6"),
    (["--out", "/proc/none/x"], "--out"),
])  # fmt: skip
def test_bad_input(tmp_path: Path, options: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rehearse(tmp_path, *options)
