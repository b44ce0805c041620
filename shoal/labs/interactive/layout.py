"""Layout panel: time, memory, cost and traffic of a layout, and the changes that help most.

`estimate_layout` answers a slider's move by the public `shoal.estimate`; the rest of the answer is read off it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

from pydantic import PositiveFloat, PositiveInt

import shoal
from shoal.base.section import plain
from shoal.labs.interactive.mesh_traffic import list_axes
from shoal.labs.interactive.model_choice import ModelChoice, describe_shape, list_models
from shoal.pipeline.schedules import SCHEDULES
from shoal.planning.changes import find_changes
from shoal.planning.estimable import OPTIMIZERS
from shoal.planning.estimate import Estimate, StepEstimate
from shoal.planning.run import EstimatedRun
from shoal.planning.search.search import search
from shoal.planning.search.space import SEARCHED, LayoutSpace
from shoal.planning.software_estimate import estimate_run
from shoal.report.planning.estimate_lines import bound
from shoal.report.planning.other_software import words
from shoal.report.planning.tables import run_toml
from shoal.spec.layout import Layout, Recompute, ScheduleName
from shoal.spec.number_formats import FORMATS

MOVES = 3
"""Number of suggested changes."""


class LayoutRequest(ModelChoice):
    """A layout of a model on a cluster."""

    cluster: str = "16x8xH100"
    """A cluster's name."""

    precision: str = "bf16"
    """Number formats."""

    optimizer: str = "adamw"
    """The update rule."""

    global_batch: str = "4M"
    """Sequences per step, or tokens with K or M."""

    sequence_length: PositiveInt = 8192
    """Tokens per sequence."""

    tokens: PositiveFloat | None = None
    """Tokens of the complete training (default: 20 per parameter)."""

    price: PositiveFloat | None = None
    """Dollars per device and hour (default: the catalog's)."""

    parallel: Layout = Layout(tp=8, pp=4, zero=1, sequence_parallel=True)
    """The layout; without dp, replicas fill the cluster."""


class MovesRequest(LayoutRequest):
    """A layout whose changes are asked for."""

    thorough: bool = False
    """If no layout near it fits, search all of them, which takes up to a minute for 10,000 devices."""


def list_choices() -> dict[str, Any]:
    """Return the names that the controls offer."""
    return {
        "models": list_models(),
        "precisions": list(FORMATS),
        "optimizers": list(OPTIMIZERS),
        "schedules": [{"name": name, "virtual": SCHEDULES[name].virtual}
                      for name in get_args(ScheduleName) if name in SCHEDULES and name != "terapipe"],
        "recompute": list(get_args(Recompute)),
    }  # fmt: skip


def estimate_layout(request: LayoutRequest) -> dict[str, Any]:
    """Return the estimate of a layout in seconds, bytes, fractions and dollars.

    Raises:
        UsageError: a name that is not known, or a layout that cannot be trained or estimated.
    """
    estimate = _estimate(request)
    run, step = estimate.run, estimate.step_seconds
    low, high = estimate.interval
    fullest = estimate.fullest
    training = shoal.train_fully(run, step, tokens=request.tokens, price=request.price)
    return {
        "model": {"name": request.section()["name"], "parameters": run.shape.parameters(), **describe_shape(run.shape)},
        "cluster": {
            "devices": run.cluster.size, "nodes": run.cluster.nodes, "per_node": run.cluster.per_node,
            "accelerator": run.cluster.accelerator.name,
        },
        "layout": {"text": run.layout.describe(), "equation": run.layout.equation()},
        "batch": {"tokens": run.tokens, "microbatches": run.microbatches},
        "step": {"seconds": step, "interval": [low, high], "accuracy": estimate.accuracy().describe()},
        "mfu": {"value": estimate.mfu, "interval": [estimate.mfu * step / high, estimate.mfu * step / low]},
        "tokens_per_second": run.tokens / step,
        "breakdown": list(estimate.breakdown.items()),
        "memory": {
            "parts": list(vars(fullest).items()), "reserved": fullest.reserved,
            "interval": list(estimate.memory_interval), "capacity": estimate.capacity, "fits": estimate.fits,
            "may_fit": estimate.may_fit, "ranks": [each.reserved for each in estimate.memory],
        },
        "bound": bound(estimate).rpartition(". ")[0],
        "training": {
            "tokens": training.tokens, "days": training.days, "dollars": training.dollars, "price": training.price,
            "days_interval": [training.days * low / step, training.days * high / step],
        },
        "axes": list_axes(estimate) if isinstance(estimate, Estimate) else [],
        "toml": run_toml(request.section(), run, run.layout, training.tokens),
        "commands": _commands(request, run),
    }  # fmt: skip


def suggest_moves(request: MovesRequest) -> dict[str, Any]:
    """Return the layout's most useful single changes: faster ones, or if it does not fit, ones that fit.

    If no single change fits, the fastest layouts that keep as much as possible of this one (`kept_fields`).

    Raises:
        UsageError: see `estimate_layout`.
    """
    estimate = _estimate(request)
    found: list[tuple[str, StepEstimate]] = find_changes(estimate, MOVES)
    kept: tuple[str, ...] | None = None
    if not found and not estimate.fits and estimate.run.shape.depths is None:
        for kept in kept_fields(estimate.run.layout, thorough=request.thorough):
            space = LayoutSpace(fixed={name: getattr(estimate.run.layout, name) for name in kept}, uneven=not kept)
            runs = [replace(estimate.run, layout=each.layout) for each in search(estimate.run, space).best[:MOVES]]
            found = [(words(run.layout), estimate_run(run)) for run in runs]
            if found:
                break
    return {
        "kept": kept, "complete": request.thorough or bool(found) or estimate.fits,
        "moves": [
            {
                "name": name, "seconds": other.step_seconds, "change": other.step_seconds / estimate.step_seconds - 1,
                "mfu": other.mfu, "reserved": other.fullest.reserved, "parallel": plain(other.run.layout),
            }
            for name, other in found
        ],
    }  # fmt: skip


def kept_fields(layout: Layout, *, thorough: bool) -> Iterator[tuple[str, ...]]:
    """Yield the fields that a search for a layout that fits keeps: fewer each time, in the end none if ``thorough``."""
    schedule = ("schedule",) if layout.schedule in SEARCHED else ()
    yield ("tp", "cp", *schedule)
    yield ("cp", *schedule)
    if thorough:
        yield ()


FIRST: dict[str, Any] = {
    "model": "llama-3-70b", "config": "", "layers": None, "hidden": None, "heads": None, "ffn": None,
    "cluster": "16x8xH100", "precision": "bf16", "optimizer": "adamw", "global_batch": "4M", "sequence_length": 8192,
    "tokens": None, "price": None,
    "parallel": {
        "zero": 1, "tp": 8, "sequence_parallel": True, "cp": 1, "ep": 1, "pp": 4, "virtual_stages": None,
        "schedule": "1f1b", "micro_batch": 1, "recompute": "none",
    },
}  # fmt: skip
"""Request of the panel's first picture, as its script sends it."""
RECORDED = {
    "zero": (0, 2, 3), "tp": (1, 2, 4), "sequence_parallel": (False,), "cp": (2, 4), "pp": (1, 2, 8, 16),
    "schedule": ("gpipe", "zb-h1", "zb-v", "interleaved-1f1b"), "micro_batch": (2, 4),
    "recompute": ("selective", "full"),
}  # fmt: skip
"""Moves from it that a saved page answers."""
COURSE: tuple[dict[str, Any], ...] = (
    FIRST | {"model": "llama-3.2-1b", "cluster": "1xH100", "global_batch": "128K", "parallel": {
        **FIRST["parallel"], "zero": 0, "tp": 1, "sequence_parallel": False, "pp": 1}},
    FIRST | {"model": "mixtral-8x7b", "parallel": {**FIRST["parallel"], "zero": 3, "ep": 4, "tp": 1, "pp": 1}},
)  # fmt: skip
"""Other pictures of it: of one device, and of experts."""


def record_requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the requests of the first picture, of each control's moves from it, and of the course."""
    yield "layout-choices", {}
    yield "layout", FIRST
    for request in COURSE:
        yield "layout", request
    yield "layout-moves", FIRST
    for name, values in RECORDED.items():
        for value in values:
            yield "layout", FIRST | {"parallel": FIRST["parallel"] | {name: value}}


def _estimate(request: LayoutRequest) -> StepEstimate:
    layout = request.parallel
    if layout.tp == 1:  # nothing to split: the control has no effect
        layout = layout.model_copy(update={"sequence_parallel": False})
    return shoal.estimate(
        layout, model=request.shape(request.sequence_length), cluster=request.cluster, precision=request.precision,
        optimizer=request.optimizer, global_batch=request.global_batch, sequence_length=request.sequence_length,
    )  # fmt: skip


def _commands(request: LayoutRequest, run: EstimatedRun) -> list[str]:
    """Return the commands for the run's TOML file: the same estimate, a search from it, and the training."""
    tokens = f" --tokens {request.tokens:.6g}" if request.tokens else ""
    price = f" --price {request.price:g}" if request.price else ""
    cluster = shlex.quote(request.cluster)
    found = [f"shoal estimate run.toml --cluster {cluster}{tokens}{price}"]
    if not request.changed:
        batch = f"--global-batch {run.global_batch} --sequence-length {run.sequence_length}"
        formats = f"--precision {run.precision} --optimizer {run.optimizer}"
        found.append(f"shoal plan --model {request.model} --cluster {cluster} {batch} {formats}")
    return [*found, f"shoal train run.toml --ranks {run.layout.world_size}"]
