"""A model on one rank of a layout: its stages, their weights, and passes without backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from shoal.base.boxes import Piece
from shoal.base.files import expanded
from shoal.engine.checkpoint.hugging_face import HFWeights
from shoal.engine.collectives.group import Group
from shoal.engine.collectives.mesh import Mesh
from shoal.engine.collectives.ops import all_gather, all_reduce, to_host
from shoal.engine.data.batches import Batch, CompleteDataset, Dataset
from shoal.engine.models.cache import Slice
from shoal.engine.models.initial import on_meta
from shoal.engine.models.transformer import Transformer
from shoal.engine.parallel.apply import LocalStage, build_stages, initialise
from shoal.engine.parallel.context.causal_blocks import token_positions
from shoal.engine.parallel.context.token_order import assign_tokens
from shoal.engine.parallel.float8.apply import Float8
from shoal.engine.parallel.zero.rank_parameters import RankParameters
from shoal.engine.precision.policy import POLICIES
from shoal.engine.runtime import Runtime
from shoal.engine.streams import to_device
from shoal.pipeline.checker import check_program
from shoal.pipeline.from_layout import build_forwards, build_layout_program, choose_slices
from shoal.pipeline.program import Program
from shoal.spec.catalog import ModelShape
from shoal.spec.config import RunConfig
from shoal.training.step.routing import ExpertRouting
from shoal.training.step.source_losses import SourceLosses

MOST_PASSES = 64  # forward passes whose batches are on the device at once


class SummedLoss(NamedTuple):
    """Loss over some samples: the sum [nats], and the number of targets that count in it."""

    nats: float
    tokens: int

    @property
    def mean(self) -> float:
        """Loss [nats per token]; 0 without any."""
        return self.nats / max(1, self.tokens)


class ModelState:
    """Model stages of this rank, and passes through the full model that all ranks compute together.

    Args:
        trained: whether the parameters get gradients; without, no memory is allocated for them.

    Attributes:
        sync_mesh: ranks that are synchronised in every step. With parallel.sync this is one replica, and the method
            synchronises the replicas.
        validated: metrics of the expert routers and losses of the sources in the last validation.
    """

    def __init__(self, config: RunConfig, shape: ModelShape, mesh: Mesh, *, trained: bool = False):
        self.config, self.shape, self.mesh = config, shape, mesh
        layout, train = config.parallel, config.train
        self.policy = POLICIES[train.precision]
        self.microbatches = layout.microbatches(train.global_batch)
        self.slices = choose_slices(
            layout, shape, microbatches=self.microbatches, sequence_length=config.data.sequence_length
        )
        paired = layout.overlaps_rows(background=mesh.device.type != "cpu") and not mesh.is_dry_run
        self.program = build_layout_program(layout, self.microbatches, len(self.slices), paired=paired)
        check_program(self.program, tied=shape.shares_ends)
        self.spread = assign_tokens(layout, config.data.sequence_length, self.slices)
        self.float8 = Float8.from_policy(self.policy, config.float8, shape, mesh.device, train.seed)
        self.sync_mesh = mesh if layout.sync == "all-reduce" else mesh.replica()
        # Creating a group blocks its ranks and stalls in-flight transfers, so create groups before the first step.
        for view, axis in ((mesh, "world"), (self.sync_mesh, "world"), (mesh, "dp")):
            view.group(axis)
        self.stages, self.parameters = self.build_stages(trained)
        self.routing = ExpertRouting(self.stages, self.program, mesh, shape) if shape.experts else None
        self.validated: dict[str, Any] = {}

    def build_stages(self, trained: bool) -> tuple[list[LocalStage], RankParameters]:
        """Build this rank's stages, with undefined parameters."""
        train = self.config.train
        return build_stages(
            self.shape, self.program, self.sync_mesh, self.policy, self.spread,
            kernel=attention_kernel(train.attention, self.mesh.device, self.policy.compute), seed=train.seed,
            compile=train.compile, cuda_graphs=train.cuda_graphs, float8=self.float8, trained=trained,
        )

    def build_runtime(self, program: Program) -> Runtime:
        """Build the runtime that executes a program on this rank's stages."""
        layout, rank = self.config.parallel, self.mesh.index("cp")
        lengths = self.spread.lengths(rank)
        return Runtime(
            program, self.stages, self.sync_mesh,
            hidden_shape=(layout.micro_batch, sum(lengths) // layout.sequence_shards, self.shape.hidden // layout.tp_x),
            dtype=self.policy.compute, slices=lengths, cuda_graphs=self.config.train.cuda_graphs,
            tokens=token_positions(self.spread.chunks(rank), self.mesh.device) if layout.cp > 1 else None,
        )

    # ---- weights -------------------------------------------------------------------------------------------------

    def initialise(self) -> None:
        """Fill the parameters with the initial values of the run's seed."""
        initialise(self.parameters, self.shape, self.config.train.seed)

    @torch.no_grad()
    def read_weights(self, folder: Path) -> HFWeights:
        """Replace the weights by a model folder's, of which each rank reads its own pieces; return the folder."""
        weights = HFWeights(expanded(folder, "model.weights"), self.shape)
        for name, pieces in self.weights().items():
            for piece in pieces:
                weights.fill(name, piece)
        self.parameters.gather()
        return weights

    def describe_module(self) -> nn.Module:
        """Return the unsplit model without values: the names of all its modules and parameters."""
        with on_meta():
            return Transformer(self.shape)

    def weights(self) -> dict[str, list[Piece]]:
        """Return the model's pieces on this rank: parameters and router biases."""
        return self.parameters.weights() | (self.routing.state() if self.routing else {})

    # ---- loss ----------------------------------------------------------------------------------------------------

    @property
    def per_pass(self) -> int:
        """Number of samples in one forward pass of all replicas."""
        return self.config.parallel.micro_batch * self.config.parallel.dp

    def read_passes(self, samples: Dataset, first: int, passes: int) -> list[Batch]:
        """Return this replica's samples of consecutive forward passes from sample ``first`` on, on the host."""
        n, replica = self.config.parallel.micro_batch, self.mesh.index("dp")
        starts = [first + m * self.per_pass + replica * n for m in range(passes)]
        return [samples.batch(range(start, start + n)) for start in starts]

    def sum_loss(
        self, samples: Dataset, first: int, passes: int, by_source: SourceLosses | None = None
    ) -> SummedLoss:
        """Return the loss over consecutive samples, without gradients. Collective.

        Args:
            first: global index of the first sample.
            passes: number of forward passes of ``per_pass`` samples each.
            by_source: also sums the losses of each source of a mixture.
        """
        batches = self.read_passes(samples, first, passes)
        (tokens,) = self.count_tokens(batches, [0] * passes, self.mesh.group("dp"))
        runtime = self.build_runtime(build_forwards(self.program, passes))
        runtime.on_loss = by_source.add if by_source and by_source.names else None
        loss = runtime.evaluate([batch.to(self.mesh.device) for batch in batches]) * (self.mesh.index("tp") == 0)
        return SummedLoss(to_host(all_reduce(loss, self.mesh.group("world"))), tokens)

    def sum_complete(
        self, samples: CompleteDataset, sequences: int | None = None,
        show: Callable[[float, str], object] | None = None,
    ) -> SummedLoss:
        """Return the loss over all sequences of a data set, or the first ones, in its order. Collective.

        The last pass is filled up with sequences without targets, so every layout computes the same.

        Args:
            show: gets the completed fraction and a text, after some passes each.
        """
        limited = samples if sequences is None else samples.first(sequences)
        passes, total = -(-limited.samples // self.per_pass), SummedLoss(0.0, 0)
        for first in range(0, passes, MOST_PASSES):
            part = self.sum_loss(limited, first * self.per_pass, min(MOST_PASSES, passes - first))
            total = SummedLoss(total.nats + part.nats, total.tokens + part.tokens)
            if show:
                done = min(limited.samples, (first + MOST_PASSES) * self.per_pass)
                text = f"{done} of {limited.samples} sequences, loss {total.mean:.4f}"
                show(done / limited.samples, text)
        return total

    def count_tokens(self, batches: Sequence[Batch], updates: Sequence[int], replicas: Group | None) -> list[int]:
        """Return the number of unmasked targets in the micro-batches of each update, over all ``replicas``."""
        counts = torch.zeros(max(updates) + 1, dtype=torch.int64)
        for batch, update in zip(batches, updates, strict=True):
            counts[update] += batch.unmasked()
        if replicas is None:
            return counts.tolist()
        return to_host(all_reduce(to_device(counts, self.mesh.device), replicas))

    # ---- logits --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def logits(self, tokens: Tensor, part: Slice | None = None) -> Tensor:
        """Return the logits [b, s, v] of tokens [b, s], which must be equal on all ranks. Collective.

        Only ranks that hold the last stage get them (`is_last`); others return hidden states. All pipeline ranks get
        each stage's output. Not for context or sequence parallelism, in which a rank holds a part of the tokens.

        Args:
            part: the slice that the tokens form, if sequences come in slices.
        """
        own = {stage.index: stage.module for stage in self.stages}
        x = torch.zeros((*tokens.shape, self.shape.hidden), dtype=self.policy.compute, device=self.mesh.device)
        for index in range(self.program.depth):
            module = own.get(index)
            out = module(tokens, hidden=x, part=part) if module is not None else torch.zeros_like(x)
            if index < self.program.depth - 1:
                x = all_reduce(out, self.mesh.group("pp"))
        if not self.is_last:
            return x
        return all_gather(out, self.mesh.group("tp"), dim=2)[..., : self.shape.vocab]

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, which returns logits."""
        return any(stage.index == self.program.depth - 1 for stage in self.stages)

    def share(self, values: Tensor) -> Tensor:
        """Return on all ranks the float64 values that the first rank of the last stage passes. Collective."""
        mine = self.is_last and self.mesh.index("tp") == 0
        return all_reduce(values.to(self.mesh.device) * mine, self.mesh.group("world"))


def attention_kernel(
    choice: Literal["auto", "sdpa", "explicit"], device: torch.device, dtype: torch.dtype
) -> Literal["sdpa", "explicit"]:
    """Resolve the attention kernel of a run.

    "auto" takes the fastest of `shoal bench attention`: sdpa, except for bf16 on the CPU, where torch's kernel is slow.
    """
    if choice != "auto":
        return choice
    return "explicit" if device.type == "cpu" and dtype == torch.bfloat16 else "sdpa"
