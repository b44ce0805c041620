"""Description of a run to estimate: model, layout, cluster and batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shoal.spec.catalog import ModelShape
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.catalog.software import AttentionKernel, Software, find_software
from shoal.spec.config import Float8Config, OptimizerConfig
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS, Formats
from shoal.spec.optimizers import ESTIMATES

KINDS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}  # names of peak rates
CUDNN = ("hopper", "blackwell", "blackwell-ultra")  # whose attention is cuDNN's


@dataclass(frozen=True)
class EstimatedRun:
    """A run to estimate.

    Attributes:
        software: the software that trains: shoal itself, or another (`shoal estimate --software`).
        attention: sdpa, torch's kernel (FlashAttention on accelerators), or explicit, unfused operations.
        document_mask: attention stays inside documents: without `by_lengths` the kernel reads a mask, and skips no
            score.
        hessian_every: steps between Sophia's Hessian estimates.
        float8: how 8-bit products are computed; affects only the stored activations, not the time.
    """

    shape: ModelShape
    layout: Layout
    cluster: Cluster
    sequence_length: int
    global_batch: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    attention: Literal["sdpa", "explicit"] = "sdpa"
    document_mask: bool = False
    hessian_every: int = OptimizerConfig.model_fields["hessian_every"].default
    float8: Float8Config = field(default_factory=Float8Config)
    software: Software = field(default_factory=lambda: find_software("shoal"))

    @property
    def policy(self) -> Formats:
        return FORMATS[self.precision]

    @property
    def fuses(self) -> bool:
        """True if operators are fused (`shoal.engine.kernels`): on accelerators, unless in fp64."""
        return self.cluster.accelerator.is_gpu and self.policy.compute.itemsize < 8

    @property
    def by_lengths(self) -> bool:
        """True if attention takes lengths of documents and windows instead of a mask: flash, on accelerators.

        The rule is that of `shoal.engine.models.attention_kernels`; documents are priced as one, in full.
        """
        if self.shape.softcap is not None:
            return False
        fits = self.shape.query_dim % 8 == 0 and self.shape.query_dim <= 256
        return self.attention == "sdpa" and self.policy.compute.itemsize == 2 and fits and self.cluster.at_once is None

    @property
    def flash(self) -> AttentionKernel:
        """The fused attention kernel.

        shoal's own is cuDNN's on Hopper and Blackwell, as fast as FlashAttention-3, unless it takes lengths, a window
        or blocks of a ring (`shoal.engine.models.attention_kernels`): then, and elsewhere, it is FlashAttention-2.
        """
        ours = self.software.name == "shoal"
        lengths = self.by_lengths and (self.document_mask or self.shape.window is not None)
        has_cudnn = self.cluster.accelerator.generation in CUDNN and self.policy.compute.itemsize == 2
        slower = ours and (lengths or self.layout.cp_ring > 1 or not has_cudnn)
        return "flash-2" if slower else self.software.attention

    @property
    def products(self) -> str:
        """Format of the layers' products, as named in the accelerators' peaks.

        MXFP8 and NVFP4 are decoded to 16 bits first, except on accelerators that multiply them.
        """
        machine, kind = self.cluster.accelerator, self.policy.products
        if kind == "float8" or (kind == "mxfp8" and machine.generation in ("blackwell", "blackwell-ultra")):
            return "fp8"
        if kind == "nvfp4" and "fp4" in machine.peak_flops:
            return "fp4"
        return KINDS[self.policy.compute.name]

    @property
    def quantised(self) -> bool:
        """True if the layers' products are computed in 8 or 4 bits."""
        return self.products in ("fp8", "fp4")

    @property
    def computed_scores(self) -> float:
        """Scores that fused attention computes, relative to the causal half; the mean over layers.

        A kernel that reads a window from a mask computes them all.
        """
        s, window = self.sequence_length, self.shape.window
        if window is None or window >= s:
            return 1.0
        local = sum(self.shape.reach(layer) is not None for layer in range(self.shape.layers)) / self.shape.layers
        seen = window * (s if self.shape.chunked else 2 * s - window) / s**2
        each = seen if self.by_lengths else 1.0 if self.document_mask else 2.0
        return 1 + local * (each - 1)

    @property
    def passes(self) -> float:
        """Forward-backward passes per step for one gradient; more than 1 with Sophia's Hessian estimates."""
        return 1 + ESTIMATES.get(self.optimizer, 0) / self.hessian_every

    @property
    def tokens(self) -> int:
        return self.global_batch * self.sequence_length

    @property
    def microbatches(self) -> int:
        return self.layout.microbatches(self.global_batch)
