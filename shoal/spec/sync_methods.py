"""The methods of relaxed data parallelism (``parallel.sync``) by kind, and the settings that each one reads."""

COMPRESSED = ("powersgd", "topk", "onebit", "int8")
"""All-reduce of compressed gradients."""

LOCAL = ("local-sgd", "diloco")
"""Replicas that average their weights every few steps."""

SERVED = ("ps-bsp", "ps-ssp", "ps-async")
"""Replicas around a parameter server."""

UNSYNCHRONISED = (*SERVED, "hogwild", "sgp", "wagma")
"""Replicas that read and write the same memory and do not wait for all others."""

POOLED = ("ps-async", "hogwild")
"""Methods whose replicas may run different numbers of steps."""

READ_BY = {
    "staleness": ("ps-ssp", "sgp", "wagma"),
    "staleness_aware": ("ps-ssp", "ps-async"),
    "local_steps": LOCAL,
    "outer_learning_rate": ("diloco",),
    "outer_momentum": ("diloco",),
    "outer_int8": LOCAL,
    "block": ("onebit", "int8", *LOCAL),
    "rank": ("powersgd",),
    "density": ("topk",),
    "group": ("wagma",),
    "global_every": ("wagma",),
}
"""The methods that read each field of section relaxed."""
