"""Number formats of a model of one's own: of its parameters and buffers, its batches, and what it computes."""

from __future__ import annotations

from functools import partial
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from shoal.engine.own.samples import OwnBatch
from shoal.engine.precision.policy import Policy


def set_formats(module: nn.Module, policy: Policy, device: torch.device) -> None:
    """Move what is not trained to a device, and give it and normalisations the formats of a policy."""
    for parameter in module.parameters():
        if not parameter.requires_grad:
            dtype = policy.compute if parameter.is_floating_point() else None  # others may be packed numbers
            parameter.data = parameter.data.to(device, dtype)
    wide = torch.promote_types(policy.compute, torch.float32)
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            dtype = torch.promote_types(buffer.dtype, wide) if buffer.is_floating_point() else None
            owner._buffers[name] = buffer.to(device, dtype).contiguous()
        if policy.compute.itemsize < 4 and isinstance(owner, (_NormBase, nn.LayerNorm, nn.GroupNorm)):
            owner.forward = partial(normalise_wide, ref(owner))  # type: ignore[method-assign]


def prepare(module: nn.Module, policy: Policy) -> None:
    """Give a module that no rank holds the formats of a policy, on the CPU."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(policy.compute)
    set_formats(module, policy, torch.device("cpu"))


def widen(batch: OwnBatch, policy: Policy) -> OwnBatch:
    """Return a batch with its floats in the format of sums."""
    wide = torch.promote_types(policy.compute, torch.float32)
    return batch.map(lambda tensor: tensor.to(wide) if tensor.is_floating_point() else tensor)


def autocast(policy: Policy, device: torch.device) -> torch.autocast:
    """Return the context in which operators that need it, such as sums of losses, compute in float32."""
    wide = torch.promote_types(policy.compute, torch.float32)
    return torch.autocast(device.type, policy.compute, enabled=policy.compute != wide)


def normalise_wide(module: ReferenceType[nn.Module], x: Tensor) -> Tensor:
    """Compute a normalisation in float32, the format of its statistics; torch does not mix formats on every device."""
    norm = module()
    assert norm is not None, "its own forward calls this"
    own = dict(norm._parameters)
    norm._parameters.update({name: p if p is None else p.float() for name, p in own.items()})  # type: ignore[misc]
    try:
        return type(norm).forward(norm, x.float()).to(x.dtype)
    finally:
        norm._parameters.update(own)
