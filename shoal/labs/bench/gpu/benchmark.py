"""`shoal bench gpu`: the first 45 minutes on a GPU, in six parts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveFloat
from rich.console import Console

from shoal.base.errors import UsageError
from shoal.base.section import NonEmpty
from shoal.engine.device import usable_cores
from shoal.labs.bench.benchmark import Benchmark, Notify, choose_names, make_table
from shoal.labs.bench.gpu.item import GpuSetting, read_run, run_part, start_server
from shoal.labs.bench.gpu.page import write_page
from shoal.labs.bench.gpu.parts import PARTS, UNTIMED
from shoal.labs.bench.gpu.rivals import RIVALS

Part = Annotated[int, Field(ge=1, le=len(PARTS))]
REHEARSAL = "Rehearsal on the CPU with tiny sizes: no figure is a GPU's."


class GpuBenchmark(Benchmark):
    """First contact with a GPU, in parts of less than ten minutes: calls and ceilings, equality with the CPU, many
    ranks on one device, bf16 speed, 8-bit recipes and optimizers, checkpoints; exit code 1 if a check fails."""

    part: NonEmpty[Part] = tuple(PARTS)
    """Parts to run: 1 first contact, 2 equality with the CPU, 3 ranks on one device, 4 bf16 speed, 5 8-bit recipes,
    experts, optimizers and offload, 6 checkpoints and spread."""

    out: Path = Path("gpu-bench")
    """Folder of the results: part-N.jsonl (each run of a part is appended), log.txt, trace.json.gz, and index.html with
    all parts."""

    device: Literal["cuda", "cpu"] = "cuda"
    """cpu rehearses all parts with tiny sizes, to check that they run."""

    rivals: str = "all"
    """Comma-separated list of other implementations to time in part 4: fsdp, transformers, liger; or none. A missing
    package is reported."""

    only: str = ""
    """Run only items whose table or name contains this text."""

    minutes: PositiveFloat = 9.5
    """Time of a part; further items are not run."""

    def run(self, console: Console, notify: Notify) -> bool:
        rivals = () if self.rivals == "none" else tuple(choose_names(self.rivals, RIVALS, "bench gpu --rivals"))
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("bench gpu: torch sees no CUDA device here.\n  Rehearse on the CPU with --device cpu.")
        setting = GpuSetting(self.device, self.out.absolute(), rivals)
        listed = {
            part: [item for item in PARTS[part][1](setting) if self.only in f"{item.title}: {item.name}"]
            for part in dict.fromkeys(self.part)
        }
        chosen = {part: items for part, items in listed.items() if items}
        if not chosen:
            parts = ", ".join(map(str, listed))
            raise UsageError(f"bench gpu --only {self.only!r}: no table or item of part {parts} contains it.")
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"bench gpu --out {self.out}: {error.strerror}.") from None
        if setting.rehearsal:
            console.print(REHEARSAL)
        failed = []
        with start_server(setting) as server:
            for part, items in chosen.items():
                at_once = max(1, min(6, usable_cores() // 2)) if part in UNTIMED else 1
                found = run_part(part, items, setting, self.minutes, notify, server, at_once)
                for title, rows in found.tables().items():
                    console.print(make_table(title + found.note, rows))
                failed += [f"part {part}: {row['table']}, {row['item']}: {row['result']}" for row in found.failed]
                write_page(setting.out / "index.html", {n: read_run(setting.file(n)) for n in PARTS})
        console.print(*failed or ["no check failed"], sep="\n", markup=False)
        console.print(f"written: {self.out / 'index.html'}", markup=False)
        return not failed
