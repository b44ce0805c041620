"""Table of the lab's panels: their calls, each a function of a checked request, and what a saved page records.

A panel consists of an ES module ``assets/panel_NAME.js`` and of a module ``NAME`` beside this one, imported when first
called. A function of it takes an instance of a `Section`, the request, or nothing, and returns plain values. Its
``record_requests`` yields the requests whose answers a saved page embeds (`Answers`); the first ones give the panel's
first picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from itertools import islice
from typing import Any, get_type_hints

from shoal.base.errors import UsageError
from shoal.base.section import Section, validate
from shoal.spec.layout import FILE

Answers = Iterator[tuple[str, dict[str, Any]]]
"""Names of calls with requests, as the panel's script sends them."""


PANELS: dict[str, dict[str, str]] = {
    "layout": {"layout": "estimate_layout", "layout-choices": "list_choices", "layout-moves": "suggest_moves"},
    "roofline": {
        "roofline": "place_operations", "roofline-choices": "list_choices", "roofline-measure": "measure_points",
    },
    "timeline": {"timeline": "play_timeline", "schedules": "list_schedules"},
    "collectives": {"collectives": "play_collective", "networks": "list_networks"},
    "sharding": {"sharding": "find_routes", "run-route": "run_route", "sharding-choices": "list_sharding_choices"},
    "optimizers": {"optimizers": "trace_optimizers", "surfaces": "list_surfaces"},
    "numbers": {"numbers": "show_number", "gradients": "scale_gradients"},
    "training": {
        "training-look": "look_at_run", "training-start": "start_run", "training-stop": "stop_run",
        "training-kill": "kill_rank", "training-profile": "show_profile", "training-verify": "verify_run",
    },
}  # fmt: skip
"""Panels by name, in the order of their tabs: the functions of each by the names under which its script calls them."""


def call_panel(name: str, values: Mapping[str, Any]) -> Any:
    """Return the answer of a call to a request of plain values.

    Raises:
        UsageError: a key or a value of the request is wrong, or names a file, or the call refuses it.
        KeyError: no panel has this call.
    """
    _reject_files(values)
    function, kind = _find_call(name)
    request = validate(kind or Section, {**values}, source=name)
    return function(request) if kind else function()


def _reject_files(values: Any, name: str = "") -> None:
    """Refuse names of files anywhere in a request: a layout may name a schedule's file, which a page must not read.

    >>> _reject_files({"parallel": {"schedule": "file:/etc/passwd"}})
    Traceback (most recent call last):
    shoal.base.errors.UsageError: schedule = 'file:/etc/passwd': the lab reads no files.
      shoal simulate and shoal estimate do.
    """
    if isinstance(values, Mapping):
        for key, value in values.items():
            _reject_files(value, str(key))
    elif isinstance(values, list | tuple):
        for value in values:
            _reject_files(value, name)
    elif isinstance(values, str) and values.lstrip().startswith(FILE):
        raise UsageError(f"{name} = {values!r}: the lab reads no files.\n  shoal simulate and shoal estimate do.")


def call_names() -> list[str]:
    """Return the names of all calls."""
    return [name for calls in PANELS.values() for name in calls]


def warm_up() -> None:
    """Answer the first picture once, so that imports and caches do not delay it."""
    for name, request in islice(recorded_requests(), 2):
        call_panel(name, request)


def recorded_requests() -> Answers:
    """Yield the requests whose answers a saved page embeds."""
    for panel in PANELS:
        yield from _import(panel).record_requests()


@cache
def _find_call(name: str) -> tuple[Callable[..., Any], type[Section] | None]:
    """Return the function of a call, and the kind of its request; None if it has none."""
    panel = next(panel for panel, calls in PANELS.items() if name in calls)
    function = getattr(_import(panel), PANELS[panel][name])
    return function, next((kind for argument, kind in get_type_hints(function).items() if argument != "return"), None)


def _import(panel: str) -> Any:
    return import_module(f"shoal.labs.interactive.{panel}")
