"""``python -m shoal`` is the `shoal` command."""

import gc
import sys
from types import ModuleType


def main() -> int:
    """The command's exit code."""
    gc.disable()  # what a start makes stays: the collector of cycles need not look at it now, nor ever again
    _without_plugins()
    from shoal.cli import main

    gc.freeze()
    gc.enable()
    return main()


def _without_plugins() -> None:
    """Say that pydantic has no plugins. To ask all installed packages for some it would load a mail parser, among
    others, for a seventh of an estimate's time, even where PYDANTIC_DISABLE_PLUGINS is set."""
    loader = ModuleType("pydantic.plugin._loader")
    loader.get_plugins = tuple  # type: ignore[attr-defined]
    sys.modules.setdefault(loader.__name__, loader)


if __name__ == "__main__":
    sys.exit(main())
