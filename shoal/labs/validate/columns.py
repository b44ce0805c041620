"""Interpret the columns of a published row: accelerators, networks, kernels, recomputation and data parallelism."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from shoal.planning.cost.flops import hardware_flops
from shoal.planning.run import EstimatedRun
from shoal.spec.catalog import ModelShape, model_shape
from shoal.spec.catalog.accelerators import Accelerator, accelerator
from shoal.spec.catalog.clusters import Node, link, nodes
from shoal.spec.catalog.models import model_names

Row = Mapping[str, str]
SHAPE = ("layers", "hidden")
_ACCELERATORS = (  # word, GB of memory, name in the catalog, node; the first match counts
    ("v100", "16", "v100-sxm2-16gb", "V100"), ("v100", "", "v100-sxm2-32gb", "V100"),
    ("a100", "40", "a100-sxm-40gb", "A100-40GB"), ("a100", "", "a100-sxm-80gb", "A100"),
    ("a800", "", "a100-sxm-80gb", "A100"), ("h800", "", "h800-sxm", "H800"), ("h200", "", "h200-sxm", "H200"),
    ("h100", "96", "h100-sxm-96gb-hbm2e", "H100"), ("h100", "", "h100-sxm", "H100"),
    ("gb200", "", "gb200", "GB200"), ("gb300", "", "gb300", "GB300"),
    ("b200", "", "b200-sxm", "B200"), ("b300", "", "b300-sxm", "B300"), ("mi300", "", "mi300x", "MI300X"),
    ("mi325", "", "mi325x", "MI300X"), ("mi355", "", "mi355x", "MI355X"), ("v5p", "", "tpu-v5p", "v5p"),
    ("v5e", "", "tpu-v5e", "v5e"), ("v6e", "", "tpu-v6e", "v6e"), ("tpu v4", "", "tpu-v4", "v4"),
)  # fmt: skip
_EXPOSED_GATHERS = 14_018_000  # first job of nanotron's benchmark whose times have a backward's gathers in full
VOCABULARY, BERT = 51200, 30592  # GPT-2's, and that of BERT in English; padded, as Megatron-LM does
_NETWORKS = (("efa", "efa"), ("omni", "omni-path"), ("roce", "roce"), ("nics", "roce"))
_PER_NODE = (  # bandwidth between nodes: the product of the numbers, Gb/s
    r"(\d+) ?x ?(\d+) ?Gb", r"(\d+)x? (?:Omni-Path )?(?:links per node \()?(\d+) ?Gb", r"inter (\d+) ?Gb/s per node",
    r"(\d+) ?Gb(?:ps|/s)?\+? ?(?:\w+ )*(?:per|/) ?node",
)  # fmt: skip


def number(row: Row, name: str, *, zero: bool = False) -> float | None:
    """Return a column's number if it is finite and positive (with ``zero`` also 0), else None."""
    try:
        value = float(row.get(name) or "")
    except ValueError:
        return None
    return value if 0 < value < math.inf or (zero and value == 0) else None


def stated(row: Row, name: str) -> float:
    """Return the number of a column that must have one."""
    value = number(row, name)
    assert value is not None, f"{name} is not stated"
    return value


def machine(row: Row) -> tuple[Accelerator, Node] | None:
    """Return the accelerator and its usual node, or None if the catalog has none."""
    text, size = (row.get("gpu") or "").lower(), row.get("gpu_mem_gb") or ""
    for word, memory, name, node in _ACCELERATORS:
        if word in text and (not memory or memory in size or f"{memory}gb" in text):
            return accelerator(name), nodes()[node]
    return None


def per_node(row: Row, node: Node) -> float:
    """Return the accelerators on a fast switch: as published, except for racks, where publications count servers."""
    return float(node.per_node) if node.per_node > 8 else number(row, "gpus_per_node") or node.per_node


def network(row: Row) -> str:
    """Return the kind of network between nodes, one of `NETWORKS`.

    nanotron's jobs print what an all-gather over all nodes attains: in some 225 GB/s on 2 nodes to 44 on 64, in others
    160 to 6. The others are as slow as messages through the hosts' TCP; the line between both is here.
    """
    text = (row.get("interconnect") or "").lower()
    kind = next((kind for word, kind in _NETWORKS if word in text), "infiniband")
    printed = re.search(r"measured in run=[\d.]*/([\d.]+)/", row.get("note") or "")
    nodes = (number(row, "n_gpus") or 1) / (number(row, "gpus_per_node") or 8)
    slow = kind == "efa" and printed and nodes > 1 and float(printed[1]) < 312 / nodes**0.65
    return "tcp" if slow else kind


def slices(row: Row) -> int:
    """Return the number of slices of pods."""
    found = re.match(r"(\d+) slice", row.get("interconnect") or "")
    return int(found[1]) if found else 1


def leaving(row: Row, node: Node, per_node: float) -> float:
    """Return an accelerator's share of the bandwidth out of its node [bytes/s]: as published, else the catalog's."""
    text = row.get("interconnect") or ""
    if found := re.search(r"(\d+) ?GB/s per node", text):
        return float(found[1]) * 1e9 / per_node
    for pattern in _PER_NODE:
        if found := re.search(pattern, text):
            gigabits = 1.0
            for part in found.groups():
                gigabits *= float(part)
            return gigabits / 8 * 1e9 / per_node
    if found := re.search(r"(\d+) ?Gb/s\+? ?(?:\w+ )*per GPU", text):
        return float(found[1]) / 8 * 1e9
    if node.nic is None:
        return link(node.inside).bandwidth
    return link(node.nic).bandwidth * (node.nics or node.per_node) / node.per_node


def vocabulary(row: Row) -> int:
    """Return the vocabulary where none is published: BERT's or GPT-2's, unpadded in vTrain's `src/config.py`."""
    return 50257 if _of_vtrain(row) else BERT if "bert" in (row.get("model") or "") else VOCABULARY


def _of_vtrain(row: Row) -> bool:
    """Whether the row is of vTrain's runs on one node."""
    return "ground_truth_single" in (row.get("source_loc") or "")


def attention(row: Row, default: str) -> str:
    """Return the kernel, one of `shoal.planning.cost.batched_runs.ATTENTION`."""
    text = (row.get("attn_kernel") or "").lower()
    if "torch" in text or "v1" in text:
        return "unfused" if "torch" in text else "flash-1"
    if "flash" in text:  # a stated version, or the software's own
        stated_versions = [name for name in ("flash-3", "flash-2") if name[-1] in text]
        return stated_versions[0] if stated_versions else default if default.startswith("flash") else "flash-2"
    return "fused-softmax" if "fused" in text else default


def recomputed(row: Row) -> str | None:
    """Return one of `shoal.planning.cost.batched_runs.RECOMPUTE`, "" if not stated, or None if none of them."""
    text = (row.get("recompute") or "").lower()
    if _of_vtrain(row):  # whatever its configurations state: docs/validate.md
        return "none"
    if not text:
        return ""
    if text.startswith(("none", "0 of")):
        return "none"
    if "op-level" in text:  # torchtitan's, of torch.utils.checkpoint's selective policies
        return "operators"
    if text.startswith("minimal"):  # MaxText's: products with weights are kept, and nothing else
        return "products"
    if text.startswith("qkv_proj"):  # MaxText's: queries, keys and values are kept, or offloaded
        return "full"
    return next((mode for mode in ("selective", "full") if text.startswith(mode)), None)


def splits_between(row: Row, tp: float, software: str) -> bool:
    """Whether tensor-parallel ranks split the activations between their regions.

    Megatron demands it of experts; MaxText's rules put `activation_embed` on the axis of tensor parallelism.
    """
    return row.get("sp") == "y" or (tp > 1 and (software == "maxtext" or number(row, "n_experts") is not None))


def schedule(row: Row, virtual: int) -> str:
    """Return shoal's name of the schedule."""
    text = (row.get("schedule") or "").lower()
    named = next((name for word, name in (("zb-1p", "zb-h1"), ("zb-2p", "zb-h2")) if word in text), "1f1b")
    return "interleaved-1f1b" if virtual > 1 and named == "1f1b" else named


def zero_stage(row: Row) -> int | None:
    """Return the ZeRO stage, by number or by the name of its implementation; None if neither is stated."""
    stage, text = number(row, "zero_stage", zero=True), row.get("dp_mode") or ""
    if stage is not None:
        return int(stage)
    return 3 if "FSDP" in text else 1 if "opt" in text or "ZeRO" in text else 0 if text else None


def shards(row: Row, stage: int, dp: float) -> float:
    """Return the ranks that ZeRO shards over; PyTorch's hybrid sharding uses the ranks of a node by default."""
    text = row.get("dp_mode") or ""
    found = re.search(r"shard group=(\d+)", text)
    group = float(found[1]) if found else (number(row, "gpus_per_node") or 8) if "HSDP" in text else dp
    return min(dp, group) if stage else 1.0


def precision(row: Row, half: str) -> str:
    """Return the number formats: ``half`` also for torch's row-wise 8 bits, which are no faster than 16."""
    text = (row.get("precision") or "").lower()
    if "rowwise" in text:
        return half
    return "nvfp4" if "fp4" in text else "fp8" if "fp8" in text or "float8" in text else half


def gated(row: Row) -> bool:
    """Whether the feed-forward block is gated (two input matrices)."""
    kind = row.get("mlp_type") or ""
    return "glu" in kind if kind else not re.search("gpt|bert|opt|bloom", row.get("model") or "")


def tied(row: Row) -> bool:
    """Whether head and embedding are tied: by the note, else by the kind of model."""
    if found := re.search(r"tie_emb=(\w+)", row.get("note") or ""):
        return found[1] == "True"
    if "tie_emb=" in (row.get("note") or ""):
        return (number(row, "params_b") or 0) < 5
    return not gated(row)


def hides_gathers(row: Row) -> bool:
    """Whether a backward's gathers are hidden: in nanotron's first jobs without a pipeline, by their times."""
    job = re.search(r" job (\d+)$", row.get("source_loc") or "")
    return job is not None and int(job[1]) < _EXPOSED_GATHERS and (number(row, "pp") or 1) == 1


def gradient_bytes(row: Row, default: int) -> int:
    """Return the bytes of a gradient.

    vTrain's `src/predictor.py` reduces 2 for each parameter of its fp16 models. Megatron-Bridge's recipes of published
    runs set `grad_reduce_in_fp32 = False` (`scripts/performance/configs`), and NeMo's in 8 bits
    `grad_sync_dtype: bf16` (NeMo-Framework-Launcher, `conf/training/gpt3/175b_fp8_performance.yaml`).
    """
    framework = row.get("framework") or ""
    nemo = framework.startswith("NeMo") and precision(row, "") == "fp8"
    narrow = "vTrain" in (row.get("source_loc") or "") or "Megatron-Bridge" in framework
    return 2 if narrow or nemo else default


def blocking(row: Row) -> bool:
    """Whether the host waited for each kernel: BigScience's runs on more than 160 A100s, which hung otherwise."""
    return "bigscience" in (row.get("source_loc") or "") and (number(row, "n_gpus") or 1) > 160


def catalog_model(row: Row) -> ModelShape | None:
    """Return the catalog's model that a row names, if its columns do not describe it: some have no shape, and none has
    the widths of latents, or shared experts.

    Parentheses, as of a dropped token, and a number of layers are no part of the name.
    """
    name = re.sub(r"[^a-z0-9.]+", "-", (row.get("model") or "").lower().partition("(")[0]).strip("-")
    name = re.sub(r"-\d+layers$", "", name)
    model, layers, hidden = (model_shape(name) if name in model_names() else None), *(number(row, n) for n in SHAPE)
    if model is None or (hidden and hidden != model.hidden):
        return None
    more = model.latent or (model.experts and model.experts.shared)
    return model if more or not layers else None


def framework(row: Row) -> str:
    """Return the name of the software.

    Megatron-Bridge's recipes of experts in MXFP8 changed in release 26.06, and have a name of their own since: see
    megatron-2026 in the catalog.
    """
    name = row.get("framework") or ""
    if _of_vtrain(row):
        return "vTrain"
    release = re.search(r"Megatron-Bridge\) (\d+\.\d+)", name)
    fused = release and release[1] >= "26.06" and "MXFP8" in (row.get("precision") or "") and row.get("arch") == "moe"
    return "Megatron-Bridge with fused experts" if fused else name


def sends_rows_once(row: Row, default: bool) -> bool:
    """Whether rows are copied to experts inside nodes: Megatron-Bridge's recipes have `moe_flex_dispatcher_backend`."""
    return default or "Megatron-Bridge" in (row.get("framework") or "")


def fuses_loss(row: Row, default: bool) -> bool:
    """Return whether the loss writes the gradient of the logits in their place.

    Megatron-Bridge's recipes of published runs set `cross_entropy_fusion_impl = "te"` (`scripts/performance/utils/
    overrides.py`), whose kernels do (Transformer Engine, `pytorch/triton/cross_entropy.py`).
    """
    return default or "Megatron-Bridge" in (row.get("framework") or "")


def offloaded_layers(row: Row) -> float:
    """Return the layers of a rank whose stored tensors wait in the host's memory: as stated, or by the stated part."""
    part = re.search(r"activation offload ratio alpha=([\d.]+)", row.get("note") or "")
    of_rank = (number(row, "layers") or 0) / (number(row, "pp") or 1)
    return float(part[1]) * of_rank if part else number(row, "offloaded_layers") or 0


def expert_tensor(row: Row) -> int | None:
    """Return the ranks that split each expert: as published, 1 in Megatron-Bridge's recipes, else None: like others."""
    published = number(row, "etp")
    return int(published) if published else 1 if sends_rows_once(row, False) else None


def memory(row: Row) -> tuple[float | None, str]:
    """Return bytes and their kind: allocated, reserved, first (reserved on the first rank) or process."""
    size, text = number(row, "mem_gb"), row.get("mem_kind") or ""
    if size is None or not text:
        return None, ""
    unit = 2**30 if any(word in text for word in ("GiB", "MiB", "reserved", "smi")) else 1e9
    kinds = {"rank0": "first", "smi": "process", "alloc": "allocated"}
    return size * unit, next((kind for word, kind in kinds.items() if word in text), "reserved")


def has_old_pipeline(row: Row) -> bool:
    """Whether the row is a pipeline from before nanotron's fix, by its note."""
    return "after_pp_fix=False" in (row.get("note") or "") and (number(row, "pp") or 1) > 1


def timed(row: Row) -> bool:
    """Whether a row's time counts: not of quality M, nor of a broken pipeline."""
    return row.get("quality") != "M" and not has_old_pipeline(row)


def seconds(row: Row, tokens: float, gpus: float) -> float | None:
    """Return the seconds of a step; None if neither time nor throughput is published."""
    rate = number(row, "tokens_per_s_per_gpu")
    return number(row, "step_time_s") or (tokens / (rate * gpus) if rate else None)


def flop_rate(row: Row, peak: float) -> float | None:
    """Return the published FLOP/s of an accelerator, by its TFLOP/s, else by its utilisation; see `counted_flops`."""
    done, part = number(row, "tflops_per_gpu"), number(row, "mfu_pct") or number(row, "hfu_pct")
    return done * 1e12 if done else part / 100 * peak if part else None


def counted_flops(row: Row, run: EstimatedRun) -> float:
    """Return the FLOPs of a step by the definition of the row's source.

    Model FLOPs with attention in full (PaLM's, Megatron-LM's `num_floating_point_operations`, MaxText's before its pull
    request 1988), except NeMo's calculators, which count the causal half of llama's attention (`flops_formulas.py`:
    6 s/h), and publications that count recomputation.
    """
    shape, s = run.shape, run.sequence_length
    only_hardware = number(row, "hfu_pct") and not number(row, "mfu_pct")
    if only_hardware or "hardware" in (row.get("flops_convention") or "").lower():
        return hardware_flops(shape, s, run.layout.recompute, run.tokens)
    half = 6 * shape.layers * shape.heads * shape.head_dim * s if "NeMo" in (row.get("framework") or "") else 0
    return run.tokens * (shape.flops_per_token(s) - half)
