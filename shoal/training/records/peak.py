"""Peak rate of a run's devices, for its MFU."""

from __future__ import annotations

import torch

from shoal.engine.collectives.ops import all_reduce, to_host
from shoal.engine.device import peak_flops
from shoal.training.step.engine import Engine


def sum_peak_flops(engine: Engine, local_ranks: int) -> float | None:
    """Return the summed peak FLOP/s of all ranks; None if any rank's is unknown. Collective.

    One rank of each machine answers for all of them, as a measurement takes as long as some steps of a small model.

    Args:
        local_ranks: number of ranks on each machine.
    """
    float8, compute, mesh = engine.float8, engine.policy.compute, engine.mesh
    kind = compute
    if float8 is not None and float8.native(compute, mesh.device):
        kind = torch.float4_e2m1fn_x2 if float8.recipe.rotates else torch.float8_e4m3fn
    total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    if mesh.rank % local_ranks == 0:
        own = peak_flops(kind, mesh.device, local_ranks)
        total += torch.tensor([local_ranks * (own or 0.0), float(own is None)], device=mesh.device)
    rate, unknown = to_host(all_reduce(total, mesh.group("world")))
    return None if unknown else rate
