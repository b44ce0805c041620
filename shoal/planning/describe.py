"""Build a run from names: a model and a cluster of the catalog, a batch, and a run's config."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

from pydantic import PositiveInt

from shoal.base.errors import UsageError
from shoal.planning.estimable import check_device, check_estimable, check_layout_on_cluster, check_names, check_software
from shoal.planning.estimate import StepEstimate
from shoal.planning.run import EstimatedRun
from shoal.planning.software_estimate import estimate_run
from shoal.spec.catalog import ModelShape, model_shape
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.catalog.clusters import cluster as cluster_of
from shoal.spec.catalog.software import Software, find_software
from shoal.spec.compatibility.sizes import MOST_MICROBATCHES
from shoal.spec.config import RunConfig
from shoal.spec.layout import Layout

DEFAULT_MODEL = "llama-3-8b"
TOKENS_PER_STEP = 4 * 2**20


def estimate(
    layout: Layout, *, model: str | ModelShape | None = None, cluster: str | Cluster = "8xH100",
    config: RunConfig | None = None, sequence_length: PositiveInt | None = None, global_batch: int | str | None = None,
    precision: str | None = None, optimizer: str | None = None, fill: bool | None = None,
    software: str | Software = "shoal",
) -> StepEstimate:  # fmt: skip
    """Estimate the time of a training step with its breakdown, and the memory of every pipeline rank.

    Runs nothing and does not import torch.

    Args:
        layout: parallel layout.
        model: catalog name, or a shape (default: the config's model, else llama-3-8b).
        cluster: cluster name, such as 8xH100, 64x8xH100-IB400 or v5p-4096, or a description of one.
        config: a run's config, the source of arguments that are not given.
        sequence_length: tokens per sequence (default: the config's, else the model's maximum training length).
        global_batch: sequences per step, or tokens as "512K" or "4M" (default: the config's, else about 4M,
            divided by the devices as far as possible).
        precision: precision, see ``train.precision`` (default: the config's, else bf16).
        optimizer: the update rule (default: the config's, else adamw).
        fill: fill the cluster with replicas (default: if the layout does not set dp).
        software: the software that trains, by its name in the catalog (``shoal/spec/catalog/software.toml``), or a
            description of one.

    Returns:
        The estimate: ``step_seconds``, ``breakdown`` in seconds, ``mfu``, ``memory`` in bytes, ``fits``, ...

    Raises:
        UsageError: a name is not in the catalog, or the run cannot be trained or estimated.

    >>> import shoal
    >>> found = shoal.estimate(shoal.Layout(tp=8, pp=4), model="llama-3-70b", cluster="64x8xH100")
    >>> found.run.layout.dp, found.fits
    (16, False)
    >>> found = shoal.estimate(shoal.Layout(tp=8, pp=4, zero=1), model="llama-3-70b", cluster="64x8xH100")
    >>> 0.3 < found.mfu < 0.6
    True
    """
    run = describe_run(
        layout, model=model, cluster=cluster, config=config, sequence_length=sequence_length,
        global_batch=global_batch, precision=precision, optimizer=optimizer, fill=fill, software=software,
    )  # fmt: skip
    check_estimable(run)
    return estimate_run(run)


def describe_run(
    layout: Layout, *, model: str | ModelShape | None = None, cluster: str | Cluster = "8xH100",
    config: RunConfig | None = None, sequence_length: PositiveInt | None = None, global_batch: int | str | None = None,
    precision: str | None = None, optimizer: str | None = None, fill: bool | None = None,
    software: str | Software = "shoal", published: bool = False,
) -> EstimatedRun:  # fmt: skip
    """Build a trainable run from names; see `estimate` for arguments and errors.

    Args:
        published: other software has run it, with whatever layout.
    """
    run = build_run(model, cluster, config, sequence_length, global_batch, precision, optimizer, software)
    s, size, each = run.sequence_length, run.cluster.size, layout.pp * layout.cp * layout.tp
    if fill is None:
        fill = "dp" not in layout.model_fields_set
    filled = size // each if size % each == 0 else layout.dp  # dp of a layout that fills the cluster
    if fill:
        layout = layout.model_copy(update={"dp": filled})
    run = replace(run, layout=layout)
    if global_batch is None and config is None:
        per_pass = math.lcm(layout.dp, filled) * layout.micro_batch  # so that a refusal can name this dp
        passes = min(max(1, round(choose_batch(s, size) / per_pass)), MOST_MICROBATCHES)
        run = replace(run, global_batch=passes * per_pass)
    if layout.offload != "none":
        given = f"parallel.offload = {layout.offload}"
        raise UsageError(f"{given}: host memory is not estimated.\n  Leave it out, or measure.")
    (check_software if published else check_layout_on_cluster)(run)
    return run


def build_run(
    model: str | ModelShape | None, cluster: str | Cluster, config: RunConfig | None, sequence_length: int | None,
    global_batch: int | str | None, precision: str | None, optimizer: str | None, software: str | Software,
) -> EstimatedRun:
    """Build a run without a layout, with a batch of about 4 M tokens by default; see `estimate` for arguments and
    errors."""
    shape = find_shape(model, config)
    s = sequence_length or (config.data.sequence_length if config else shape.max_sequence)
    precision = precision or (config.train.precision if config else "bf16")
    optimizer = optimizer or (config.optimizer.name if config else "adamw")
    check_names(precision, optimizer)
    if global_batch is not None:
        batch = parse_batch(global_batch, s)
    else:
        batch = config.train.global_batch if config else choose_batch(s, 1)
    run = EstimatedRun(
        with_positions(shape, s), Layout(), cluster_of(cluster) if isinstance(cluster, str) else cluster, s, batch,
        precision, optimizer, software=find_software(software) if isinstance(software, str) else software,
        **read_settings(config),
    )
    check_device(run)
    return run


def choose_batch(sequence_length: int, devices: int) -> int:
    """Return the sequences of a step of about 4 M tokens, and up to an eighth away if devices divide them better.

    >>> choose_batch(8192, 512), choose_batch(8192, 100), choose_batch(8192, 7)
    (512, 500, 511)
    """
    usual = max(1, round(TOKENS_PER_STEP / sequence_length))
    near = range(usual - usual // 8, usual + usual // 8 + 1)
    return max(near, key=lambda batch: (math.gcd(batch, devices), -abs(batch - usual)))


def read_settings(config: RunConfig | None) -> dict[str, Any]:
    """Return the fields of an `EstimatedRun` that only a run's config determines."""
    if config is None:
        return {}
    return {
        "attention": "explicit" if config.train.attention == "explicit" else "sdpa",
        "document_mask": config.data.document_mask, "hessian_every": config.optimizer.hessian_every,
        "float8": config.float8,
    }  # fmt: skip


def parse_batch(given: int | str, sequence_length: int) -> int:
    """Return the sequences of a global batch given in sequences, as 1024, or in tokens, as 512K or 4M.

    Raises:
        UsageError: neither, or no multiple of the sequence length.
    """
    text = str(given)
    unit = {"K": 2**10, "M": 2**20}.get(text[-1:].upper(), 0)
    number = text[:-1] if unit else text
    if not re.fullmatch("[0-9]{1,15}", number) or not int(number):
        raise UsageError(f"--global-batch {text}: give sequences, as 1024, or tokens, as 4M")
    if not unit:
        return int(number)
    tokens = int(number) * unit
    if tokens % sequence_length:
        raise UsageError(
            f"--global-batch {text} = {tokens:,} tokens is no multiple of --sequence-length {sequence_length}."
            f"\n  Give sequences, as {max(1, tokens // sequence_length)}."
        )
    return tokens // sequence_length


def with_positions(shape: ModelShape, sequence_length: int) -> ModelShape:
    """Return the model with at least this many positions, if it has learned positions."""
    if shape.family != "gpt":
        return shape
    return shape.model_copy(update={"max_sequence": max(shape.max_sequence, sequence_length)})


def find_shape(model: str | ModelShape | None, config: RunConfig | None) -> ModelShape:
    """Return the named model, else the config's, else the default."""
    if isinstance(model, ModelShape):
        return model
    if model or config is None:
        return model_shape(model or DEFAULT_MODEL)
    if vocab := config.model.vocab:  # also where the run's tokenizer is not
        return config.model.shape(vocab=vocab, sequence_length=config.data.sequence_length)
    from shoal.engine.data.tokenizer import build_shape

    return build_shape(config)
