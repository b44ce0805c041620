"""Kinds of update rules by their names, without torch. `shoal.engine.optim.build` has the rules."""

ELEMENTWISE = ("sgd", "momentum", "adagrad", "adam", "adamw", "radam", "sage")
"""Rules that update every element by itself, from its gradient alone, with states that are numbers of each."""
ESTIMATES = {"sophia-g": 1, "sophia-h": 2}
"""Forwards and backwards of an estimate of the curvature, by the rules that need some."""

_CURVATURE = tuple(ESTIMATES)
_MOMENTS = ("adam", "adamw", "radam", "adam8bit", "sage", "muon", *_CURVATURE)
READ_BY = {
    "betas": _MOMENTS, "eps": (*_MOMENTS, "adagrad"), "momentum": ("momentum", "muon"), "nesterov": ("momentum",),
    "sensitivity_beta": ("sage",), "hessian_every": _CURVATURE, "hessian_scale": _CURVATURE,
}  # fmt: skip
"""Of the settings of section optimizer that not every rule reads, the rules that do."""
SCHEDULED_BY = {"decay_fraction": ("wsd",), "minimum": ("cosine", "linear", "wsd", "inverse-sqrt")}
"""Of those that not every learning-rate schedule reads, the schedules that do."""

SOPHIA_PRECISIONS = {"sophia-g": ("fp32", "bf16", "bf16-sums", "fp64"), "sophia-h": ("fp32", "fp64")}
"""The precisions in which the curvature estimate of each Sophia means something."""
