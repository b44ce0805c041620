"""What is estimated: a model, how it is split, where, and on how much at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shoal.spec.catalog import ModelShape
from shoal.spec.catalog.clusters import Cluster
from shoal.spec.config import Float8Config, OptimizerConfig
from shoal.spec.layout import Layout
from shoal.spec.number_formats import FORMATS, Formats
from shoal.spec.optimizers import ESTIMATES

KINDS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}  # of the accelerators' peaks


@dataclass(frozen=True)
class EstimatedRun:
    """What is estimated.

    Attributes:
        attention: sdpa, torch's kernel, on accelerators a flash one; explicit, written out.
        document_mask: attention stays inside documents: the kernel reads a mask, and skips no score.
        hessian_every: steps from one estimate of sophia's to the next.
        float8: how products in 8 bits are made; it counts in what they keep, not in their time.
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

    @property
    def policy(self) -> Formats:
        """The number formats."""
        return FORMATS[self.precision]

    @property
    def eight_bits(self) -> bool:
        """Whether the layers' products are made in 8 bits: those of MXFP8's blocks are made in the compute format."""
        return self.policy.products == "float8"

    @property
    def products(self) -> str:
        """What the layers multiply, as accelerators name their peaks."""
        return "fp8" if self.eight_bits else KINDS[self.policy.compute.name]

    @property
    def passes(self) -> float:
        """Forwards and backwards of a step for one of its gradients: sophia's estimates have some of their own."""
        return 1 + ESTIMATES.get(self.optimizer, 0) / self.hessian_every

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.global_batch * self.sequence_length

    @property
    def microbatches(self) -> int:
        """Of each replica."""
        return self.layout.microbatches(self.global_batch)
