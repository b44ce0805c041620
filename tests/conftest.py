"""What all tests share."""

import gc
import os
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings

from shoal.cli.main import READ_AT_IMPORT

os.environ["HF_HUB_OFFLINE"] = "1"  # no test, nor a drawn command line, asks the hub
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # also of transformers: scripts of the docs write to one stream
os.environ.update(READ_AT_IMPORT)  # no thread but this one: `server` may fork it

import torch

from shoal.engine.models.products import tune_products
from shoal.launch import prefork, worker_pool
from shoal.launch.worker_pool import Pool
from tests.browser import browser, page, saved, window  # noqa: F401 -- fixtures
from tests.fake_cuda.fixture import on_fake_cuda  # noqa: F401 -- a fixture
from tests.groups import find_group
from tests.trainings.fixtures import base_config, base_run, corpus  # noqa: F401 -- fixtures
from tests.trainings.forked import server
from tests.trainings.supervised import rank_server, supervised, undisturbed  # noqa: F401 -- fixtures

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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: no collection of cycles looks at it while tests are collected, which would take a third
    of that time, nor while they run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        if "PYTEST_XDIST_WORKER" in os.environ:
            # xdist's own thread is no reason against forks: it only reads from a pipe, and holds no lock. A server that
            # is a new interpreter would import for five seconds, in each test that trains.
            prefork.is_safe_to_fork = lambda: not autograd_has_threads()
            server()  # now, before tests change anything that it would inherit


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """As ``--dist loadfile`` does it, with the files of a group in one process."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Groups(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return find_group(nodeid)

    return Groups(config, log)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Up to 8 ranks on the CPU, which multiply as a run's: ``pool.run(function, ranks, *args)``. Workers start when
    first needed."""
    with Pool(8, tune_products) as pool:
        yield pool
