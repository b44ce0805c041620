"""`python -m tests.fake_cuda RUN.toml`: what delays a step on CUDA, without a GPU."""

from __future__ import annotations

import argparse
import sys

from shoal.base.errors import UsageError
from shoal.spec.config import load_config
from tests.fake_cuda.library import load_library


def main(args: list[str]) -> int:
    """Print the census of one step; return 1 if it mixed devices."""
    parser = argparse.ArgumentParser(prog="python -m tests.fake_cuda", description=__doc__)
    parser.add_argument("run", help="TOML file of the run")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--step", type=int, default=1, help="the counted step, after the ones before it")
    parser.add_argument("--most", type=int, default=12, help="lines of each kind")
    options = parser.parse_args(args)
    try:
        config = load_config(options.run)
        load_library()
        from tests.fake_cuda.census import take_census  # imports torch

        census = take_census(config, options.rank, step=options.step)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(census.lines(options.most)))
    return 1 if census.mismatches else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
