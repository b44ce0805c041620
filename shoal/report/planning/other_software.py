"""The layout of a run as arguments or config of the software that trains it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from math import gcd
from typing import Any

import tomli_w

from shoal.pipeline.from_layout import virtual_stages
from shoal.planning.run import EstimatedRun
from shoal.spec.catalog.software import shorten_ends
from shoal.spec.layout import Layout
from shoal.spec.schedules import PAIRED

MEGATRON = ("megatron-2019", "megatron-2021", "megatron-2022", "megatron-core", "megatron-2026", "zero-bubble")

MEGATRON_FORMATS = {
    "bf16": "--bf16", "fp16": "--fp16", "fp8": "--bf16 --fp8-format hybrid",
    "mxfp8": "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8", "nvfp4": "--bf16 --fp4-format e2m1 --fp4-recipe nvfp4",
}  # fmt: skip

TORCHTITAN_CONVERTERS = {"fp8": "quantize.linear.float8", "mxfp8": "quantize.linear.mx"}

PENDING_BACKWARDS = {"zb-h1": 1, "zb-h2": 2}
"""Backwards that wait in Zero Bubble's schedules, per stage."""


def software_lines(run: EstimatedRun, what: str = "The recommended") -> Iterator[str]:
    """Yield a heading and the software's own config, of the part that a layout determines; else the layout.

    Args:
        what: what the layout is, which begins the heading.
    """
    name, lacking = run.software.name, list(_lacking(run))
    if lacking:
        yield f"{what}, in shoal's words; {name} has no {' and no '.join(lacking)}:"
        yield words(run.layout)
    elif name in MEGATRON:
        source = "sail-sg/zero-bubble" if name == "zero-bubble" else "NVIDIA/Megatron-LM"
        yield f"{what}, as arguments of {name} ({source}, arguments.py):"
        yield from megatron_arguments(run)
    elif name == "torchtitan":
        yield f"{what}, as TOML for torchtitan (pytorch/torchtitan, job_config.py):"
        yield from tomli_w.dumps(torchtitan_config(run)).splitlines()
    elif name == "nanotron":
        yield f"{what}, as YAML for nanotron (huggingface/nanotron, config.py):"
        yield from _yaml(nanotron_config(run))
    elif name == "composer":
        yield f"{what}, as YAML for llm-foundry (mosaicml/llm-foundry, scripts/train):"
        yield from _yaml(foundry_config(run))
    elif name == "deepspeed":
        yield f"{what}, as JSON for DeepSpeed; tensor parallelism is Megatron-DeepSpeed's:"
        yield from json.dumps(deepspeed_config(run), indent=2).splitlines()
        if run.layout.tp > 1:
            yield f"--tensor-model-parallel-size {run.layout.tp}"
    elif name == "maxtext":
        yield f"{what}, as arguments of MaxText (AI-Hypercomputer/maxtext, base.yml):"
        yield from (f"{key}={value}" for key, value in maxtext_arguments(run).items())
    else:
        yield f"{what}, in shoal's words; {name} has other names:"
        yield words(run.layout)


def words(layout: Layout) -> str:
    """Return a layout as text: the searched fields."""
    more = [f"micro-batch {layout.micro_batch}"]
    if layout.recompute != "none":
        more.append(f"recompute {layout.recompute}")
    if layout.stage_layers:
        runs = [(len(list(equal)), layers) for layers, equal in groupby(layout.stage_layers)]
        each = (f"{count} x {layers}" if count > 1 else f"{layers}" for count, layers in runs)
        more.append(f"stages of {' + '.join(each)} layers")
    if layout.zero == 3 and not layout.reshard_after_forward:
        more.append("parameters kept gathered")
    if layout.ep_overlap is False and layout.ep > 1 and layout.schedule in PAIRED:
        more.append("pairs one after the other")
    return ", ".join([layout.describe(), *more])


def _lacking(run: EstimatedRun) -> Iterator[str]:
    """Yield what of the layout the software does not have."""
    software, layout = run.software, run.layout
    yield from (axis for axis in ("tp", "cp", "ep", "pp") if not software.has(**{axis: getattr(layout, axis)}))
    if layout.zero and layout.zero not in software.zero_stages:
        yield f"ZeRO-{layout.zero}"
    if layout.pp > 1 and layout.schedule not in software.schedules:
        yield layout.schedule
    layers, stages = run.shape.layers, layout.pp * (each := virtual_stages(layout))
    if layout.pp > 1 and not software.splits(layers, stages, each=each):
        yield f"split of {layers} layers into {stages} stages"


def megatron_arguments(run: EstimatedRun) -> Iterator[str]:
    """Yield the arguments of Megatron-LM's ``pretrain_gpt.py`` that a layout determines, or of Zero Bubble's fork."""
    layout, core = run.layout, run.software.family == "megatron-core"
    sizes = {
        "tensor-model-parallel-size": layout.tp, "pipeline-model-parallel-size": layout.pp,
        "micro-batch-size": layout.micro_batch, "global-batch-size": run.global_batch,
        "seq-length": run.sequence_length, "num-layers": run.shape.layers,
    }  # fmt: skip
    if core:
        sizes |= {"context-parallel-size": layout.cp, "expert-model-parallel-size": layout.ep}
        if run.shape.experts:
            sizes["expert-tensor-parallel-size"] = layout.expert_tensor
    yield from (f"--{name} {size}" for name, size in sizes.items())
    yield MEGATRON_FORMATS[run.precision]
    yield from _pipeline_arguments(run)
    if run.software.graphs:
        yield "--cuda-graph-impl local --cuda-graph-scope full_iteration"
    if run.software.overlap_rows and layout.ep > 1:
        yield "--overlap-moe-expert-parallel-comm --delay-wgrad-compute"
        yield "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
    if layout.sequence_parallel:
        yield "--sequence-parallel"
    if layout.recompute == "full":
        yield "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    elif layout.recompute == "selective":
        yield "--recompute-granularity selective"
    if layout.zero:
        yield "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
        if layout.dp_replicate > 1:
            yield f"--num-distributed-optimizer-instances {layout.dp_replicate}"


def _pipeline_arguments(run: EstimatedRun) -> Iterator[str]:
    layout = run.layout
    if layout.pp == 1:
        return
    each, ends = _layers_of_a_stage(run)
    if layout.schedule == "interleaved-1f1b":
        yield f"--num-layers-per-virtual-pipeline-stage {each}"
    elif layout.schedule in PENDING_BACKWARDS:
        pending = PENDING_BACKWARDS[layout.schedule] * layout.pp
        yield f"--enable-zero-bubble --zero-bubble-max-pending-backward {pending}"
    if ends and run.software.name == "zero-bubble":
        yield "--allow-padding-num-layers"
    elif ends and (run.shape.layers + 2) % (layout.pp * virtual_stages(layout)):
        first, last = shorten_ends(run.shape.layers, layout.pp)
        yield f"--decoder-first-pipeline-num-layers {first} --decoder-last-pipeline-num-layers {last}"
    elif ends:
        yield "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"


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
        each, ends = _layers_of_a_stage(run)
        parallel["pipeline_parallel_layers_per_stage"] = each
        for end in ("first", "last"):
            parallel[f"pipeline_parallel_{end}_stage_less_layers"] = int(ends)
    local = layout.micro_batch * (run.microbatches if layout.pp > 1 else 1)
    converters = TORCHTITAN_CONVERTERS.get(run.precision)
    return ({"model": {"converters": [converters]}} if converters else {}) | {
        "training": {
            "local_batch_size": local, "global_batch_size": run.global_batch, "seq_len": run.sequence_length
        },
        "parallelism": parallel,
        "activation_checkpoint": {"mode": layout.recompute}
        | ({"selective_ac_option": "op"} if layout.recompute == "selective" else {}),
    }  # fmt: skip


def nanotron_config(run: EstimatedRun) -> dict[str, Any]:
    """Return nanotron's config of a layout, as sections."""
    layout = run.layout
    return {
        "parallelism": {
            "dp": layout.dp, "pp": layout.pp, "tp": layout.tp, "expert_parallel_size": layout.ep, "pp_engine": "1f1b",
            "tp_mode": "REDUCE_SCATTER" if layout.sequence_parallel else "ALL_REDUCE",
            "recompute_layer": layout.recompute == "full",
        },
        "tokens": {
            "sequence_length": run.sequence_length, "micro_batch_size": layout.micro_batch,
            "batch_accumulation_per_replica": run.microbatches,
        },
        "optimizer": {"zero_stage": layout.zero, "accumulate_grad_in_fp32": True},
    }  # fmt: skip


def foundry_config(run: EstimatedRun) -> dict[str, Any]:
    """Return llm-foundry's config of a layout, as sections."""
    layout = run.layout
    return {
        "global_train_batch_size": run.global_batch, "device_train_microbatch_size": layout.micro_batch,
        "max_seq_len": run.sequence_length, "precision": f"amp_{run.precision}",
        "fsdp_config": {
            "sharding_strategy": "HYBRID_SHARD" if layout.dp_replicate > 1 else "FULL_SHARD",
            "activation_checkpointing": layout.recompute == "full",
        },
    }  # fmt: skip


def deepspeed_config(run: EstimatedRun) -> dict[str, Any]:
    """Return DeepSpeed's config of a layout."""
    layout = run.layout
    zero: dict[str, int | bool] = {"stage": layout.zero, "overlap_comm": True}
    if layout.zero == 3 and layout.dp_replicate > 1:
        zero["mics_shard_size"] = layout.shards
    return {
        "train_batch_size": run.global_batch, "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": run.microbatches, "zero_optimization": zero,
        run.precision: {"enabled": True},
    }  # fmt: skip


def maxtext_arguments(run: EstimatedRun) -> dict[str, Any]:
    """Return MaxText's arguments of a layout: replicas are spread over slices (`dcn`), all else inside them (`ici`).

    MaxText counts the ranks of experts on an axis of their own, here they are ranks of other axes: of these as many
    remain as are no ranks of experts.
    """
    layout, slices = run.layout, run.cluster.nodes if run.cluster.torus else 1
    replicas, experts, axes = min(slices, layout.dp_replicate), layout.ep, dict[str, int]()
    inside = {"fsdp": layout.dp_shard * replicas // slices, "context": layout.cp, "tensor": layout.tp}
    for axis, ranks in inside.items():
        shared = gcd(ranks, experts)
        experts, axes[f"ici_{axis}_parallelism"] = experts // shared, ranks // shared
    quantised = {"quantization": run.precision} if run.quantised else {}
    return {
        "per_device_batch_size": layout.micro_batch / (layout.tp * layout.cp),
        "gradient_accumulation_steps": run.microbatches, "max_target_length": run.sequence_length,
        "dcn_data_parallelism": replicas, "dcn_fsdp_parallelism": slices // replicas,
        "ici_data_parallelism": layout.dp_replicate // replicas, **axes, "ici_expert_parallelism": layout.ep,
        **quantised,
        "remat_policy": {"selective": "minimal"}.get(layout.recompute, layout.recompute),
    }  # fmt: skip


def _yaml(config: dict[str, Any], indent: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _yaml(value, indent + "  ")
        else:
            yield f"{indent}{key}: {value if isinstance(value, str) else json.dumps(value)}"


def _layers_of_a_stage(run: EstimatedRun) -> tuple[int, bool]:
    """Return the layers of each stage, and whether they count the embedding and the head as a layer each."""
    stages, layers = run.layout.pp * virtual_stages(run.layout), run.shape.layers
    ends = layers % stages > 0
    return (layers + 2 * ends) // stages, ends
