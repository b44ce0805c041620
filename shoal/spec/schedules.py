"""Kinds of pipeline schedules, by name. `shoal.pipeline.schedules` builds them."""

ASYNCHRONOUS = ("pipedream", "pipedream-2bw")
"""They update weights while micro-batches are in flight: what they compute is not one device's step."""

SLICED = ("terapipe",)
"""They cut sequences into slices."""

SPLIT_BACKWARD = (
    "zb-h1", "zb-h2", "interleaved-zb", "zb-v", "v-half", "v-min", "zb-auto", "dualpipe", "dualpipev",
)  # fmt: skip
"""They compute gradients of activations and of weights apart from each other (zero bubble)."""
