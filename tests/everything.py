"""What all tests share: fixtures, and how their process is set up. A plugin of `conftest`."""

import fcntl
import gc
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from shoal.engine.models.products import tune_products
from shoal.launch import prefork, worker_pool
from shoal.launch.worker_pool import Pool
from tests.browser import browser, page, saved, window  # noqa: F401 -- fixtures
from tests.fake_cuda.fixture import on_fake_cuda  # noqa: F401 -- a fixture
from tests.trainings.fixtures import base_config, base_run, corpus  # noqa: F401 -- fixtures
from tests.trainings.forked import server
from tests.trainings.supervised import rank_server, supervised, undisturbed  # noqa: F401 -- fixtures

TESTS = Path(__file__).parent

# A shell may export its width; pages and tests have what is printed without a terminal.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

# How long one example takes says how busy the machine is. Each run of the suite draws others; a test that needs more of
# them at once says how many.
settings.register_profile("shoal", deadline=None, max_examples=40)
settings.load_profile("shoal")

# The models of tests are so small that a second thread mostly waits, on a core that the ranks need.
torch.set_num_threads(1)

# What is computed here is compared with what ranks compute, to the last bit in places.
tune_products()

# Which vector instructions its C++ may use, torch's compiler would find out by starting Python several times, each of
# which imports torch. What is made for one element at a time shows the same here.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# What the tests of ranks import besides is imported once too.
worker_pool.PRELOADED += [
    "pytest", "hypothesis.strategies", "shoal.cli.main", "shoal.training.dry_run.dry_run", "shoal.testing.verify.rank",
    "shoal.training.async_dp.trainers", "shoal.cli.bench", "shoal.labs.bench.step.benchmark", "scipy.stats",
]
worker_pool.shared_server = server


def autograd_has_threads() -> bool:
    """Whether a backward on a device started torch's own threads for it: no fork of this process can compute one."""
    for task in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it just ended
            if task.read_text().startswith("pt_autograd"):
                return True
    return False


@contextmanager
def first_alone() -> Iterator[None]:
    """Let one process collect before the others where pytest has not rewritten all files of tests yet, which takes
    four seconds of CPU: the others read what it has written."""
    rewritten = len([*TESTS.rglob("test_*-pytest-*.pyc")])
    folder = os.open(TESTS, os.O_RDONLY)
    try:
        if rewritten < len([*TESTS.rglob("test_*.py")]):
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fcntl.flock(folder, fcntl.LOCK_SH)  # until the first has ended; then all at once
        yield
    finally:
        os.close(folder)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: no collection of cycles looks at it while tests are collected, which would take a third
    of that time, nor while they run."""
    gc.disable()
    try:
        with first_alone():
            return (yield)
    finally:
        gc.freeze()
        gc.enable()
        if "PYTEST_XDIST_WORKER" in os.environ:
            # xdist's own thread is no reason against forks: it only reads from a pipe, and holds no lock. A server that
            # is a new interpreter would import for five seconds, in each test that trains.
            prefork.is_safe_to_fork = lambda: not autograd_has_threads()
            server()  # now, before tests change anything that it would inherit


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Up to 8 ranks on the CPU, which multiply as a run's: ``pool.run(function, ranks, *args)``. Workers start when
    first needed."""
    with Pool(8, tune_products) as pool:
        yield pool
