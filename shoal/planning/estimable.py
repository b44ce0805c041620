"""What `shoal train` takes: its own rules, asked of what is planned or estimated; and a model as its config has it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from shoal.base.errors import UsageError
from shoal.base.section import validate
from shoal.pipeline.from_layout import check_schedule
from shoal.planning.run import EstimatedRun
from shoal.spec.catalog import ModelShape, model_names, model_shape, tables
from shoal.spec.compatibility.training_rules import check_rules
from shoal.spec.config import Float8Config, LossScaleConfig, OptimizerConfig, TrainConfig
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS

OVERRIDES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied")
PARTS = ("experts", "depths")


class Sections(NamedTuple):
    """Those of a run's config that `check_rules` reads: to make a whole one takes longer than to estimate."""

    train: TrainConfig
    optimizer: OptimizerConfig
    parallel: Layout = Layout()
    loss_scale: LossScaleConfig = LossScaleConfig()
    float8: Float8Config = Float8Config()


def check_trained(run: EstimatedRun, layout: Layout) -> None:
    """Refuse a layout that would not be trained.

    Args:
        run: of which the layout is not looked at.

    Raises:
        UsageError: naming the field that cannot be, as `shoal train` does.
    """
    sizes = {"global_batch": run.global_batch, "sequence_length": run.sequence_length}
    layout.check(run.shape, **sizes)
    check_schedule(layout, run.shape, run.global_batch, sequence_length=run.sequence_length)
    check_rules(_sections(run.precision, run.optimizer)._replace(parallel=layout), run.shape)


def check_device(run: EstimatedRun) -> None:
    """Refuse number formats that the cluster's accelerators have no products of.

    Raises:
        UsageError: naming the accelerator and what it has.
    """
    machine = run.cluster.accelerator
    if run.products in machine.peak_flops:
        return
    peaks = {name: machine.peak_flops.get(replace(run, precision=name).products, 0.0) for name in FORMATS}
    has = sorted((name for name in peaks if peaks[name]), key=lambda name: -peaks[name])
    raise UsageError(
        f"--precision {run.precision}: the catalog has no {run.products} peak of {machine.name}, but of "
        f"{', '.join(machine.peak_flops)}.\n  Give --precision {' or '.join(has[:3])}."
    )


@cache
def _sections(precision: str, optimizer: str) -> Sections:
    return Sections(
        validate(TrainConfig, {"precision": precision}, where="config", within="train"),
        validate(OptimizerConfig, {"name": optimizer}, where="config", within="optimizer"),
    )


def model_section(name: str, shape: ModelShape, sequence_length: int) -> dict:
    """The section of a config that makes this model, where no catalog but shoal's own is read.

    Args:
        name: in the catalog that was read.

    Raises:
        UsageError: a user's own model has something that no model of shoal's catalog has, and no field overrides.
    """
    if name not in tables.own("models"):
        given, known = shape.model_dump(), model_shape(name).model_dump()
        return {"name": name, "vocab": shape.vocab, **{f: given[f] for f in OVERRIDES if given[f] != known[f]}}
    from shoal.spec.config import ModelConfig

    values = shape.model_dump(exclude_none=True)
    given = {field: values[field] for field in (*OVERRIDES, *PARTS) if field in values}
    for base in model_names():
        if base in tables.own("models") or model_shape(base).family != shape.family:
            continue
        section = {"name": base, **given}
        try:
            made = validate(ModelConfig, section, where="config", within="model")
            made = made.shape(vocab=shape.vocab, sequence_length=sequence_length)
        except UsageError:
            continue
        length = shape.max_sequence if shape.family == "llama" else made.max_sequence  # no tensor of llama's has it
        if made.model_copy(update={"max_sequence": length}) == shape:
            return section
    settled = ("norm_eps", "rope_theta") if shape.family == "llama" else ("norm_eps", "max_sequence")
    given = ", ".join(f"{field} = {getattr(shape, field)}" for field in settled)
    raise UsageError(
        f"--model {name}: `shoal train` takes {' and '.join(settled)} from shoal's own catalog alone, where no such "
        f"model has {given}.\n  It cannot be written as a run; leave --toml out."
    )
