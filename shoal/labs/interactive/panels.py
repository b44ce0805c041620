"""Table of the lab's panels: their calls, each a function of a checked request, and what a saved page records.

A panel consists of an ES module ``assets/panel_NAME.js`` and of functions. A function takes an instance of a `Section`,
the request, and returns plain values. It is imported when first called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import islice
from typing import Any, get_type_hints

from shoal.base.errors import UsageError
from shoal.base.section import Section, validate
from shoal.spec.layout import FILE

Answers = Iterator[tuple[str, dict[str, Any]]]
"""Names of calls with requests, as the panel's script sends them."""


@dataclass(frozen=True)
class Panel:
    """One tab of the lab.

    Attributes:
        calls: places of functions, as ``module:function``, by the name under which the script calls them.
        recorded: place of a function without arguments that yields the requests (`Answers`) whose answers a page saved
            by ``shoal lab --out`` embeds; the first ones give the panel's first picture.
    """

    calls: Mapping[str, str] = field(default_factory=dict)
    recorded: str = ""


HOME = "shoal.labs.interactive"
PANELS = {
    "layout": Panel(
        {
            "layout": f"{HOME}.layout:estimate_layout",
            "layout-choices": f"{HOME}.layout:list_choices",
            "layout-moves": f"{HOME}.layout:suggest_moves",
        },
        f"{HOME}.layout:record_requests",
    ),
    "roofline": Panel(
        {
            "roofline": f"{HOME}.roofline:place_operations",
            "roofline-choices": f"{HOME}.roofline:list_choices",
            "roofline-measure": f"{HOME}.roofline:measure_points",
        },
        f"{HOME}.roofline:record_requests",
    ),
    "timeline": Panel(
        {"timeline": f"{HOME}.timeline:play_timeline", "schedules": f"{HOME}.timeline:list_schedules"},
        f"{HOME}.timeline:record_requests",
    ),
    "collectives": Panel(
        {"collectives": f"{HOME}.collectives:play_collective", "networks": f"{HOME}.collectives:list_networks"},
        f"{HOME}.collectives:record_requests",
    ),
    "sharding": Panel(
        {
            "sharding": f"{HOME}.sharding:find_routes",
            "run-route": f"{HOME}.sharding:run_route",
            "sharding-choices": f"{HOME}.sharding:list_sharding_choices",
        },
        f"{HOME}.sharding:record_requests",
    ),
    "optimizers": Panel(
        {"optimizers": f"{HOME}.optimizers:trace_optimizers", "surfaces": f"{HOME}.optimizers:list_surfaces"},
        f"{HOME}.optimizers:record_requests",
    ),
    "numbers": Panel(
        {"numbers": f"{HOME}.numbers:show_number", "gradients": f"{HOME}.numbers:scale_gradients"},
        f"{HOME}.numbers:record_requests",
    ),
    "training": Panel(
        {
            "training-look": f"{HOME}.training:look_at_run",
            "training-start": f"{HOME}.training:start_run",
            "training-stop": f"{HOME}.training:stop_run",
            "training-kill": f"{HOME}.training:kill_rank",
            "training-profile": f"{HOME}.training:show_profile",
            "training-verify": f"{HOME}.training:verify_run",
        },
        f"{HOME}.training:record_requests",
    ),
}  # fmt: skip
"""Panels by name, in the order of their tabs."""


def call_panel(name: str, values: Mapping[str, Any]) -> Any:
    """Return the answer of a call to a request of plain values.

    Raises:
        UsageError: a key or a value of the request is wrong, or names a file, or the call refuses it.
        KeyError: no panel has this call.
    """
    _reject_files(values)
    function, request = _find_call(name)
    return function(validate(request, {**values}, source=name))


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
    return [name for panel in PANELS.values() for name in panel.calls]


def warm_up() -> None:
    """Answer the first picture once, so that imports and caches do not delay it."""
    first = next(iter(PANELS.values()))
    for name, request in islice(_import(first.recorded)(), 2):
        call_panel(name, request)


def recorded_requests() -> Answers:
    """Yield the requests whose answers a saved page embeds."""
    for panel in PANELS.values():
        if panel.recorded:
            yield from _import(panel.recorded)()


@cache
def _find_call(name: str) -> tuple[Callable[[Section], Any], type[Section]]:
    function = _import(next(panel.calls[name] for panel in PANELS.values() if name in panel.calls))
    hints = {argument: of for argument, of in get_type_hints(function).items() if argument != "return"}
    (request,) = hints.values()
    return function, request


def _import(place: str) -> Callable[..., Any]:
    module, function = place.split(":")
    return getattr(import_module(module), function)
