"""Build and load the library that adds a CUDA device without functions to torch's CPU build. Does not import torch."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from shoal.base.errors import UsageError

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
CACHE = Path("~/.cache/shoal/fake_cuda")


def _torch_folder() -> Path:
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def why_unavailable() -> str | None:
    """Return why this machine cannot run steps on fake CUDA tensors, or None."""
    if shutil.which("g++") is None:
        return "fake CUDA needs g++, which is not installed"
    if [*(_torch_folder() / "lib").glob("libtorch_cuda*")]:
        return "fake CUDA needs torch's CPU build; this one has CUDA"
    return None


def build_library() -> Path:
    """Return the library, built on first use for this source and this torch.

    Raises:
        UsageError: it cannot be built; the message has the compiler's output.
    """
    if reason := why_unavailable():
        raise UsageError(reason)
    torch = _torch_folder()
    key = sha256(b"".join((SOURCE.read_bytes(), (torch / "version.py").read_bytes(), bytes(torch)))).hexdigest()[:16]
    library = CACHE.expanduser() / f"{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:  # other processes never see a part of the file
            built = Path(folder) / library.name
            command = [
                "g++", "-shared", "-fPIC", "-O1", "-std=c++20", f"-I{torch / 'include'}", str(SOURCE), "-o", str(built),
                f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}",
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise UsageError(f"fake CUDA: g++ failed:\n{done.stderr[-2000:]}")
            os.replace(built, library)
    return library


_loaded = False  # in this process


def load_library() -> None:
    """Add the device to this process, which may have it already.

    Raises:
        UsageError: torch was imported before, or the library cannot be built.
    """
    global _loaded
    if _loaded:
        return
    if "torch" in sys.modules:
        raise UsageError("fake CUDA must be loaded before torch: use a new process (start_process)")
    ctypes.CDLL(str(build_library()))
    _loaded = True


@contextmanager
def on_wait(call: Callable[[], None]) -> Iterator[None]:
    """Call a function in the enclosed code whenever the host waits for an event or a stream of the device."""
    hook = ctypes.c_void_p.in_dll(ctypes.CDLL(str(build_library())), "fake_cuda_waits")
    function = ctypes.CFUNCTYPE(None)(call)
    hook.value = ctypes.cast(function, ctypes.c_void_p).value
    try:
        yield
    finally:
        hook.value = None


def start_process() -> ProcessPoolExecutor:
    """Return an executor of one process with the library; build it beforehand, so that errors are raised here."""
    build_library()
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), load_library)
