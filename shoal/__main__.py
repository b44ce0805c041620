"""``python -m shoal`` is the `shoal` command."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the current folder, whose files are not shoal's

from shoal.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
