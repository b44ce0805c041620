"""Which number formats go with which layouts and update rules; what does not is refused before anything is built."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from shoal.base.errors import UsageError
from shoal.spec.catalog import ModelShape
from shoal.spec.config import Float8Config
from shoal.spec.number_formats import FORMATS, FP32, MX_BLOCK, Formats
from shoal.spec.optimizers import ELEMENTWISE

if TYPE_CHECKING:
    from shoal.spec.config import RunConfig

SEVERAL_UPDATES = ("pipedream", "pipedream-2bw")


def check_precision(config: RunConfig, shape: ModelShape) -> None:
    """Refuse what a precision cannot be combined with.

    Args:
        shape: the model of ``config``.

    Raises:
        UsageError: naming the fields, why, and what would do.
    """
    formats, layout, optimizer = FORMATS[config.train.precision], config.parallel, config.optimizer.name
    field = f"train.precision = '{config.train.precision}'"
    _check_settings(config, formats)
    if formats.products != "compute":
        _check_float8(config, shape, field)
    if formats.scaled:
        _need(layout.schedule not in SEVERAL_UPDATES, f"{field} with parallel.schedule = '{layout.schedule}'",
              "its stages update by themselves, and no rank knows in time whether another's gradients overflowed",
              "Use bf16, which needs no loss scale, or another schedule")
        _need(layout.sync == "all-reduce", f"{field} with parallel.sync = '{layout.sync}'",
              "each replica would find a loss scale of its own, and skip other steps than the rest",
              "Use bf16, which needs no loss scale, or parallel.sync all-reduce")
    if formats.rounds:
        known = (*ELEMENTWISE, *(("adam8bit",) if formats.state == FP32 else ()))  # whose states have formats of theirs
        _need(optimizer in known, f"{field} with optimizer.name = '{optimizer}'",
              "an update is made in float32 and rounded, some elements at a time, and this rule needs more than those",
              f"Use one of {', '.join(known)}, or bf16 or bf16-sums")
    if formats.widened:
        _need(layout.sync == "all-reduce", f"{field} with parallel.sync = '{layout.sync}'",
              "what its replicas exchange would be rounded to 8 digits each time", "Use bf16")


def _check_settings(config: RunConfig, formats: Formats) -> None:
    """No setting is given that the precision does not read."""
    float8, precision = config.float8, config.train.precision
    read = {"loss_scale": formats.scaled, "float8": formats.products != "compute"}
    for section, is_read in read.items():
        given = getattr(config, section)
        _need(is_read or given == type(given)(), f"section {section} with train.precision = '{precision}'",
              "it reads nothing of it", f"Leave the section out, or use {'fp16' if section == 'loss_scale' else 'fp8'}")
    if formats.products == "mxfp8":
        plain = Float8Config(gradient=float8.gradient, keep=float8.keep)
        _need(float8 == plain, f"section float8 with train.precision = '{precision}'",
              "blocks of 32 and their scales are the format's own",
              "Set float8.gradient and float8.keep alone, or use fp8")
    default = Float8Config()
    for name, needs, value in (("block", "scales", "block"), ("history", "amax", "delayed"),
                               ("margin", "amax", "delayed")):
        _need(getattr(float8, name) == getattr(default, name) or getattr(float8, needs) == value,
              f"float8.{name} = {getattr(float8, name)} with float8.{needs} = '{getattr(float8, needs)}'",
              "it is not read there", f"Leave it out, or set float8.{needs} = '{value}'")
    _need(float8.amax == "current" or float8.scales == "tensor",
          f"float8.amax = 'delayed' with float8.scales = '{float8.scales}'",
          "a history is kept of whole tensors", "Use float8.scales 'tensor', or float8.amax 'current'")


def _check_float8(config: RunConfig, shape: ModelShape, field: str) -> None:
    layout, float8 = config.parallel, config.float8
    _need(not config.train.compile, f"{field} with train.compile = true",
          "the compiler does not see products that choose their scales as they go", "Leave train.compile out")
    _need(layout.schedule != "terapipe", f"{field} with parallel.schedule = 'terapipe'",
          "each slice of a sequence would have scales of its own", "Use another schedule")
    _need(shape.experts is None, f"{field} with a model of experts",
          "products of runs of rows, with a matrix each, have no 8-bit form here", "Use bf16")
    _need(shape.depths is None, f"{field} with model.depths",
          "what scales are of would be another set of tokens in each layer", "Use bf16")
    _need(layout.cp == 1, f"{field} with parallel.cp = {layout.cp}",
          "the parts of a sequence would have scales of their own", "Use tp or dp instead")
    _need(float8.amax == "current" or layout.sync == "all-reduce",
          f"float8.amax = 'delayed' with parallel.sync = '{layout.sync}'",
          "each replica would have a history of its own", "Use float8.amax 'current'")
    _need(shape.kv_heads % layout.tp == 0, f"{field} with parallel.tp = {layout.tp} and kv_heads = {shape.kv_heads}",
          "ranks that share a key/value head hold terms of its gradient, which do not round as their sum does",
          f"Use a tp that divides {shape.kv_heads}")
    _check_kept(float8.keep, shape)
    mx = FORMATS[config.train.precision].products == "mxfp8"
    if layout.tp > 1 and (mx or float8.scales == "block"):
        block = MX_BLOCK if mx else float8.block
        sizes = {"heads x head_dim": shape.heads * shape.head_dim, "kv_heads x head_dim": shape.kv_heads *
                 shape.head_dim, "ffn": shape.ffn}
        for name, size in sizes.items():
            _need(size % (layout.tp * block) == 0, f"{field} with parallel.tp = {layout.tp} and {name} = {size}",
                  f"a rank's {size // layout.tp} cut a block of {block}, whose scale one device takes from all of it",
                  f"Use a model in which {name} is a multiple of tp x {block} = {layout.tp * block}, or another tp")


def _check_kept(patterns: tuple[str, ...], shape: ModelShape) -> None:
    if not patterns:
        return
    from shoal.engine.precision.recipe import float8_layers  # which needs torch

    names = float8_layers(shape, ())
    for pattern in patterns:
        _need(any(fnmatchcase(name, pattern) for name in names), f"float8.keep: '{pattern}'",
              "it fits no linear layer of the model's blocks",
              f"These are called {', '.join(name for name in names if '.0.' in name)}, ..; * stands for anything")


def _need(there: bool, what: str, why: str, mend: str) -> None:
    if not there:
        raise UsageError(f"{what}: {why}.\n  {mend}.")
