"""A process in which Triton programs run on the CPU."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version

import pytest
import torch


def release(package: str) -> tuple[int, ...]:
    return tuple(map(int, version(package).split(".")[:2]))


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable]:
    """Return a callable that calls a function with arguments in a process where Triton programs take CPU tensors.

    Triton decides when it is imported whether it interprets.
    """
    if release("triton") < (3, 7) and release("numpy") >= (2, 4):
        pytest.skip("the interpreter of Triton 3.6 converts arrays to numbers in a way that NumPy 2.4 refuses")
    process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        process.submit(int).result()  # starts it
    with process:
        yield lambda function, *args: process.submit(function, *args).result(timeout=300)
