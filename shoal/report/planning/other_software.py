"""The layout of a run as arguments or config of the software that trains it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tomli_w

from shoal.planning.run import EstimatedRun

MEGATRON = ("megatron-2019", "megatron-2021", "megatron-core", "zero-bubble")


def config_lines(run: EstimatedRun) -> Iterator[str]:
    """Yield the software's own config of a run: Megatron's arguments or torchtitan's TOML; else the layout in words."""
    name = run.software.name
    if name in MEGATRON:
        yield f"The best, as arguments of {name} (NVIDIA/Megatron-LM, arguments.py):"
        yield ""
        yield from megatron_arguments(run)
    elif name == "torchtitan":
        yield "The best, as TOML for torchtitan (pytorch/torchtitan, job_config.py):"
        yield ""
        yield from tomli_w.dumps(torchtitan_config(run)).splitlines()
    else:
        yield f"The best, in shoal's words; {name} has other names: {run.layout.describe()}"


def megatron_arguments(run: EstimatedRun) -> Iterator[str]:
    """Yield the arguments of Megatron-LM's ``pretrain_gpt.py`` that a layout determines."""
    layout, shape = run.layout, run.shape
    sizes = {
        "tensor-model-parallel-size": layout.tp, "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp, "expert-model-parallel-size": layout.ep,
        "micro-batch-size": layout.micro_batch, "global-batch-size": run.global_batch,
        "seq-length": run.sequence_length, "num-layers": shape.layers,
    }  # fmt: skip
    missing = () if run.software.name == "megatron-core" else ("context-parallel-size", "expert-model-parallel-size")
    yield from (f"--{name} {size}" for name, size in sizes.items() if name not in missing)
    if layout.schedule == "interleaved-1f1b" and layout.pp > 1:
        yield f"--num-layers-per-virtual-pipeline-stage {shape.layers // (layout.pp * (layout.virtual_stages or 2))}"
    if layout.sequence_parallel:
        yield "--sequence-parallel"
    if layout.recompute == "full":
        yield "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    elif layout.recompute == "selective":
        yield "--recompute-granularity selective"
    if layout.zero:
        yield "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


def torchtitan_config(run: EstimatedRun) -> dict[str, Any]:
    """Return torchtitan's config of a layout, as tables."""
    layout = run.layout
    parallel: dict[str, Any] = {
        "data_parallel_replicate_degree": layout.dp_replicate, "data_parallel_shard_degree": layout.dp_shard,
        "tensor_parallel_degree": layout.tp, "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp, "expert_parallel_degree": layout.ep,
    }  # fmt: skip
    if layout.pp > 1:
        parallel["pipeline_parallel_schedule"] = "Interleaved1F1B" if layout.schedule.startswith("inter") else "1F1B"
        parallel["pipeline_parallel_microbatch_size"] = layout.micro_batch
    local = layout.micro_batch * (run.microbatches if layout.pp > 1 else 1)
    return {
        "training": {
            "local_batch_size": local, "global_batch_size": run.global_batch, "seq_len": run.sequence_length
        },
        "parallelism": parallel,
        "activation_checkpoint": {"mode": layout.recompute}
        | ({"selective_ac_option": "op"} if layout.recompute == "selective" else {}),
    }  # fmt: skip
