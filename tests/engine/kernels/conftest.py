"""A process in which Triton programs run on the CPU."""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable]:
    """Return a callable that calls a function with arguments in a process where Triton programs take CPU tensors.

    Triton decides when it is imported whether it interprets.
    """
    process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        process.submit(int).result()  # starts it
    with process:
        yield lambda function, *args: process.submit(function, *args).result(timeout=300)
