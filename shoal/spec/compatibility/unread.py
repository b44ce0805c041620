"""Reject settings that have no effect."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from shoal.base.errors import UsageError
from shoal.spec import optimizers, sync_methods
from shoal.spec.compatibility.features import written
from shoal.spec.config import DataConfig, Float8Config, RunConfig
from shoal.spec.number_formats import BLOCKS, FORMATS


def check_unread(config: RunConfig) -> None:
    """Reject a setting that the chosen optimizer, schedule, precision, sync method or sampler does not read.

    Raises:
        UsageError: naming the setting, and the choices that read it.
    """
    _check_optimizer(config)
    _check_precision(config)
    _check_float8(config.float8)
    _check_relaxed(config)
    overlap, sampler = config.data.overlap, config.data.sampler
    if overlap != _default(DataConfig, "overlap") and sampler != "overlap":
        raise UsageError(
            f"data.overlap = {overlap:g} with data.sampler = '{sampler}': only the sampler 'overlap' reads it."
            "\n  Leave data.overlap out."
        )


def _default(section: type[BaseModel], name: str) -> Any:
    return section.model_fields[name].default


def _check_optimizer(config: RunConfig) -> None:
    optimizer = config.optimizer
    for chooser, readers in (("name", optimizers.READ_BY), ("schedule", optimizers.SCHEDULED_BY)):
        chosen = getattr(optimizer, chooser)
        for setting, choices in readers.items():
            value = getattr(optimizer, setting)
            if chosen not in choices and value != _default(type(optimizer), setting):
                raise UsageError(
                    f"optimizer.{setting} = {value} with optimizer.{chooser} = '{chosen}', which does not read it."
                    f"\n  Leave it out, or use optimizer.{chooser} {' or '.join(choices)}."
                )
    if optimizer.from_weights and config.model.weights is None:
        raise UsageError("optimizer.from_weights without model.weights: there is no folder to read moments from."
                         "\n  Leave it out, or name the folder of a model.")


def _check_precision(config: RunConfig) -> None:
    precision = config.train.precision
    formats = FORMATS[precision]
    for section, read, instead in (
        ("loss_scale", formats.scaled, "fp16"), ("float8", formats.products != "compute", "fp8")
    ):
        given = getattr(config, section)
        if not read and given != type(given)():
            raise UsageError(
                f"section {section} with train.precision = '{precision}': this precision ignores the section."
                f"\n  Leave the section out, or use {instead}."
            )
    float8 = config.float8
    settings = {"mxfp8": ("gradient", "keep"), "nvfp4": ("keep",)}.get(formats.products)
    if settings and float8 != Float8Config(**{name: getattr(float8, name) for name in settings}):
        raise UsageError(
            f"section float8 with train.precision = '{precision}': the format fixes blocks of "
            f"{BLOCKS[formats.products]} and their scales."
            f"\n  Set only {' and '.join(f'float8.{name}' for name in settings)}, or use fp8."
        )


def _check_float8(float8: Float8Config) -> None:
    for name, needs, value in (
        ("block", "scales", "block"), ("history", "amax", "delayed"), ("margin", "amax", "delayed")
    ):
        given = getattr(float8, name)
        if given != _default(Float8Config, name) and getattr(float8, needs) != value:
            raise UsageError(
                f"float8.{name} = {given} with float8.{needs} = '{getattr(float8, needs)}', which does not read it."
                f"\n  Leave it out, or set float8.{needs} = '{value}'."
            )
    if float8.amax != "current" and float8.scales != "tensor":
        raise UsageError(
            f"float8.amax = 'delayed' with float8.scales = '{float8.scales}': the history has one value per tensor."
            "\n  Use float8.scales 'tensor', or float8.amax 'current'."
        )


def _check_relaxed(config: RunConfig) -> None:
    sync, relaxed = config.parallel.sync, config.relaxed
    for name, field in type(relaxed).model_fields.items():
        value, readers = getattr(relaxed, name), sync_methods.READ_BY[name]
        if name == "block" and not relaxed.outer_int8:
            readers = tuple(reader for reader in readers if reader not in sync_methods.LOCAL)
        if value != field.default and sync not in readers:
            raise UsageError(
                f"relaxed.{name} = {written(value)} with parallel.sync = '{sync}': only {', '.join(readers)} "
                f"read it.\n  Leave relaxed.{name} out."
            )
