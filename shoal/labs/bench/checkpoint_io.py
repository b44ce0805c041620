"""What checkpoints cost on this machine: ``python -m shoal.labs.bench.checkpoint_io --help``.

Each rate is the median of some saves and loads of one process; the first save, which also allocates the staging
memory, is printed apart. The slowdown is that of matrix products on the main thread while a save is written.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import tyro

from shoal.base.boxes import Box, Piece
from shoal.engine.checkpoint import Checkpointer, load, verify
from shoal.engine.checkpoint.manifest import checksum
from shoal.labs.bench.race import time_in_turns


def main(mib: int = 512, folder: Path | None = None, repeats: int = 5) -> None:
    """Measure saving and loading on this machine.

    Args:
        mib: size of the state.
        folder: on which disk (default: the system's temporary folder).
        repeats: measurements of each; medians count.
    """
    rows = mib * 256
    values = torch.rand(rows, 1024)
    state = {"w": [Piece((rows, 1024), Box.whole((rows, 1024)), values)]}
    size = values.nbytes
    torch.set_num_threads(1)

    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        checkpointer = Checkpointer(Path(scratch), group=None, keep=1, asynchronous=True)
        stalls, totals, slowdowns = [], [], []
        for step in range(repeats + 1):
            alone = _products_per_second(lambda elapsed: elapsed < 0.5)
            begin = time.perf_counter()
            stalls.append(checkpointer.save(step, state, {}))
            slowdowns.append(alone / _products_per_second(lambda _: checkpointer.in_flight))
            path = checkpointer.wait()
            totals.append(time.perf_counter() - begin)
        checkpointer.close()
        assert path is not None, "every save was waited for"
        print(f"{size / 2**20:.0f} MiB of fp32, one process, one torch thread, medians of {repeats}")
        print(f"first save stalls    {stalls[0]:7.3f} s  {_rate(size, stalls[:1])} (allocates the staging memory)")
        print(f"a save stalls        {statistics.median(stalls[1:]):7.3f} s  {_rate(size, stalls[1:])}")
        print(f"until it is on disk  {statistics.median(totals[1:]):7.3f} s  {_rate(size, totals[1:])}")
        print(f"training meanwhile   x {statistics.median(slowdowns[1:]):.2f} slower (matrix products)")
        actions = {
            "checksum": lambda: checksum(values), "verify": lambda: verify(path), "load": lambda: load(path, state),
        }
        for name, seconds in time_in_turns(actions, repeats, warmup=0).items():
            print(f"{name:<20} {statistics.median(seconds):7.3f} s  {_rate(size, seconds)}")


def _products_per_second(go_on: Callable[[float], bool]) -> float:
    matrix, done, begin = torch.rand(256, 256), 0, time.perf_counter()
    while go_on(time.perf_counter() - begin) or not done:
        matrix @ matrix
        done += 1
    return done / (time.perf_counter() - begin)


def _rate(size: int, seconds: list[float]) -> str:
    return f"{size / statistics.median(seconds) / 1e9:6.2f} GB/s"


if __name__ == "__main__":
    tyro.cli(main)
