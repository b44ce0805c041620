"""A Llama of Hugging Face transformers as a model of one's own: trained by `shoal.Run`'s engine, and by the libraries
that parallelise any module.

Each function builds one rank of a variant and returns its step. Accelerate, Fabric and DeepSpeed race where they are
installed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shoal.engine.collectives.mesh import Mesh
from shoal.engine.own.definition import PICKLED, OwnModel, save_own_model
from shoal.engine.own.samples import OwnDataset
from shoal.labs.bench.optimizers import build_torch
from shoal.labs.bench.step.torch_baselines import build_loop, wrap_ddp
from shoal.labs.bench.step.workload import OPTIMIZER, SEED, Step, Workload, engine_step, make_layout
from shoal.spec.config import DataConfig, RunConfig
from shoal.spec.config.model import ModelConfig
from shoal.spec.config.sections import TrainConfig
from shoal.training.step.own_engine import OwnEngine


@lru_cache(maxsize=1)
def define_llama(workload: Workload) -> OwnModel:
    """Define transformers' Llama of the workload's shape, its usual loss, and the workload's samples."""
    shape = workload.shape

    def model() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(
            vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            max_position_embeddings=shape.max_sequence, use_cache=False,
        ))  # fmt: skip

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        logits = model(input_ids=batch["tokens"]).logits
        targets = batch["targets"].flatten()
        return F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"), targets.numel()

    def sample(index: int) -> dict[str, Tensor]:
        batch = workload.samples.batch([index])
        return {"tokens": batch.tokens[0], "targets": batch.targets[0]}

    samples = [sample(i) for i in range(workload.samples.repeats)]
    return OwnModel(model, loss, samples, blocks=tuple(f"model.layers.{i}" for i in range(shape.layers)))


def own_step(workload: Workload, rank: int, ranks: int, **layout: Any) -> Step:
    """Build a training step of shoal on a layout of the own model."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        file, own = Path(folder) / f"own{PICKLED}", define_llama(workload)
        save_own_model(own, file)
        config = RunConfig(
            model=ModelConfig(name=workload.model, module=str(file)),
            parallel=make_layout(workload, ranks, **layout),
            train=TrainConfig(global_batch=workload.sequences, seed=SEED, device="cpu"),
            data=DataConfig(sequence_length=workload.sequence_length), optimizer=OPTIMIZER,
        )
        engine = OwnEngine(config, workload.shape, Mesh(config.parallel, rank), OwnDataset(own, "train", SEED))
    return engine_step(engine, rank)


def _build_module(workload: Workload) -> tuple[Any, Any]:
    """Return the module in training, and its optimizer."""
    module = define_llama(workload).build(SEED).train()
    return module, build_torch(OPTIMIZER, module.parameters(), "fused")


def _train(
    workload: Workload, rank: int, ranks: int, module: nn.Module, optimizer: Any = None, *, sharded_batch: bool = True,
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> Step:
    """Build the step of a prepared module, on this rank's part of the batch or on the full batch."""
    own = define_llama(workload)
    samples, n = OwnDataset(own, "train", SEED), workload.sequences // (ranks if sharded_batch else 1)

    def compute_loss(number: int) -> Tensor:
        start = number * workload.sequences + (rank * n if sharded_batch else 0)
        total, terms = own.loss(module, samples.batch(range(start, start + n)).values)
        return total / terms

    optimizer = optimizer or build_torch(OPTIMIZER, module.parameters(), "fused")
    return build_loop(optimizer, compute_loss, ranks, backward=backward)


def own_ddp(workload: Workload, rank: int, ranks: int, *, bucket_mb: float) -> Step:
    """DistributedDataParallel, which averages gradients over the ranks."""
    module, _ = _build_module(workload)
    return _train(workload, rank, ranks, wrap_ddp(module, bucket_mb))


def own_fsdp(workload: Workload, rank: int, ranks: int) -> Step:
    """FSDP2: `fully_shard` on each layer and on the model."""
    (module, _), mesh = _build_module(workload), init_device_mesh("cpu", (ranks,))
    for part in (*module.model.layers, module):
        fully_shard(part, mesh=mesh)
    return _train(workload, rank, ranks, module)


def own_dtensor(workload: Workload, rank: int, ranks: int) -> Step:
    """DTensor's `parallelize_module` of all projections, the embedding and the head."""
    module, _ = _build_module(workload)
    column = {f"model.layers.*.{name}": ColwiseParallel() for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")}  # fmt: skip
    row = {f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    ends = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(module, init_device_mesh("cpu", (ranks,)), {**column, **row, **ends})
    return _train(workload, rank, ranks, module, sharded_batch=False)


def own_accelerate(workload: Workload, rank: int, ranks: int) -> Step:
    """Hugging Face Accelerate, which wraps DistributedDataParallel."""
    from accelerate import Accelerator

    _tell_ranks(rank, ranks)
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(*_build_module(workload))
    return _train(workload, rank, ranks, *prepared, backward=accelerator.backward)


def own_fabric(workload: Workload, rank: int, ranks: int) -> Step:
    """Lightning Fabric, which wraps DistributedDataParallel."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment

    _tell_ranks(rank, ranks)
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp", plugins=[TorchElasticEnvironment()])
    fabric.launch()
    return _train(workload, rank, ranks, *fabric.setup(*_build_module(workload)), backward=fabric.backward)


def own_deepspeed(workload: Workload, rank: int, ranks: int) -> Step:
    """DeepSpeed's ZeRO-1."""
    import deepspeed

    _tell_ranks(rank, ranks)
    deepspeed.init_distributed("gloo")
    module, optimizer = _build_module(workload)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": workload.sequences // ranks, "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 1, "overlap_comm": True},
    })  # fmt: skip
    update = SimpleNamespace(step=engine.step, zero_grad=lambda set_to_none: None)  # the step clears the gradients
    return _train(workload, rank, ranks, engine, update, backward=engine.backward)


def _tell_ranks(rank: int, ranks: int) -> None:
    """Set what torchrun sets, by which these libraries find the process group that exists."""
    os.environ.update({
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "bench",
    })  # fmt: skip


LIBRARIES: dict[str, Callable[..., Step]] = {
    name: build
    for name, package, build in (
        ("Accelerate", "accelerate", own_accelerate), ("Fabric", "lightning_fabric", own_fabric),
        ("DeepSpeed ZeRO-1", "deepspeed", own_deepspeed),
    ) if find_spec(package)
}  # fmt: skip
"""The libraries that are installed."""
