"""How tests are shared among processes, and what is set before these import anything."""

import os

import pytest

from shoal.cli.main import READ_AT_IMPORT
from tests.groups import find_group

os.environ["HF_HUB_OFFLINE"] = "1"  # no test, nor a drawn command line, asks the hub
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # also of transformers: scripts of the docs write to one stream
os.environ.update(READ_AT_IMPORT)  # no thread but this one: `server` may fork it


def pytest_configure(config: pytest.Config) -> None:
    """Load what tests share, except in the process that only hands them out: torch would take it three seconds."""
    if not getattr(config.option, "numprocesses", None):
        config.pluginmanager.import_plugin("tests.everything")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Hand out files as ``--dist loadfile`` does, but all files of a group to one process."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Groups(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return find_group(nodeid)

    return Groups(config, log)
