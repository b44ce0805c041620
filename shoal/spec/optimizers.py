"""Kinds of update rules by name, without torch. `shoal.engine.optim.build` builds the rules."""

ELEMENTWISE = ("sgd", "momentum", "adagrad", "adam", "adamw", "radam", "sage")
"""Rules that update each element on its own, from its gradient, with per-element states."""
ESTIMATES = {"sophia-g": 1, "sophia-h": 2}
"""Number of forward and backward passes in one curvature estimate, for rules that use one."""

_CURVATURE = tuple(ESTIMATES)
_MOMENTS = ("adam", "adamw", "radam", "adam8bit", "sage", "muon", *_CURVATURE)
READ_BY = {
    "betas": _MOMENTS, "eps": (*_MOMENTS, "adagrad"), "momentum": ("momentum", "muon"), "nesterov": ("momentum",),
    "sensitivity_beta": ("sage",), "hessian_every": _CURVATURE, "hessian_scale": _CURVATURE,
    "from_weights": ("adam", "adamw"),
}  # fmt: skip
"""For each optimizer setting that some rules ignore, the rules that read it."""
SCHEDULED_BY = {"decay_fraction": ("wsd",), "min_lr_fraction": ("cosine", "linear", "wsd", "inverse-sqrt")}
"""For each optimizer setting that some learning-rate schedules ignore, the schedules that read it."""

SOPHIA_PRECISIONS = {"sophia-g": ("fp32", "bf16", "bf16-sums", "fp64"), "sophia-h": ("fp32", "fp64")}
"""The precisions in which the curvature estimate of each Sophia variant is meaningful."""


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether rules treat a parameter as a matrix, or as several: weight decay is for these alone.

    >>> is_matrix("layers.0.mlp.experts.up", (8, 64, 32)), is_matrix("layers.0.mlp.experts.up_bias", (8, 64))
    (True, False)
    """
    return len(shape) > 1 and not name.endswith("bias")
