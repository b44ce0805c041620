"""Checks that a run can be estimated: `shoal train` accepts it and cost formulas exist."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import get_args

from shoal.base.errors import UsageError, did_you_mean
from shoal.base.section import plain
from shoal.pipeline.from_layout import check_run, check_schedule
from shoal.planning.cost.batched_runs import SCHEDULES
from shoal.planning.run import EstimatedRun
from shoal.spec.catalog import ModelShape, model_shape, tables
from shoal.spec.compatibility.sizes import check_layout
from shoal.spec.config import OptimizerConfig, RunConfig, build_config
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS

OPTIMIZERS = get_args(OptimizerConfig.model_fields["name"].annotation)
OVERRIDES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied")


def check_trained(run: EstimatedRun, layout: Layout, *, ranks: int | None = None) -> None:
    """Raise a `UsageError` if `shoal train` would reject a layout of the run, or it has not this number of ranks."""
    config = _config(run.precision, run.optimizer, run.global_batch, run.sequence_length)
    check_run(config.replace(parallel=layout), run.shape, ranks=ranks)


def check_layout_on_cluster(run: EstimatedRun) -> None:
    """Raise a `UsageError` if no software can split the run so, or its layout does not fill the cluster."""
    if run.software.name == "shoal":
        check_trained(run, run.layout, ranks=run.cluster.size)
    else:
        check_software(run)
        layout, shape, batch, length = run.layout, run.shape, run.global_batch, run.sequence_length
        check_layout(layout, shape, global_batch=batch, sequence_length=length)
        check_schedule(layout, shape, batch, sequence_length=length)


def check_estimable(run: EstimatedRun) -> None:
    """Raise a `UsageError` if no formula exists for the layout's step time."""
    layout = run.layout
    if layout.sync != "all-reduce":
        raise UsageError(
            f"parallel.sync = {layout.sync}: what replicas exchange other than all gradients is not estimated."
            "\n  Leave sync out, or measure."
        )
    if layout.schedule == "terapipe":
        raise UsageError(
            "parallel.schedule = terapipe: what a slice of a sequence takes is not estimated."
            "\n  Choose another schedule, or measure; shoal simulate plays it with times that you give."
        )


def check_software(run: EstimatedRun) -> None:
    """Raise a `UsageError` if a run of other software than shoal has not this number of ranks, or no closed form."""
    layout = run.layout
    if layout.world_size != run.cluster.size:
        size = run.cluster.size
        raise UsageError(f"{layout.equation()}, but the cluster has {size}.\n  Give another dp, tp, pp or cp.")
    if run.global_batch < layout.dp * layout.micro_batch:
        least = layout.dp * layout.micro_batch
        given = f"--global-batch {run.global_batch}"
        raise UsageError(f"{given}: less than a micro-batch of each replica.\n  Give at least {least} sequences.")
    check_closed_form(run)


def check_closed_form(run: EstimatedRun) -> None:
    """Raise a `UsageError` if no closed form exists for a run of other software than shoal, on whatever cluster."""
    layout, shape, name = run.layout, run.shape, run.software.name
    checked = {
        "parallel.schedule": (layout.schedule, tuple(SCHEDULES)), "parallel.tp_x": (layout.tp_x, (1,)),
        "parallel.stage_layers": (layout.stage_layers, (None,)),
        "parallel.reshard_after_forward": (layout.reshard_after_forward, (True,)),
        "--optimizer": (run.optimizer, ("adamw", "adam")),
        "--precision": (run.precision, run.software.formats),
        "model.depths": (shape.depths, (None,)),
    }  # fmt: skip
    for what, (value, known) in checked.items():
        if value not in known:
            shown = ", ".join("not given" if each is None else str(each) for each in known)
            raise UsageError(f"{what} = {value}: not estimated for --software {name}; allowed: {shown}")


def check_names(precision: str, optimizer: str) -> None:
    """Raise a `UsageError` that names the closest known precision or optimizer if one is unknown."""
    for option, given, known in (("precision", precision, FORMATS), ("optimizer", optimizer, OPTIMIZERS)):
        if given not in known:
            raise UsageError(f"--{option} {given}: unknown; {did_you_mean(given, known)}")


def check_device(run: EstimatedRun) -> None:
    """Raise a `UsageError` if the cluster's accelerators lack the number format, or its cost is unknown."""
    machine = run.cluster.accelerator
    if run.quantised and run.float8.scales == "block":
        raise UsageError("float8.scales = block: such products are not estimated.\n  Leave it out, or measure.")
    if run.products in machine.peak_flops:
        return
    first: dict[str, str] = {}  # the first precision of each kind of products
    for name in FORMATS:
        first.setdefault(replace(run, precision=name).products, name)
    has = sorted(first.keys() & machine.peak_flops, key=lambda kind: (abs(_bits(kind) - _bits(run.products)), kind))
    raise UsageError(
        f"--precision {run.precision}: the catalog has no {run.products} peak of {machine.name}, but of "
        f"{', '.join(machine.peak_flops)}.\n  Give --precision {' or '.join(first[kind] for kind in has[:3])}."
    )


def _bits(kind: str) -> int:
    return int(kind.lstrip("bfpt"))


@cache
def _config(precision: str, optimizer: str, global_batch: int, sequence_length: int) -> RunConfig:
    """Return a config with the fields that affect an estimate; gradient clipping does not."""
    return build_config({
        "data": {"sequence_length": sequence_length},
        "train": {"precision": precision, "global_batch": global_batch},
        "optimizer": {"name": optimizer, "clip_norm": 0},
    })


def model_section(name: str, shape: ModelShape) -> dict:
    """Return the config section that creates a model, read by this name, without a user's catalog."""
    if name not in tables.own("models"):
        given, known = shape.model_dump(), model_shape(name).model_dump()
        return {"name": name, "vocab": shape.vocab, **{f: given[f] for f in OVERRIDES if given[f] != known[f]}}
    own = f"own-{name}" if name in tables.shipped("models") else name
    return {"name": own, **plain(shape)}
