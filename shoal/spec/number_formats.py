"""Number formats of each precision, without torch. `shoal.engine.precision.policy` maps them to dtypes."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Format(NamedTuple):
    """A number format."""

    name: str  # the name of the torch dtype
    itemsize: int  # bytes per number
    digits: int  # bits of the fraction, without the leading one
    smallest: int  # exponent of 2 of the smallest normal number
    largest: float  # largest finite number

    @property
    def tiniest(self) -> int:
        """Exponent of 2 of the smallest positive (subnormal) number."""
        return self.smallest - self.digits


FP64 = Format("float64", 8, 52, -1022, (2 - 2.0**-52) * 2.0**1023)
FP32 = Format("float32", 4, 23, -126, (2 - 2.0**-23) * 2.0**127)
BF16 = Format("bfloat16", 2, 7, -126, (2 - 2.0**-7) * 2.0**127)
FP16 = Format("float16", 2, 10, -14, 65504.0)
# Micikevicius et al. 2022, "FP8 Formats for Deep Learning", table 1; e4m3 has no infinity (torch's "fn")
E4M3 = Format("float8_e4m3fn", 1, 3, -6, 448.0)
E5M2 = Format("float8_e5m2", 1, 2, -14, 57344.0)

# Open Compute Project 2023, "Microscaling Formats (MX) Specification", section 5.3.3: neither infinity nor NaN
E2M1 = Format("float4_e2m1", 1, 1, 0, 6.0)

MX_BLOCK = 32  # numbers that share a scale (OCP MX, section 5.2)
NV_BLOCK = 16  # numbers that share a scale in NVFP4 (NVIDIA 2025, "Pretraining Large Language Models with NVFP4")

Products = Literal["compute", "float8", "mxfp8", "nvfp4"]
BLOCKS: dict[Products, int] = {"mxfp8": MX_BLOCK, "nvfp4": NV_BLOCK}
"""Numbers that share a scale in formats that fix it."""


class Formats(NamedTuple):
    """The number formats of one precision."""

    storage: Format  # the weights that the optimizer updates
    compute: Format  # weights and activations in forward and backward
    reduce: Format  # gradients, summed over micro-batches and ranks
    state: Format  # the optimizer's moments
    # inputs of the layers' matrix products: "compute", or copies in 8 or 4 bits in that format
    products: Products = "compute"
    scaled: bool = False  # multiply the loss by a dynamic scale before backward
    what: str = ""  # description in words

    @property
    def master(self) -> bool:
        """Whether the optimizer updates master weights, separate from the weights used in forward and backward."""
        return self.storage != self.compute

    @property
    def narrow(self) -> bool:
        """Whether the updated weights are narrower than float32; updates are then rounded stochastically."""
        return self.storage.itemsize < FP32.itemsize

    @property
    def rounds(self) -> bool:
        """Whether an update rounds weights or optimizer states to fewer bits than it is computed with."""
        return self.narrow or self.state.itemsize < FP32.itemsize

    @property
    def widened(self) -> bool:
        """Whether an update is computed in a wider format than some of the values that it reads and writes."""
        return self.narrow or not self.storage == self.reduce == self.state


FORMATS = {
    "fp32": Formats(FP32, FP32, FP32, FP32, what="everything in float32"),
    # Micikevicius et al. 2018, section 3.1, with bfloat16, which needs no loss scaling (Kalamkar et al. 2019)
    "bf16": Formats(FP32, BF16, FP32, FP32, what="float32 master weights"),
    "bf16-sums": Formats(FP32, BF16, BF16, FP32, what="float32 master weights; gradients summed in bfloat16"),
    # DeepSeek-AI 2024, "DeepSeek-V3", section 3.3.3
    "bf16-moments": Formats(FP32, BF16, FP32, BF16, what="float32 master weights; moments rounded stochastically"),
    # Gupta et al. 2015, section 2.1; Zamirai et al. 2020, "Revisiting BFloat16 Training", algorithm 2
    "bf16-weights": Formats(BF16, BF16, FP32, FP32, what="no master weights: stochastic rounding"),
    "bf16-all": Formats(BF16, BF16, BF16, BF16, what="nothing wider than bfloat16: stochastic rounding"),
    # Micikevicius et al. 2018, sections 3.1 and 3.2
    "fp16": Formats(FP32, FP16, FP32, FP32, scaled=True, what="float32 master weights, dynamic loss scale"),
    "fp16-unscaled": Formats(FP32, FP16, FP32, FP32, what="float32 master weights; small gradients are lost"),
    # Micikevicius et al. 2022; section float8 of a run has the settings
    "fp8": Formats(FP32, BF16, FP32, FP32, products="float8", what="bf16 with the layers' products in e4m3 and e5m2"),
    # Open Compute Project 2023, "Microscaling Formats (MX) Specification", version 1.0
    "mxfp8": Formats(FP32, BF16, FP32, FP32, products="mxfp8", what="bf16 with the layers' products in MXFP8"),
    # NVIDIA 2025, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), section 4
    "nvfp4": Formats(FP32, BF16, FP32, FP32, products="nvfp4", what="bf16 with the layers' products in NVFP4"),
    "fp64": Formats(FP64, FP64, FP64, FP64, what="everything in float64, for verification"),
}
FORMATS |= {  # float64 variants, in which all layouts must agree to 1e-9, of precisions that do more than round
    f"fp64-{name}": formats._replace(
        storage=FP64, compute=FP64, reduce=FP64, state=FP64, what=f"as {formats.what}; in float64"
    )
    for name, formats in FORMATS.items() if formats.scaled or formats.products != "compute"
}  # fmt: skip
"""Number formats by the name in ``train.precision``."""


def verified_as(name: str) -> str:
    """Return the float64 precision in which layouts of this precision are compared to 1e-9."""
    return name if name.startswith("fp64") else f"fp64-{name}" if f"fp64-{name}" in FORMATS else "fp64"
