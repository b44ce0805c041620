"""What of a run's model, layout, number formats and update rule does not go together, besides what `Layout.check` and
`shoal.spec.compatibility.precision_rules` refuse; and settings that nothing reads. Without torch: a plan asks the same
of every layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.base.errors import UsageError
from shoal.pipeline.schedules import ASYNCHRONOUS
from shoal.spec.catalog import ModelShape
from shoal.spec.compatibility.precision_rules import check_precision
from shoal.spec.config import OptimizerConfig
from shoal.spec.number_formats import FORMATS
from shoal.spec.optimizers import READ_BY, SCHEDULED_BY

if TYPE_CHECKING:
    from shoal.spec.config import RunConfig

PRECISIONS = {"sophia-g": ("fp32", "bf16", "bf16-sums", "fp64"), "sophia-h": ("fp32", "fp64")}
"""By rule, those in which its estimate means something."""


def check_rules(config: RunConfig, shape: ModelShape) -> None:
    """All of them.

    Args:
        config: or what has its sections parallel, train, optimizer, loss_scale and float8, which are all that is read.
        shape: the model of ``config``.

    Raises:
        UsageError: naming the fields, why, and what would do.
    """
    check_precision(config, shape)
    check_settings(config.optimizer)
    check_products(config)
    check_curvature(config)
    check_experts(config, shape)
    check_depths(config, shape)


def check_settings(optimizer: OptimizerConfig) -> None:
    """Refuse settings that the update rule or the learning-rate schedule does not read.

    Raises:
        UsageError: naming the setting, and who reads it.
    """
    default = OptimizerConfig()
    for chooser, readers in (("name", READ_BY), ("schedule", SCHEDULED_BY)):
        chosen = getattr(optimizer, chooser)
        for setting, those in readers.items():
            value = getattr(optimizer, setting)
            if chosen not in those and value != getattr(default, setting):
                raise UsageError(
                    f"optimizer.{setting} = {value} with optimizer.{chooser} = '{chosen}', which does not read it."
                    f"\n  Leave it out, or use optimizer.{chooser} {' or '.join(those)}."
                )


def check_curvature(config: RunConfig) -> None:
    """Refuse what no estimate can be made of.

    Raises:
        UsageError: naming the field, why, and what would do.
    """
    rule, layout = config.optimizer.name, config.parallel
    if rule not in PRECISIONS:
        return
    what = f"optimizer.name = '{rule}'"
    if layout.sync != "all-reduce":
        raise UsageError(
            f"{what} with parallel.sync = '{layout.sync}': its estimates are of all replicas together."
            "\n  Use parallel.sync all-reduce, or another optimizer."
        )
    if layout.schedule in ASYNCHRONOUS:
        raise UsageError(
            f"{what} with parallel.schedule = '{layout.schedule}': an estimate is of one version of all weights, and "
            "each stage would have several in a step.\n  Use another schedule, or another optimizer."
        )
    if config.train.precision not in PRECISIONS[rule]:
        raise UsageError(
            f"{what} with train.precision = '{config.train.precision}': "
            + ("differences of gradients would be their rounding." if rule == "sophia-h" else
               "its squares of gradients would leave the number format's range.")
            + f"\n  Use train.precision {' or '.join(PRECISIONS[rule])}, or optimizer.name "
            + ("sophia-g." if rule == "sophia-h" else "adamw.")
        )


def check_experts(config: RunConfig, shape: ModelShape) -> None:
    """Refuse what does not go with experts.

    Raises:
        UsageError: naming the field, why, and what would do.
    """
    if shape.experts is None:
        return
    if config.train.compile:
        raise UsageError(
            "train.compile = true with experts: how many rows each gets is known only when it runs, and every number "
            "would be compiled anew.\n  Leave compile out."
        )
    if config.optimizer.name in PRECISIONS:
        raise UsageError(
            f"optimizer.name = '{config.optimizer.name}' with experts: its estimates are of the loss of the tokens "
            "alone, and moved weights would choose other experts.\n  Use another optimizer."
        )


def check_depths(config: RunConfig, shape: ModelShape) -> None:
    """Refuse what does not go with layers that only some tokens pass through.

    Raises:
        UsageError: naming the field, why, and what would do.
    """
    if shape.depths is None:
        return
    if config.train.compile:
        raise UsageError(
            "train.compile = true with model.depths: which tokens pass through a layer is known only when it runs, and "
            "its router counts them and adds to backward as it goes.\n  Leave compile out."
        )
    if config.optimizer.name in PRECISIONS:
        raise UsageError(
            f"optimizer.name = '{config.optimizer.name}' with model.depths: its estimates are of the loss of the "
            "tokens alone, and moved weights would choose other tokens.\n  Use another optimizer."
        )


def check_products(config: RunConfig) -> None:
    """Refuse products made part by part, or on a grid of ranks, where they are compiled or in 8 bits.

    Raises:
        UsageError: naming the two fields.
    """
    layout, scaled = config.parallel, FORMATS[config.train.precision].products != "compute"
    for name, value, special, how in (
        ("tp_overlap", "true", layout.tp_overlap is True, "takes products and collectives as they are"),
        ("tp_x", layout.tp_x, layout.tp_x > 1, "takes products and collectives as they are in one dimension"),
    ):
        if special and config.train.compile:
            raise UsageError(
                f"parallel.{name} = {value} with train.compile = true, which {how}.\n  Leave one of them out."
            )
        if special and scaled:
            raise UsageError(
                f"parallel.{name} = {value} with train.precision = '{config.train.precision}', which scales a "
                f"product's input as a whole.\n  Leave {name} out, or use bf16."
            )
