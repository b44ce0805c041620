"""``python -m shoal`` is the `shoal` command."""

import sys
from typing import NoReturn

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the current folder, whose files are not shoal's

from shoal.cli.main import main
from shoal.launch.forked_process import run_and_exit


def command() -> NoReturn:
    """Run the command and exit without taking torch's modules apart, which takes up to a second."""
    run_and_exit(lambda: sys.exit(main()))


if __name__ == "__main__":
    command()
