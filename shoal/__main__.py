"""``python -m shoal`` is the `shoal` command."""

import gc
import sys


def main() -> int:
    """The command's exit code."""
    gc.disable()  # what a start makes stays: the collector of cycles need not look at it now, nor ever again
    from shoal.cli import main

    gc.freeze()
    gc.enable()
    return main()


if __name__ == "__main__":
    sys.exit(main())
