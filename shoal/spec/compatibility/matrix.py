"""Compatibility matrix of all pairs of techniques: supported, or rejected by a row of the table.

Each technique is a small example run. Two examples are combined and checked against the table, so the matrix shows the
answer of `shoal train`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any, NamedTuple

from shoal.spec.compatibility.features import CheckedRun
from shoal.spec.compatibility.table import Conflict, find_conflict
from shoal.spec.config import build_config

Example = Mapping[str, Mapping[str, Any]]

_EXPERTS = {"model": {"experts": {"count": 4, "ffn": 64}}}

TECHNIQUES: Mapping[str, Example] = {
    "data parallelism (DDP)": {"parallel": {"dp": 2}},
    "ZeRO-1": {"parallel": {"dp": 2, "zero": 1}},
    "ZeRO-2": {"parallel": {"dp": 2, "zero": 2}},
    "ZeRO-3 (FSDP)": {"parallel": {"dp": 2, "zero": 3}},
    "hybrid sharding": {"parallel": {"dp": 4, "zero": 3, "zero_shard": 2}},
    "parameters kept after forward": {"parallel": {"dp": 2, "zero": 3, "reshard_after_forward": False}},
    "optimizer offload": {"parallel": {"offload": "optimizer"}},
    "parameter offload": {"parallel": {"dp": 2, "zero": 3, "offload": "parameters"}},
    "tensor parallelism": {"parallel": {"tp": 2}},
    "2D tensor parallelism": {"parallel": {"tp": 4, "tp_x": 2}},
    "sequence parallelism": {"parallel": {"tp": 2, "sequence_parallel": True}},
    "overlapped tensor parallelism": {"parallel": {"tp": 2, "tp_overlap": True}},
    "context parallelism (ring)": {"parallel": {"cp": 2}},
    "context parallelism (Ulysses)": {"parallel": {"cp": 2, "ulysses": 2}},
    "mixture of experts": _EXPERTS,
    "expert parallelism": {"parallel": {"dp": 2, "ep": 2}, **_EXPERTS},
    "overlapped expert parallelism": {
        "parallel": {"dp": 2, "ep": 2, "schedule": "dualpipev", "ep_overlap": True}, **_EXPERTS},
    "mixture of depths": {"model": {"depths": {"capacity": 0.5}}},
    "pipeline (1F1B, interleaved)": {"parallel": {"pp": 2, "schedule": "1f1b"}},
    "zero-bubble pipeline": {"parallel": {"pp": 2, "schedule": "zb-h1"}},
    "token-level pipeline": {"parallel": {"pp": 2, "schedule": "terapipe"}},
    "asynchronous pipeline": {"parallel": {"pp": 2, "schedule": "pipedream"}},
    "compressed gradients": {"parallel": {"dp": 2, "sync": "powersgd"}},
    "local SGD, DiLoCo": {"parallel": {"dp": 2, "sync": "diloco"}},
    "parameter server": {"parallel": {"dp": 2, "sync": "ps-ssp"}},
    "gossip, Hogwild!": {"parallel": {"dp": 2, "sync": "sgp"}},
    "activation recomputation": {"parallel": {"recompute": "full"}},
    "torch.compile": {"train": {"compile": True}},
    "CUDA graphs": {"train": {"compile": True, "cuda_graphs": True}},
    "fp16 with loss scaling": {"train": {"precision": "fp16"}},
    "8-bit products (fp8)": {"train": {"precision": "fp8"}},
    "delayed fp8 scales": {"train": {"precision": "fp8"}, "float8": {"amax": "delayed"}},
    "4-bit products (nvfp4)": {"train": {"precision": "nvfp4"}},
    "bf16 weights": {"train": {"precision": "bf16-weights"}},
    "gradient clipping": {"optimizer": {"clip_norm": 1.0}},
    "Muon": {"optimizer": {"name": "muon"}},
    "Adafactor": {"optimizer": {"name": "adafactor"}},
    "8-bit Adam": {"optimizer": {"name": "adam8bit"}},
    "Sophia-G": {"optimizer": {"name": "sophia-g"}},
    "Sophia-H": {"optimizer": {"name": "sophia-h"}},
    "in-memory checkpoints": {"failover": {"memory_every": 10}},
    "fewer replicas after a loss": {"parallel": {"dp": 2}, "failover": {"memory_every": 10, "shrink": "replicas"}},
    "comparison of replicas": {"failover": {"check_replicas_every": 10}},
    "loss spike detection": {"failover": {"spike_factor": 10.0}},
    "straggler reports": {"failover": {"stragglers_every": 10}},
    "re-execution": {"failover": {"reexecute_every": 10}},
    "step profile": {"metrics": {"profile": True}},
    "histograms": {"metrics": {"histograms": 10}},
}
"""Config values of an example run of each technique."""

_DEGREES = ("dp", "tp", "cp", "pp", "ep")


class Cell(NamedTuple):
    """A pair of techniques."""

    conflict: Conflict | None = None  # the row that rejects the pair; None if it is supported
    same_choice: bool = False  # whether they are two values of one setting


def build_matrix() -> dict[tuple[str, str], Cell]:
    """Build the cells of all pairs of techniques, in the order of `TECHNIQUES`."""
    runs = {pair: example_run(*pair) for pair in combinations(TECHNIQUES, 2)}
    return {pair: Cell(find_conflict(run)) if run else Cell(same_choice=True) for pair, run in runs.items()}


def example_run(*techniques: str) -> CheckedRun | None:
    """Return a run that uses some techniques, or None if two of them are values of one setting."""
    values: dict[str, dict[str, Any]] = {}
    for technique in techniques:
        for section, fields in TECHNIQUES[technique].items():
            merged = values.setdefault(section, {})
            for name, value in fields.items():
                if name in _DEGREES:
                    value = max(value, merged.get(name, 1))
                elif merged.get(name, value) != value:
                    return None
                merged[name] = value
    values["optimizer"] = {"clip_norm": 0.0} | values.get("optimizer", {})
    config = build_config(values)
    return CheckedRun(config, config.model.shape(vocab=257, sequence_length=config.data.sequence_length))
