"""Check before a run starts that its model, layout and ranks fit together."""

from __future__ import annotations

import platform
from fnmatch import fnmatchcase

from shoal.base.addresses import to_path
from shoal.base.errors import UsageError, redact
from shoal.base.files import expanded
from shoal.base.terminal import quote
from shoal.engine.checkpoint.hugging_face import HFWeights, read_hf_config
from shoal.engine.collectives.shm.region import host_identity
from shoal.engine.data.tokenizer import build_shape
from shoal.engine.device import pick_device
from shoal.engine.models.initial import on_meta
from shoal.engine.models.transformer import Transformer
from shoal.engine.optim.from_torch import MOMENTS
from shoal.engine.own.check import check_own_model
from shoal.engine.own.definition import OwnShape
from shoal.pipeline.from_layout import check_run
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig, build_config
from shoal.spec.sync_methods import UNSYNCHRONISED
from shoal.training.fault_knobs import FaultKnobs


def check(config: RunConfig, ranks: int | None = None) -> ModelShape:
    """Check a run's config and return its model.

    Args:
        ranks: expected number of ranks; None accepts any.

    Raises:
        UsageError: a setting is wrong; the message names the field.
    """
    check_secrets(config)
    shape = check_own_model(config) if config.model.module else build_shape(config)
    check_run(config, shape, ranks=ranks)
    check_profile(config)
    FaultKnobs.read(config.testing, config.parallel.world_size)
    check_shared_memory(config)
    check_rates(config, shape)
    check_validation(config)
    to_path(config.checkpoint.folder)
    return shape


def check_weights(config: RunConfig) -> None:
    """Check the model folder that a run starts with: its model is the run's, and it has every tensor.

    Raises:
        UsageError: naming the field of the model, or the tensor.
    """
    if config.model.weights is None:
        return
    shape = build_shape(config)
    folder = expanded(config.model.weights, "model.weights")
    stored = build_config({"model": {"name": folder.name, **read_hf_config(folder)}}).model.shape(
        vocab=1, sequence_length=1)
    ours, theirs = (each.model_dump(exclude={"experts", "max_sequence", "mtp_weight"}) for each in (shape, stored))
    theirs["mtp_depth"] = min(ours["mtp_depth"], theirs["mtp_depth"])  # fewer modules may be trained than are stored
    for field in (field for field in ours if ours[field] != theirs[field]):
        raise UsageError(f"model.{field} = {ours[field]!r}, but the model of model.weights = '{folder}' has "
                         f"{theirs[field]!r}.\n  `shoal import hf {quote(folder)}` writes the fields of its model.")
    if shape.family == "gpt" and shape.max_sequence > stored.max_sequence:
        raise UsageError(f"data.sequence_length = {config.data.sequence_length}: the model of model.weights has "
                         f"positions for {stored.max_sequence} tokens.\n  Set at most {stored.max_sequence}.")
    with on_meta():
        model = Transformer(shape)
    weights, parameters = HFWeights(folder, shape), {n: tuple(each.shape) for n, each in model.named_parameters()}
    weights.check(parameters | {name: tuple(each.shape) for name, each in model.named_buffers()})
    if config.optimizer.from_weights:
        if not weights.optimizer:
            raise UsageError(f"optimizer.from_weights: {folder} has no optimizer's state; only checkpoints of torch "
                             "(DCP) have.\n  Leave it out: the optimizer starts without moments.")
        for kind in MOMENTS:
            weights.check(parameters, kind)
        weights.updates(parameters)


def check_secrets(config: RunConfig) -> None:
    """Reject a config that contains a secret from the environment or an address with a password.

    The config is written into the run folder and shown in reports.
    """
    values = config.model_dump(mode="json")
    together = "\n".join(str(value) for fields in values.values() for value in fields.values())
    if redact(together) == together:  # the common case: one pass over the environment
        return
    for section, fields in values.items():
        for name, value in fields.items():
            if (redacted := redact(str(value))) != str(value):
                raise UsageError(
                    f"{section}.{name} = {redacted!r} contains the value of an environment variable whose name marks "
                    "it as secret, or the password of an address; the config is saved in the run folder."
                    "\n  Leave it out: libraries read such variables, and fsspec its own files, themselves."
                )


def check_rates(config: RunConfig, shape: ModelShape) -> None:
    """Reject learning-rate factors whose pattern matches no parameter."""
    if not config.optimizer.lr_factors:
        return
    if isinstance(shape, OwnShape):
        names = [name for name, _ in shape.tensors]
    else:
        with on_meta():
            names = [name for name, _ in Transformer(shape).named_parameters()]
    for pattern in config.optimizer.lr_factors:
        if not any(fnmatchcase(name, pattern) for name in names):
            some = dict.fromkeys(name for name in names if not name.startswith("layers.") or ".0." in name)
            raise UsageError(
                f"optimizer.lr_factors: '{pattern}' matches no parameter of the model.\n"
                f"  Its parameters are {', '.join(some)}; * matches anything."
            )


def check_validation(config: RunConfig) -> None:
    """Reject named texts for validation where nothing computes their loss."""
    if config.data.validation and config.parallel.sync in UNSYNCHRONISED:
        raise UsageError(f"data.validation: the replicas of parallel.sync = '{config.parallel.sync}' do not meet."
                         "\n  Leave it out; evaluate checkpoints by `shoal eval`.")


def check_profile(config: RunConfig) -> None:
    """Reject a profile that records no step."""
    after, steps = config.metrics.profile_after, config.train.steps
    if config.metrics.profile and after >= steps:
        raise UsageError(
            f"metrics.profile_after = {after} leaves nothing to record of train.steps = {steps}."
            f"\n  Use metrics.profile_after <= {steps - 1}, or more steps."
        )


def check_shared_memory(config: RunConfig) -> None:
    """Reject unsynchronised methods on a machine whose ranks cannot share memory."""
    sync, device = config.parallel.sync, config.train.device
    if sync not in UNSYNCHRONISED:
        return
    if pick_device(device).type != "cpu":
        raise UsageError(
            f"parallel.sync = '{sync}' with train.device = '{device}': its ranks share the memory of one host and "
            "compute there.\n  Use train.device cpu."
        )
    if host_identity() is None:
        raise UsageError(
            f"parallel.sync = '{sync}' on {platform.system()} {platform.machine()}: its ranks depend on the order of "
            "stores in memory, which must be that of Linux on x86-64."
            "\n  Use local-sgd, diloco or a compressed all-reduce."
        )
