"""`shoal verify`: prove that a layout computes what one device computes."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from typing import Literal

from pydantic import PositiveInt

import shoal
from shoal.base.section import Section
from shoal.spec.config import RunConfig


class VerifyOptions(Section):
    random: PositiveInt | None = None
    """Verify this many randomly drawn layouts instead of the given one."""

    rule: str | None = None
    """With --random: an update rule (or a comma-separated list, or all), each on this many layouts drawn for it."""

    steps: PositiveInt = 3
    """Training steps to compare."""

    precision: Literal["fp64", "own"] = "fp64"
    """fp64 compares to 1e-9; own uses the run's precision and compares to its rounding."""

    device: Literal["cpu", "cuda", "auto"] = "cpu"
    """Where the ranks compute (auto: CUDA if available); more ranks than CUDA devices share them, for checking only."""

    json_: bool = False
    """Print one JSON object instead."""

    inject: str | None = None
    """Inject this fault, to check that it is found; an unknown name lists them."""


def run(options: VerifyOptions, config: RunConfig) -> int:
    """Compare and print; return 0 if everything agrees, 1 if something differs."""
    own, given = options.precision == "own", options.model_dump(exclude={"precision", "json_"})
    found = shoal.verify(config, **given, own_precision=own, show=not options.json_)
    if options.json_:
        print(dumps({"same": found.same, **asdict(found)}))
    return 0 if found.same else 1
