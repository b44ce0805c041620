"""Items of a part: each runs in a process of its own with a time limit and appends its rows to the part's file.

A file has one JSON value per line: the header of a run of the part, then its rows. A process that crashes or hangs
loses the rows it has not written, and gets a row that gives the cause.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

import shoal
from shoal.base.files import json_lines, open_to_append, read_json_lines
from shoal.engine.device import round_only_results, usable_cores
from shoal.labs.bench.benchmark import Notify, Row
from shoal.launch.prefork import PreforkServer
from shoal.launch.worker_pool import PRELOADED, Pool, RankError
from shoal.spec.catalog.accelerators import Accelerator, match

T = TypeVar("T")
PACKAGES = (
    "torch", "triton", "numpy", "pydantic", "tyro", "safetensors", "transformers", "liger-kernel", "flash-attn",
    "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu12",
)
TOOLS = ("compute-sanitizer", "nsys", "ncu", "g++", "gcc", "clang", "cc")
NOT_RUN = "not run: the time of the part was used up"
ENDED = "ended: the time of the part was used up"


@dataclass(frozen=True)
class GpuSetting:
    """Device and output folder of the benchmark.

    Attributes:
        device: "cuda", or "cpu" for a rehearsal with tiny sizes, whose times mean nothing.
        rivals: names of other implementations to time beside shoal's.
    """

    device: str
    out: Path
    rivals: tuple[str, ...] = ()

    @property
    def rehearsal(self) -> bool:
        return self.device == "cpu"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")

    def pick(self, full: T, tiny: T) -> T:
        """Return the first value on a GPU, the second in a rehearsal."""
        return tiny if self.rehearsal else full

    @cached_property
    def accelerator(self) -> Accelerator | None:
        """Catalog entry of this GPU, None if unknown and in a rehearsal."""
        return None if self.rehearsal else match(torch.cuda.get_device_name(0))

    def share_of_peak(self, flops: float, kind: str) -> float | None:
        """Return FLOP/s as percent of the data sheet's dense peak; None without one."""
        peak = self.accelerator.peak_flops.get(kind) if self.accelerator else None
        return 100 * flops / peak if peak else None

    def file(self, part: int) -> Path:
        return self.out / f"part-{part}.jsonl"

    @property
    def log(self) -> Path:
        return self.out / "log.txt"


@dataclass(frozen=True)
class Item:
    """One measurement.

    Attributes:
        title: heading of the table that its rows belong to.
        measure: top-level function from a setting and ``args`` to rows; what it yields is kept even if it fails later.
            A row with ``passed`` False, like an item that fails, makes the exit code 1.
        seconds: time limit.
    """

    title: str
    name: str
    measure: Callable[..., Iterator[Row]]
    args: tuple[Any, ...] = ()
    seconds: float = 60.0


@dataclass
class PartRun:
    """One run of a part, as read from its file."""

    header: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Return the rows by title, all rows of a title with equal keys and without the details in "more"."""
        found: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows:
            found.setdefault(row["table"], []).append({k: v for k, v in row.items() if k != "table"})
        for title, rows in found.items():
            keys = dict.fromkeys(key for row in rows for key in row if key not in ("result", "more"))
            found[title] = [{key: row.get(key) for key in (*keys, "result")} for row in rows]
        return found

    @property
    def note(self) -> str:
        """Text for headings: whether this is a rehearsal."""
        return " (rehearsal, tiny sizes)" if self.header["rehearsal"] else ""

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Rows that were lost or did not pass."""
        return [row for row in self.rows if row["result"].startswith(("failed", "lost"))]


def read_run(path: Path) -> PartRun | None:
    """Return the newest run in a part's file; None without any."""
    found: PartRun | None = None
    for value in read_json_lines(path, _parse_line, "row of a benchmark"):
        if "part" in value:
            found = PartRun(value)
        elif found:
            found.rows.append(value)
    return found


def _parse_line(value: Any) -> dict[str, Any]:
    line = dict(value)
    if not ({"rehearsal", "date"} if "part" in line else {"table", "item", "result"}) <= line.keys():
        raise LookupError
    return line


def start_server(setting: GpuSetting) -> PreforkServer:
    """Start the process that forks the items' processes; it never touches the device."""
    return PreforkServer(os.environ, setting.log, [*PRELOADED, "shoal.labs.bench.gpu.parts"])


def run_part(
    part: int, items: Sequence[Item], setting: GpuSetting, minutes: float, notify: Notify, server: PreforkServer,
    at_once: int = 1,
) -> PartRun:
    """Run the items, each in its own process; return what the file then contains.

    Args:
        at_once: items that run side by side; 1 for those that measure time.
    """
    header = {"part": part, "command": " ".join(["shoal", *sys.argv[1:]]), "rehearsal": setting.rehearsal,
              "date": time.strftime("%Y-%m-%d %H:%M:%S"), "items": len(items)}  # fmt: skip
    try:
        with Pool(1, server=server, device=setting.device) as pool:
            header |= pool.map(describe_machine, [setting], timeout=90.0)[0]
    except RankError as error:
        header["trouble"] = error.reason
    _append(setting.file(part), header)
    end = time.monotonic() + 60 * minutes
    threads = max(1, usable_cores() // at_once)

    def run(numbered: tuple[int, Item]) -> None:
        number, item = numbered
        begin = time.monotonic()
        trouble = NOT_RUN
        if begin < end:
            notify(f"part {part}, {number} of {len(items)}: {item.title}, {item.name}")
            try:
                with Pool(1, server=server, device=setting.device) as pool:
                    pool.map(execute, [(part, setting, item, threads)], timeout=min(item.seconds, end - begin))
                trouble = ""
            except (RankError, RuntimeError) as error:
                ended = end - begin < item.seconds and time.monotonic() >= end
                trouble = ENDED if ended else f"lost: {error.reason if isinstance(error, RankError) else error}"
                _log(setting, f"{ENDED if ended else error}\n")  # an item that did not hang has no stack to show
            _log(setting, f"--- {item.title}, {item.name}: {time.monotonic() - begin:.1f} s\n")
        if trouble:
            _append(setting.file(part), {"table": item.title, "item": item.name, "result": trouble})

    with ThreadPoolExecutor(at_once) as executor:
        list(executor.map(run, enumerate(items, 1)))
    found = read_run(setting.file(part))
    assert found, "the header was just written"
    return found


def execute(order: tuple[int, GpuSetting, Item, int]) -> None:
    """Run one item in this process, with a number of threads, and append its rows to the part's file."""
    part, setting, item, threads = order
    for stream in (1, 2):  # what torch, the compiler and commands print belongs in the log
        with open_to_append(setting.log) as log:
            os.dup2(log.fileno(), stream)
    if not setting.rehearsal:
        torch.set_num_threads(threads)
        torch.cuda.set_device(setting.torch_device)
        round_only_results()  # as on a rank
    for row in item.measure(setting, *item.args):
        verdict = {True: "passed", False: "failed", None: ""}[row.get("passed")]
        values = {key: _plain(value) for key, value in row.items() if key != "passed"}
        _append(setting.file(part), {"table": item.title, "item": item.name, "result": verdict, **values})


@contextmanager
def attempt(row: dict[str, Any], verdict: str = "unsupported") -> Iterator[None]:
    """Add to the row, if the enclosed measurement fails, a verdict and the error; its traceback goes to the log."""
    try:
        yield
    except Exception as error:  # any: an unsupported call is a result too
        traceback.print_exc()
        text = str(error).strip().partition("\n")[0].partition(". ")[0][:200]
        row["result"] = f"{verdict}: {type(error).__name__}: {text}"


def describe_machine(setting: GpuSetting) -> dict[str, Any]:
    """Return versions, device, driver and tools of this machine, for the header of a run."""
    found: dict[str, Any] = {"shoal": shoal.__version__, "python": platform.python_version(), "cores": usable_cores()}
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    found |= {"versions": versions, "tools": {name: shutil.which(name) or "absent" for name in TOOLS}}
    # Triton builds its launcher with them at the first kernel: the compiler in CC, else gcc or clang.
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    found["tools"] |= {"CC": os.environ.get("CC", "not set"), "Python.h": str(header) if header.exists() else "absent"}
    if setting.rehearsal:
        return found | {"device": f"CPU, {platform.machine()}", "driver": ""}
    properties = torch.cuda.get_device_properties(0)
    query = "--query-gpu=driver_version,power.limit,clocks.max.sm,clocks.max.mem"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        driver = f"nvidia-smi: {error}"
    return found | {
        "device": properties.name, "driver": driver, "cuda": torch.version.cuda, "memory": properties.total_memory,
        "processors": properties.multi_processor_count, "capability": [properties.major, properties.minor],
        "cudnn": torch.backends.cudnn.version(), "devices": torch.cuda.device_count(),
    }


def _plain(value: Any) -> Any:
    """Return a value that every JSON reader accepts."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value if isinstance(value, (int, str, type(None))) else json.loads(json.dumps(value, default=str))


def _append(path: Path, value: dict[str, Any]) -> None:
    with open_to_append(path) as file:
        file.write(json_lines([value]).encode())


def _log(setting: GpuSetting, text: str) -> None:
    with open_to_append(setting.log) as file:
        file.write(text.encode())
