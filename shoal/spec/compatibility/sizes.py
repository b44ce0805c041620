"""Checks of sizes from several sections: blocks of scales, groups of replicas, steps between averages."""

from __future__ import annotations

from fnmatch import fnmatchcase

from shoal.base.errors import UsageError
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig
from shoal.spec.number_formats import FORMATS, MX_BLOCK
from shoal.spec.sync_methods import LOCAL, UNSYNCHRONISED

MOST_UNSYNCHRONISED = 64
"""Maximum number of replicas, each of which uses one bit of a shared counter."""


def float8_layers(shape: ModelShape, keep: tuple[str, ...]) -> list[str]:
    """Return the names of linear layers that multiply in 8 bits: all in the model's blocks, except `keep`.

    Args:
        shape: a model without experts.
        keep: patterns of names.

    >>> from shoal.spec.catalog import model_shape
    >>> float8_layers(model_shape("tiny-gpt"), ("layers.[1-9].*", "*.attention.*"))
    ['layers.0.mlp.up', 'layers.0.mlp.down']
    """
    feed_forward = ("gate", "up", "down") if shape.family == "llama" else ("up", "down")
    parts = [*(f"attention.{name}" for name in ["q", "k", "v", "out"]), *(f"mlp.{name}" for name in feed_forward)]
    names = [f"layers.{layer}.{part}" for layer in range(shape.layers) for part in parts]
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in keep)]


def check_float8_sizes(config: RunConfig, shape: ModelShape) -> None:
    """Reject 8-bit products whose scales a rank cannot compute as a single device would.

    Raises:
        UsageError: naming the sizes that do not fit.
    """
    precision, layout, float8 = config.train.precision, config.parallel, config.float8
    products = FORMATS[precision].products
    if products == "compute":
        return
    field = f"train.precision = '{precision}'"
    if shape.kv_heads % layout.tp:
        raise UsageError(
            f"{field} with parallel.tp = {layout.tp} and kv_heads = {shape.kv_heads}: ranks that share a key/value "
            "head hold terms of its gradient, which do not round as their sum does."
            f"\n  Use a tp that divides {shape.kv_heads}."
        )
    names = float8_layers(shape, ())
    for pattern in float8.keep:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(
                f"float8.keep: '{pattern}': it matches no linear layer of the model's blocks.\n  These are "
                f"{', '.join(name for name in names if '.0.' in name)}, ..; * matches anything."
            )
    if layout.tp == 1 or (products != "mxfp8" and float8.scales != "block"):
        return
    block = MX_BLOCK if products == "mxfp8" else float8.block
    head_dim = shape.head_dim
    sizes = {"heads x head_dim": shape.heads * head_dim, "kv_heads x head_dim": shape.kv_heads * head_dim,
             "ffn": shape.ffn}  # fmt: skip
    for name, size in sizes.items():
        if size % (layout.tp * block):
            raise UsageError(
                f"{field} with parallel.tp = {layout.tp} and {name} = {size}: a rank's {size // layout.tp} cut a block "
                f"of {block}, whose scale one device takes from all of it."
                f"\n  Use a model in which {name} is a multiple of tp x {block} = {layout.tp * block}, or another tp."
            )


def check_relaxed_sizes(config: RunConfig) -> None:
    """Reject groups of replicas and averaging intervals that do not fit the run.

    Raises:
        UsageError: naming the sizes and one that fits.
    """
    layout, sync, relaxed = config.parallel, config.parallel.sync, config.relaxed
    if sync in LOCAL:
        every = relaxed.local_steps
        intervals = (
            ("train.validate_every", config.train.validate_every), ("checkpoint.every", config.checkpoint.every)
        )
        for name, steps in intervals:
            if steps % every:
                raise UsageError(
                    f"{name} = {steps} with relaxed.local_steps = {every}: between two averages there is no model that "
                    f"all replicas have.\n  Use a multiple of {every}, or 0 for the end alone."
                )
        log = config.metrics.log_every
        if log % every and every % log:
            raise UsageError(
                f"metrics.log_every = {log} with relaxed.local_steps = {every}: the replicas exchange their losses "
                f"when they average.\n  Use a multiple of {every}."
            )
    if sync in UNSYNCHRONISED and layout.dp > MOST_UNSYNCHRONISED:
        raise UsageError(
            f"parallel.sync = '{sync}' with parallel.dp = {layout.dp}: which of its replicas live is one number of "
            f"{MOST_UNSYNCHRONISED} bits.\n  Use parallel.dp <= {MOST_UNSYNCHRONISED}."
        )
    if sync == "wagma" and relaxed.group % 2 and relaxed.group < layout.dp:
        raise UsageError(
            f"relaxed.group = {relaxed.group}: groups are made of pairs."
            f"\n  Use an even number, or {layout.dp} for all."
        )
