"""``python -m shoal`` is the `shoal` command."""

import gc
import sys
from importlib import import_module
from types import ModuleType
from typing import Any


def main() -> int:
    """The command's exit code."""
    gc.disable()  # what a start makes stays: the collector of cycles need not look at it now, nor ever again
    _without_plugins()
    from shoal.cli.main import main

    gc.freeze()
    gc.enable()
    return main()


def _without_plugins() -> None:
    """Say that pydantic has no plugins. To ask all installed packages for some it would load a mail parser, among
    others, for a seventh of an estimate's time, even where PYDANTIC_DISABLE_PLUGINS is set."""
    name = "pydantic.plugin._loader"

    def from_pydantic(attribute: str) -> Any:
        """What another release may ask of its own module."""
        if attribute.startswith("__"):  # which Python asks of any
            raise AttributeError(attribute)
        sys.modules.pop(name, None)
        return getattr(import_module(name), attribute)

    loader = ModuleType(name)
    loader.get_plugins = tuple  # type: ignore[attr-defined]
    loader.__getattr__ = from_pydantic  # type: ignore[method-assign]
    sys.modules.setdefault(name, loader)


if __name__ == "__main__":
    sys.exit(main())
