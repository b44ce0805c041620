"""The optimizers panel: paths of the product's update rules over small surfaces."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Annotated, Any

import contourpy
import numpy as np
from pydantic import Field, PositiveFloat

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.section import NonEmpty, Section
from shoal.labs.explain.optimizers import GROUPS, SURFACES, Surface, build_rule, evaluate, walk

LOCAL_MINIMA = Surface(
    "local minima", "(x² - 1)² / 2 + x / 5 + y²",
    lambda w: (w[..., 0] ** 2 - 1) ** 2 / 2 + w[..., 0] / 5 + w[..., 1] ** 2,
    lambda w: w.new_tensor([6 * float(w[0]) ** 2 - 2, 2.0]),
    (1.7, 0.8), (-1.9, -1.2, 1.9, 1.2), (-0.19, -0.1, 0.0, 0.1, 0.2, 0.3, 0.45, 0.65, 0.9, 1.3, 1.9, 2.7, 3.8),
)  # fmt: skip
"""Two valleys, of which the left one is deeper; plain descent stays in the right one, where it starts."""
LANDSCAPES = {surface.name: surface for surface in (*SURFACES, LOCAL_MINIMA)}
CHOICES = tuple(name for _, names in GROUPS for name in names)
"""Rules that can be drawn; nesterov is momentum with its variant of the step."""
FAR = 1e3  # a path that leaves this square has diverged

Share = Annotated[float, Field(ge=0, lt=1)]


class OptimizersRequest(Section):
    """Some update rules with the same settings on one surface."""

    surface: str = "a narrow valley"
    rules: NonEmpty[str] = ("sgd", "momentum", "adam")
    rate: PositiveFloat = 0.05
    momentum: Share = 0.9
    beta1: Share = 0.9
    beta2: Share = 0.95
    steps: Annotated[int, Field(ge=1, le=400)] = 60


def trace_optimizers(request: OptimizersRequest) -> dict[str, Any]:
    """Walk each rule over the surface, with the product's own implementation.

    Returns:
        ``surface``: formula, start, box and contours as lines; ``paths``: for each rule its points and the loss at
        each, up to where it diverges.

    Raises:
        UsageError: an unknown surface or rule.
    """
    if request.surface not in LANDSCAPES:
        raise UsageError(f"surface {request.surface}: {did_you_mean(request.surface, LANDSCAPES)}")
    surface = LANDSCAPES[request.surface]
    paths = {}
    for name in dict.fromkeys(request.rules):
        betas = (request.beta1, request.beta2)
        config = build_rule(name, learning_rate=request.rate, momentum=request.momentum, betas=betas)
        path = walk(surface, config, request.steps)
        kept = [
            i for i, (point, loss) in enumerate(zip(path.points, path.losses, strict=True))
            if isfinite(loss) and max(map(abs, point)) < FAR
        ]  # fmt: skip
        length = next((i for i, at in enumerate(kept) if i != at), len(kept))
        paths[name] = {
            "points": path.points[:length], "losses": path.losses[:length], "diverged": length <= request.steps,
        }  # fmt: skip
    return {"surface": describe_surface(surface), "paths": paths}


def describe_surface(surface: Surface) -> dict[str, Any]:
    """Return a surface as plain values, its contours as lines of points."""
    lines = contourpy.contour_generator(*evaluate(surface))
    return {
        "name": surface.name,
        "formula": surface.formula,
        "start": surface.start,
        "box": surface.box,
        "contours": [
            [level, [np.asarray(line, float).round(3).tolist() for line in lines.lines(level)]]
            for level in surface.levels
        ],
    }  # fmt: skip


def list_surfaces() -> dict[str, Any]:
    """List the surfaces and the rules, with the settings that each rule reads."""
    momentum, betas = ("momentum", "nesterov", "muon"), ("adam", "radam", "sage", "sophia-g")
    return {
        "surfaces": list(LANDSCAPES),
        "rules": [
            {"name": name, "momentum": name in momentum, "betas": name in betas} for name in CHOICES
        ],
    }  # fmt: skip


def record_requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the requests of a saved page: the first settings on every surface."""
    yield "surfaces", {}
    for name in LANDSCAPES:
        yield "optimizers", {**OptimizersRequest().model_dump(mode="json"), "surface": name}
